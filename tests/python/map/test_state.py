"""Thread-local state is separate for each instance."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import greenlet
import pytest
import torch
import torch_autobatch as ab
from mapping import agree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

DOUBLE = torch.float64


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 3, dtype=DOUBLE)


def inputs(count: int = 6) -> list[tuple[int, Tensor]]:
    return [(i, torch.randn(2, 3, dtype=DOUBLE)) for i in range(count)]


class Doubling(TorchFunctionMode):
    """Doubles the result of ``torch.tanh``."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = f(*args, **(kwargs or {}))
        return result * 2 if f is torch.tanh else result


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def state() -> tuple[Any, ...]:
    """Returns all state that the contexts below change."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.tanh(torch.ones(())).item() > 1,
        torch._C._dispatch_tls_is_dispatch_key_excluded("AutogradCPU"),
    )


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_half": lambda: torch.autocast("cpu", torch.float16),
    "default_dtype": lambda: default_dtype(DOUBLE),
    "function_mode": Doubling,
    "device": lambda: torch.device("cpu"),
    "below_autograd": torch._C._AutoDispatchBelowAutograd,
    "saved_hooks": lambda: torch.autograd.graph.save_on_cpu(),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_of_some_instances(layer: nn.Linear, name: str) -> None:
    """Every second instance reads inside a context. The others do not observe the context."""

    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        seen = [state()]
        with CONTEXTS[name]() if i % 2 else contextlib.nullcontext():
            h = layer(x) if name != "below_autograd" else layer(x).detach()
            h.sum().item()
            seen.append(state())
            h = torch.tanh(h)
            h.sum().item()
            seen.append(state())
            made = torch.ones(2)
            y = h * 2
        seen.append(state())
        h.sum().item()
        seen.append(state())
        return seen, h.float(), y.float(), made, h.requires_grad

    if "autocast" in name:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("mapping.same.__defaults__", (5e-2,))
            agree(function, inputs())
    else:
        agree(function, inputs(), layer)


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_around_all(layer: nn.Linear, name: str) -> None:
    def function(pair: tuple[int, Tensor]) -> Any:
        h = torch.tanh(pair[1] * layer.weight.detach()[0])
        seen = [h.sum().item(), state()]
        with torch.set_grad_enabled(pair[0] % 2 == 0):
            seen.append((h * 2).sum().item())
            seen.append(state())
        return seen, h

    with CONTEXTS[name]():
        before = state()
        agree(function, inputs())
        assert state() == before


def test_a_mode_left_set_is_not_the_next_ones(layer: nn.Linear) -> None:
    """Instances behave as if each one had a separate thread."""

    def function(pair: tuple[int, Tensor]) -> bool:
        i, x = pair
        enabled = torch.is_grad_enabled()
        layer(x).sum().item()
        enabled = enabled and torch.is_grad_enabled()
        if i == 0:
            torch.set_grad_enabled(False)
            torch.set_default_dtype(DOUBLE)
        layer(x).sum().item()
        return enabled and torch.is_grad_enabled() == (i != 0)

    assert all(ab.map(function, inputs()))
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


def test_context_variables(layer: nn.Linear) -> None:
    """Each instance has a copy of the caller's context."""
    variable = contextvars.ContextVar("variable", default=-1)
    variable.set(7)

    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        first = variable.get()
        variable.set(i)
        layer(x).sum().item()
        second = variable.get()
        layer(x).sum().item()
        return first, second, variable.get()

    found = ab.map(function, inputs())
    assert found == [(7, i, i) for i in range(6)]
    assert variable.get() == 7


def test_the_error_being_handled(layer: nn.Linear) -> None:
    """After a read in an ``except`` block, the handled error is still this instance's error."""

    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        try:
            raise ValueError(str(i))
        except ValueError:
            sign = layer(x).sum().item() > 0
            try:
                raise KeyError(i)
            except KeyError as error:
                layer(x).sum().item()
                return sign, str(error.__context__), error.args

    agree(function, inputs(), layer)


def test_warnings_of_pytorch_go_where_they_belong(layer: nn.Linear) -> None:
    """Calls of torch keep their warnings on the stack until they return."""

    def function(pair: tuple[int, Tensor]) -> Any:
        h = layer(pair[1])
        h.sum().item()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return h.sum().item() > 0, (h.T @ h).sum()

    agree(function, inputs(), layer)


def test_under_the_profiler(layer: nn.Linear) -> None:
    def function(pair: tuple[int, Tensor]) -> Any:
        with torch.profiler.record_function(f"instance {pair[0]}"):
            h = layer(pair[1])
            for _ in range(2):
                h = h * (1 if h.sum() > 0 else 2)
        return h

    with torch.profiler.profile():
        agree(function, inputs(), layer)


def test_transforms_and_dispatch_modes_within(layer: nn.Linear) -> None:
    """A fiber can't be suspended inside a transform or mode, so the read is immediate."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Plain(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    def function(pair: tuple[int, Tensor]) -> Any:
        h = layer(pair[1])
        other = layer(pair[1] * 2)
        summed = torch.vmap(lambda row: row.sum() * h.sum().item())(pair[1])
        with Plain():
            value = other.sum().item()
        return summed, value, layer(h).sum().item()

    agree(function, inputs(), layer)


def test_reads_in_hooks(layer: nn.Linear) -> None:
    """autograd's engine runs the hooks, so their reads are immediate."""

    def function(pair: tuple[int, Tensor]) -> Any:
        x = pair[1].clone().requires_grad_()
        seen = []
        h = layer(x)
        other = layer(x * 2).detach()
        h.register_hook(lambda g: seen.append((g.sum().item(), other.sum().item())))
        (g,) = torch.autograd.grad((h * h).sum(), [x])
        return seen, g

    agree(function, inputs())


def test_collections_run_meanwhile(layer: nn.Linear) -> None:
    """Python's collector may free tensors while fibers are suspended."""

    def function(pair: tuple[int, Tensor]) -> Any:
        x = pair[1]
        for _ in range(3):
            cycle: list[Any] = [layer(x)]
            cycle.append(cycle)
            x = layer(x).tanh()
            x.sum().item()
            del cycle
            gc.collect()
        return x

    agree(function, inputs(), layer)


def test_instances_go_from_one_to_the_next(layer: nn.Linear) -> None:
    """Some instances end or fail before the previous instance resumes, with different states."""
    greenlets: list[weakref.ref[greenlet.greenlet]] = []

    def function(i: int) -> Any:
        greenlets.append(weakref.ref(greenlet.getcurrent()))
        x = torch.full((3,), float(i), dtype=torch.float64)
        seen = []
        for step in range(7 - i % 4 * 2):
            with torch.set_grad_enabled((i + step) % 3 != 0):
                x = layer(x).tanh()
                seen.append((x.sum().item(), torch.is_grad_enabled()))
            if i == 5 and step == 2:
                raise ValueError("five")
        return seen, x.requires_grad

    expected = []
    for i in range(12):
        try:
            expected.append(function(i))
        except ValueError as error:
            expected.append(error)
    greenlets.clear()
    found = ab.map(function, range(12), return_exceptions=True)
    for want, got in zip(expected, found, strict=True):
        if isinstance(want, ValueError):
            assert str(got) == "five"
            assert got.__notes__ == ["in instance 5 of ab.map"]
        else:
            assert got[1] == want[1]
            for (a, mode), (b, other) in zip(want[0], got[0], strict=True):
                assert mode == other
                assert abs(a - b) < 1e-12
    del found, got
    gc.collect()
    assert len(greenlets) == 12
    assert all(ref() is None for ref in greenlets)
