"""The dispatch key that capture uses, and its priority in the dispatcher."""

from __future__ import annotations

from typing import Any

import torch
import torch_autobatch as ab
from helpers_capture import is_pending
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_autobatch import _C


def is_included() -> bool:
    return torch._C._dispatch_tls_is_dispatch_key_included(
        _C.capture_key
    ) and not torch._C._dispatch_tls_is_dispatch_key_excluded(_C.capture_key)


def is_included_on_entry() -> bool:
    """Returns whether the key was included when the dispatcher called ``__torch_dispatch__``."""
    with torch.overrides.enable_reentrant_dispatch():
        return is_included()


class Mode(TorchDispatchMode):
    """Records whether capture was on when the op was called."""

    def __init__(self) -> None:
        super().__init__()
        self.captures: list[bool] = []

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.captures.append(is_included_on_entry())
        return f(*args, **(kwargs or {}))


class Wrapped(Tensor):
    """A subclass that records whether capture was on when the op was called."""

    captures: list[bool] = []  # noqa: RUF012

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.captures.append(is_included_on_entry())
        with torch._C._DisableTorchDispatch():
            return f(*args, **(kwargs or {}))


def test_the_key_is_on_in_a_block_alone() -> None:
    assert _C.capture_key in ("DeferredInit", "TESTING_ONLY_GenericMode")
    assert not is_included()
    with ab.batch():
        assert is_included()
        h = torch.ones(2, requires_grad=True) * 2
        assert is_pending(h)
    assert not is_included()


def test_a_dispatch_mode_may_go_back_to_the_keys_of_the_call() -> None:
    w, mode = torch.ones(2, requires_grad=True), Mode()
    with ab.batch():
        h = w * 2
        with mode:
            assert (w + 1).tolist() == [2.0, 2.0]  # with ordinary tensors
            assert (h + 1).tolist() == [3.0, 3.0]
    assert mode.captures
    assert all(mode.captures)


def test_a_subclass_may_go_back_to_the_keys_of_the_call() -> None:
    wrapped = torch.ones(2).as_subclass(Wrapped)
    Wrapped.captures.clear()
    with ab.batch():
        assert torch.tanh(wrapped).shape == (2,)
        assert torch.addmv(wrapped, torch.ones(2, 2), torch.ones(2)).shape == (2,)
    assert len(Wrapped.captures) >= 2
    assert all(Wrapped.captures)


def test_transforms_come_before_capture() -> None:
    """Inner functions get tensors of the transform, and pending tensors are computed first."""
    w = torch.randn(3, requires_grad=True)
    x = torch.randn(4, 3)
    with ab.batch():
        h = w * 2
        batched = torch.vmap(lambda row: (row * h).tanh().sum())(x)
        gradient = torch.func.grad(lambda v: (v * h).sin().sum())(x[0])
        nested = torch.vmap(torch.func.grad(lambda v: (v @ h).exp()))(x)
    torch.testing.assert_close(batched, (x * (w * 2)).tanh().sum(1))
    torch.testing.assert_close(gradient, (x[0] * w * 2).cos() * w * 2)
    torch.testing.assert_close(nested, (x @ (w * 2)).exp()[:, None] * (w * 2))
