"""The fast path from Python methods and functions to capture behaves like PyTorch's bindings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Op = Callable[[Any, Any], Any]


def leaf(k: int, rows: int = 4) -> Tensor:
    return (torch.sin(torch.arange(4.0 * rows) + k).view(rows, 4) + 2).requires_grad_()


def flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def run(op: Op, enabled: bool) -> list[Any]:
    """Returns the op's results for three pairs, with gradients and container types."""
    leaves = [leaf(k) for k in range(6)]
    with ab.batch(enabled=enabled):
        # From the second call on, the call is cached.
        results = [op(x.cos(), y * 1) for x, y in zip(leaves[::2], leaves[1::2], strict=True)]
        total = sum(((r * r).sum() for result in results for r in flat(result)), torch.zeros(()))
    total.backward()
    values = [r for result in results for r in flat(result)]
    return [type(r) for r in results] + values + [x.grad for x in leaves]


def check(op: Op) -> None:
    for ours, eager in zip(run(op, True), run(op, False), strict=True):
        if isinstance(eager, Tensor):
            torch.testing.assert_close(ours, eager)
            assert ours.stride() == eager.stride()
        else:
            assert ours == eager


BY_NAME: dict[str, Any] = {"dim": 1}
CALLS: dict[str, Op] = {
    "add": lambda x, y: x + y,
    "add a number": lambda x, y: (x + 2) * 0.5 + 3.5,
    "a number first": lambda x, y: 2 + x + (3 * y) + (1 - x),
    "add True": lambda x, y: x + True,
    "add of a scalar tensor": lambda x, y: x + torch.tensor(2.0),
    "sub": lambda x, y: x - y - 1 - 0.25,
    "mul": lambda x, y: x * y * 2 * 0.5,
    "div": lambda x, y: x / y / 2 / 0.5,
    "matmul": lambda x, y: x @ y,
    "neg": lambda x, y: -x,
    "methods with numbers": lambda x, y: x.add(2).mul(0.5).sub(1),
    "alpha": lambda x, y: x.add(y, alpha=2) + torch.sub(x, y, alpha=0.5),
    "unary methods": lambda x, y: x.tanh() + x.sigmoid() + x.relu() + x.exp() + y.log(),
    "unary functions": lambda x, y: torch.tanh(x) + torch.sigmoid(x) + torch.relu(x),
    "exp, log": lambda x, y: torch.exp(x) + torch.log(input=y),
    "products": lambda x, y: x.mm(y) + torch.mm(x, mat2=y) + x.matmul(other=y),
    "bmm": lambda x, y: x.view(1, 4, 4).bmm(y.view(1, 4, 4)),
    "addmm": lambda x, y: torch.addmm(x, x, y) + torch.addmm(x, x, y, beta=0.5, alpha=2),
    "cat of a tuple": lambda x, y: torch.cat((x, y)),
    "cat of a list": lambda x, y: torch.cat([x, y], -1),
    "cat by name": lambda x, y: torch.cat(tensors=[x, y], dim=1),
    "cat, axis": lambda x, y: torch.cat([x, y], axis=1),
    "stack": lambda x, y: torch.stack([x, y], dim=1),
    "chunk": lambda x, y: x.chunk(2) + y.chunk(3, dim=-1) + torch.chunk(x, 2, 1),
    "chunk in one": lambda x, y: x.chunk(1),
    "split": lambda x, y: x.split(3) + torch.split(y, 2, dim=1) + x.split([1, 3]),
    "unbind": lambda x, y: x.unbind() + torch.unbind(y, 1) + x.unbind(dim=-1),
    "select": lambda x, y: x.select(0, 1) + y.select(dim=1, index=-1),
    "narrow": lambda x, y: x.narrow(0, 1, 2) * y.narrow(dim=0, start=2, length=2),
    "narrow by a tensor": lambda x, y: x.narrow(0, torch.tensor(1), 2),
    "squeeze": lambda x, y: x.view(1, 4, 1, 4).squeeze() + y.view(4, 1, 4).squeeze(1),
    "squeeze of two": lambda x, y: x.view(1, 4, 1, 4).squeeze((0, 2)),
    "unsqueeze": lambda x, y: x.unsqueeze(0) + y.unsqueeze(dim=-1),
    "transpose": lambda x, y: x.transpose(0, 1) + y.transpose(dim0=-1, dim1=0) + x.t(),
    "permute": lambda x, y: x.permute(1, 0) + y.permute((1, 0)) + x.permute(dims=[1, 0]),
    "expand": lambda x, y: x[:1].expand(3, 4) + y[:1].expand((3, -1)) + x[:1].expand(size=(3, 4)),
    "view": lambda x, y: x.view(2, 8) + y.view((2, 8)) + x.view(-1).view([2, 8]),
    "view as a type": lambda x, y: x + y.detach().view(torch.int32).view(torch.float32),
    "reshape": lambda x, y: x.reshape(2, -1) + y.reshape((2, 8)) + x.reshape(16).reshape(2, 8),
    "sum": lambda x, y: x.sum() + y.sum(0) + x.sum(dim=(0, 1)) + y.sum(-1, keepdim=True),
    "sum, axis": lambda x, y: x.sum(axis=0) + torch.sum(y, [0], True) + torch.sum(x),
    "sum, dtype": lambda x, y: x.sum(dtype=torch.float64).float() + y.sum(0, dtype=None),
    "mean": lambda x, y: x.mean() + y.mean(0, True) + torch.mean(x, dim=1),
    "softmax": lambda x, y: x.softmax(-1) + y.log_softmax(dim=0),
    "softmax of a type": lambda x, y: x.softmax(0, torch.float64),
    "linear": lambda x, y: F.linear(x, y) + F.linear(x, y, None) + F.linear(x, y, bias=y[0]),
    "cross entropy": lambda x, y: F.cross_entropy(x, torch.tensor([0, 1, 2, 3]), ignore_index=1),
    "cross entropy, private": lambda x, y: torch._C._nn.cross_entropy_loss(x, y.softmax(-1)),
    "smoothed": lambda x, y: F.cross_entropy(x, y.softmax(-1), label_smoothing=0.1),
    "embedding": lambda x, y: (
        torch.embedding(x, torch.tensor([0, 2]))
        + F.embedding(torch.tensor([1, 2]), y, padding_idx=1)
    ),
    "div, named": lambda x, y: x.div(y) + torch.div(x, 2) + x.div(y, rounding_mode="floor"),
    "pow": lambda x, y: x.pow(2) + y.pow(0.5) + torch.pow(y, 3) + y.pow(x) + x**2,
    "clamp": lambda x, y: x.clamp(min=1) + x.clamp(0.5, 2) + torch.clamp(y, max=2.0) + x.clamp(y),
    "clamp_min": lambda x, y: x.clamp_min(1) + y.clamp_min(1.5),
    "comparisons": lambda x, y: (
        x * (x > 2).float()
        + (x == 2).float()
        + x.ge(y).float()
        + y.le(2.5).float()
        + (x != y).float()
    ),
    "masked_fill": lambda x, y: x.masked_fill(y > 2, 0) + y.masked_fill(x > 2, 1.5),
    "where": lambda x, y: torch.where(x > 2, x, y) + torch.where(y > 2, x, 0.0),
    "expand_as": lambda x, y: x[0].expand_as(y) * y + x[:, :1].expand_as(other=y),
    "view_as": lambda x, y: x.reshape(-1).view_as(y) + x.t().reshape_as(y),
    "new tensors": lambda x, y: (
        (x.new_zeros(4, 4) + y.new_ones((4, 4)) * x) + x.new_full([4], 2.0) + x.new_zeros(4).float()
    ),
    "new tensors of a type": lambda x, y: x * x.new_ones(4, 4, dtype=torch.float64),
    "gelu": lambda x, y: F.gelu(x) + F.gelu(y, approximate="tanh"),
    "leaky_relu": lambda x, y: F.leaky_relu(x - 2) + F.leaky_relu(y - 2, negative_slope=0.3),
    "scatter_reduce": lambda x, y: x.scatter_reduce(0, torch.arange(4)[None], y[:1], "amax"),
    "functions of views": lambda x, y: (
        torch.transpose(x, 0, 1) + torch.squeeze(torch.unsqueeze(y, 0), 0) + torch.softmax(x, -1)
    ),
    "arguments in a tuple": lambda x, y: torch.cat(*([x, y],), **BY_NAME),
    "unbound method": lambda x, y: Tensor.tanh(x) + Tensor.__add__(x, y) + Tensor.sum(y, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_eager_does(name: str) -> None:
    check(CALLS[name])


def test_cells_of_two_kinds() -> None:
    lstm, gru = nn.LSTMCell(4, 4), nn.GRUCell(4, 4)

    def weights(cell: nn.RNNCellBase) -> list[Tensor]:
        return [p.detach() for p in cell.parameters()]

    check(lambda x, y: torch.lstm_cell(x, (y, x), *weights(lstm)))
    check(lambda x, y: torch.gru_cell(x, y, *weights(gru)))


WRONG: dict[str, Op] = {
    "shapes": lambda x, y: x + y[:3],
    "a string": lambda x, y: x + "a",
    "None": lambda x, y: x * None,
    "dimension": lambda x, y: x.chunk(2, 5),
    "number of arguments": lambda x, y: x.tanh(1),
    "name": lambda x, y: x.sum(dimension=1),
    "an integer for a list": lambda x, y: x.view(size=16),
    "the first by its schema's name": lambda x, y: torch.tanh(self=x),
    "twice": lambda x, y: torch.cat([x, y], 0, dim=0),
    "a list of other things": lambda x, y: torch.cat([x, 1]),
    "an integer too large": lambda x, y: x.select(0, 2**70),
    "a float for an int": lambda x, y: x.select(0, 1.0),
    "product": lambda x, y: x @ 2,
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_are_eagers(name: str) -> None:
    def error(enabled: bool) -> str:
        x, y = leaf(0), leaf(1)
        with ab.batch(enabled=enabled):
            x, y = x.cos(), y.cos()
            x + y, x.chunk(2), x.select(0, 1), torch.cat([x, y]), x @ y, x.view(16), x.tanh()
            try:
                WRONG[name](x, y)
            except (RuntimeError, TypeError, ValueError, IndexError) as raised:
                message = str(raised).splitlines()[0].partition(" (while running")[0]
                return f"{type(raised).__name__}: {message}"
        pytest.fail("no error")

    assert error(True) == error(False)


def test_python_s_protocol_of_operators() -> None:
    class Other:
        calls: ClassVar[list[str]] = []

        def __add__(self, other: object) -> Any:
            self.calls.append("add")
            return NotImplemented

        def __radd__(self, other: object) -> str:
            self.calls.append("radd")
            return "radd"

    with ab.batch():
        x = leaf(0).cos()
        assert x + x is not None
        assert x + Other() == "radd"
        with pytest.raises(TypeError):
            Other() + x
    assert Other.calls == ["radd", "add"]


class Subclass(Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_see_their_calls() -> None:
    x, z = leaf(0), leaf(1).detach().as_subclass(Subclass)

    def calls() -> list[str]:
        Subclass.seen.clear()
        y = x.cos()
        y + y, y - y, torch.cat([y, y]), y.tanh()
        y + z, z + y, y - z, torch.cat([y, z]), z.tanh()
        return list(Subclass.seen)

    eager = calls()
    with ab.batch():
        assert calls() == eager


def test_modes_see_all_calls() -> None:
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kw or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kw or {}))

    seen: list[str] = []
    for mode in (Functions, Dispatch):
        expected = None
        for enabled in (False, True):
            with ab.batch(enabled=enabled):
                x = leaf(0).cos()
                x + x, x.tanh(), torch.cat([x, x])
                seen.clear()
                with mode():
                    x + x, x.tanh(), torch.cat([x, x])
            expected = expected or list(seen)
            assert seen == expected


def test_a_profiler_sees_the_calls() -> None:
    with ab.batch():
        x = leaf(0).cos()
        x.tanh(), x.tanh()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            x.tanh()
    assert "aten::tanh" in {event.name for event in profile.events()}


def test_replaced_functions_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def add(self: Tensor, other: Tensor) -> Tensor:
        calls.append("add")
        return self.mul(other)

    with ab.batch():
        x = leaf(0).cos()
        x + x, x.tanh()
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "__add__", add)
            patch.setattr(Tensor, "tanh", lambda self: self.sin())
            patch.setattr(torch, "cat", lambda tensors: tensors[0])
            sums, tanh, cat = x + x, x.tanh(), torch.cat([x, x])
        again = x + x
    assert calls == ["add"]
    torch.testing.assert_close(sums, x * x)
    torch.testing.assert_close(tanh, x.sin())
    torch.testing.assert_close(cat, x)
    torch.testing.assert_close(again, 2 * x)


def test_transforms_and_tracers_in_a_block() -> None:
    def f(x: Tensor) -> Tensor:
        return (x + x).tanh().sum()

    x = leaf(0)
    with ab.batch():
        y = x.cos()
        captured = [f(y), f(y)]
        grad = torch.func.grad(f)(x.detach())
        mapped = torch.vmap(f)(x.detach())
        traced = torch.jit.trace(f, x.detach())
        graph = fx.symbolic_trace(f)
    torch.testing.assert_close(captured[1], f(x.cos()))
    torch.testing.assert_close(grad, 2 * (1 - (2 * x).tanh() ** 2).detach())
    torch.testing.assert_close(mapped, (2 * x).tanh().sum(1).detach())
    assert "tanh" in str(traced.graph)
    assert "tanh" in graph.code


def test_gradient_mode_and_leaves_are_told_apart() -> None:
    x = leaf(0)
    with ab.batch():
        y = x.cos()
        recorded = [y + y, y + y]
        with torch.no_grad():
            plain = [y + y, y + y]
        cut = [z + z for z in (y.detach(), y.detach())]
    assert [t.requires_grad for t in recorded + plain + cut] == [True, True] + [False] * 4
    torch.testing.assert_close(cut[1], 2 * x.cos().detach())


def test_written_values_are_read() -> None:
    x = leaf(0)
    with ab.batch():
        y = x.cos()
        first = y + y
        y.mul_(2)
        second = y + y
    torch.testing.assert_close(first, 2 * x.cos())
    torch.testing.assert_close(second, 4 * x.cos())


def test_other_threads_run_eagerly() -> None:
    x = leaf(0).detach()
    results = []

    def work() -> None:
        results.extend([x + x, x.tanh(), torch.cat([x, x]).sum(0)])

    with ab.batch():
        y = leaf(0).cos()
        y + y, y.tanh()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    torch.testing.assert_close(results[0], 2 * x)
    torch.testing.assert_close(results[1], x.tanh())


def test_functions_stay_what_they_are() -> None:
    named = {torch.cat: "cat", torch.tanh: "tanh", Tensor.sum: "sum", Tensor.tanh: "method"}
    table = {key: key for key in named}
    with ab.batch():
        inside = {key: value for key, value in named.items() if table.get(key) is key}
        assert {torch.cat: "cat"}[torch.cat] == "cat"
    assert inside == named


def test_no_trace_after_the_block() -> None:
    x = leaf(0)
    with ab.batch():
        y = x.cos()
        y.tanh(), y.tanh()
    assert type(x.tanh().grad_fn).__name__ == "TanhBackward0"
    assert type((x + x).grad_fn).__name__ == "AddBackward0"
