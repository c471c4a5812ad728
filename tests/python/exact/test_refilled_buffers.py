"""Buffers that are refilled through NumPy between two uses in a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import Blocks, differentiate, same, weight
from torch import Tensor, nn

BUFFER_USES: dict[str, Callable[[Tensor, Tensor, Tensor], list[Tensor]]] = {
    "on the right of @": lambda w, m, t: [w.detach() @ t],
    "on the right of @, trained": lambda w, m, t: [w @ t],
    "both": lambda w, m, t: [t * w, w.detach() @ t, t * w],
    "the same twice": lambda w, m, t: [w @ t, w @ t, w + t],
    "as a vector": lambda w, m, t: [m @ t, t @ m],
    "as a bias": lambda w, m, t: [F.linear(w * 1, m, t), F.layer_norm(w * 1, (3,), t, t)],
    "as a view": lambda w, m, t: [w * t[:3], w @ t.view(3), m @ t.view(3, 1)],
    "stacked": lambda w, m, t: [torch.stack([w, t])],
}


@pytest.mark.parametrize("made", ["numpy", "torch", "in the block"])
@pytest.mark.parametrize("use", BUFFER_USES)
def test_refilled_buffer(use: str, made: str) -> None:
    """An op reads the buffer's content at the time of the call, also if the buffer is a weight."""

    def program(block: Blocks) -> Any:
        w, m, results = weight(3), weight(3, 3), []
        t = torch.from_numpy(np.zeros(3)) if made == "numpy" else torch.zeros(3).double()
        with block():
            if made == "in the block":
                t = torch.zeros(3).double()
            buffer = t.numpy()
            for i in range(3):
                buffer[:] = np.arange(3) + i
                # Without the copy, eager's gradient would use the buffer's final contents.
                results.extend(BUFFER_USES[use](w, m, t if block.enabled else t.clone()))
        differentiate(results)
        return results, w, m

    same(program)


def test_buffer_given_away_after_its_first_use() -> None:
    """After this, the buffer is copied at each use."""

    def program(block: Blocks) -> Any:
        w, t = weight(3), torch.ones(3).double()
        with block() as scope:
            results = [w * t.clone(), w @ t.clone()]
            first = [w.detach() * t, w.detach() @ t]
            if block.enabled:
                scope.flush()
            buffer = t.numpy()
            for i in range(3):
                buffer[:] = i
                now = t if block.enabled else t.clone()
                results += [w * now, w @ now]
        differentiate(results)
        return first, results, w

    same(program)


def test_buffer_that_changes_its_sign_alone() -> None:
    """A change from 0 to -0 is a change of the content."""

    def program(block: Blocks) -> Any:
        w, buffer = weight(1), np.zeros(1)
        t = torch.from_numpy(buffer)
        with block():
            results = [1 / (w.detach() * 0 @ t + t)]
            buffer[:] = -0.0
            results += [1 / (w.detach() * 0 @ t * 0 + t), torch.mv(t[None], t).copysign(t)]
        return results

    same(program)


# Objects that give write access to the memory of the tensor.
ALIASES: dict[str, Callable[[Tensor], Any]] = {
    "detach().numpy()": lambda t: t.detach().numpy(),
    "data.numpy()": lambda t: t.data.numpy(),
    "a view's numpy()": lambda t: t.detach()[:].numpy(),
    "from_numpy()": lambda t: torch.from_numpy(t.detach().numpy()),
    "torch.from_dlpack()": lambda t: torch.from_dlpack(t.detach()),
    "np.from_dlpack()": lambda t: np.from_dlpack(t.detach()),  # type: ignore[arg-type]
    "asarray()": lambda t: np.asarray(t.detach()),
}


@pytest.mark.parametrize("trained", [True, False], ids=["parameter", "data"])
@pytest.mark.parametrize("when", ["at first", "after a use", "each time"])
@pytest.mark.parametrize("alias", ALIASES)
def test_written_through_an_alias(alias: str, when: str, trained: bool) -> None:
    """Tests writes that do not change eager's gradients."""

    def program(block: Blocks) -> Any:
        other, results = weight(3), []
        t = torch.ones(3).double().requires_grad_(trained)
        with block():
            written = ALIASES[alias](t) if when == "at first" else None
            for i in range(3):
                results += [t * 2 + other, F.linear(torch.ones(3).double(), t, other.sum())]
                if written is None or when == "each time":
                    written = ALIASES[alias](t)
                written[:] = 5.0 - i
        differentiate(results)
        return results, other, t.grad

    same(program)


def test_strided_memory_given_away_after_a_use() -> None:
    def program(block: Blocks) -> Any:
        w, t, results = weight(2), torch.ones(2, 6).double(), []
        column = t[:, ::3]
        with block():
            for i in range(3):
                results += [w * column, w @ column]
                column.numpy()[:] = i
        return results

    same(program)


@pytest.mark.parametrize("how", [lambda x: x.numpy(), torch.utils.dlpack.to_dlpack])
@pytest.mark.parametrize("enabled", [False, True])
def test_views_of_memory_that_is_given_away(how: Callable[[Tensor], Any], enabled: bool) -> None:
    """A pending view shares the memory before and after, so a write through the view reaches it."""
    x = torch.arange(4.0)
    linear = nn.Linear(2, 2)
    with ab.batch(enabled=enabled):
        pending = linear(x[:2])  # reads what x holds now
        view = x.narrow(0, 1, 2).unsqueeze(0)
        given = how(x.detach())
        view.zero_()
    assert view.data_ptr() == x.data_ptr() + x.element_size()
    assert x.tolist() == [0, 0, 0, 3]
    torch.testing.assert_close(pending, linear(torch.tensor([0.0, 1.0])))
    del given
