"""Functions that a dynamic cell can't replay and reports; writes, errors and modes in a cell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_dynamic_cells import WIDTH, Counted, Function, alone, rows
from torch import Tensor


@pytest.fixture
def xs() -> list[Tensor]:
    return rows()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5  # differs from autograd's gradient


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.t()


NO_PROGRAM: dict[str, tuple[Function, str]] = {
    "a value": (lambda x: x.sin() if x.sum() > 0 else x.cos(), "__bool__"),
    "a custom function": (lambda x: Double.apply(x.exp()), "autograd.Function"),
    "autocast": (autocast, "autocast"),
    "a transform": (lambda x: torch.vmap(torch.tanh)(x.exp()), "transform"),
    "a tensor that is not PyTorch's": (lambda x: x * torch.Tensor([2.0]), "behaves differently"),
    "a result of another kind": (lambda x: iter((x.sum(0),)), "kind"),
}


def compare_writes(function: Function, calls: list[tuple[Tensor, ...]]) -> None:
    """Compares results, and arguments after the calls, with eager mode."""
    eager = [tuple(x.clone() for x in args) for args in calls]
    expected = [function(*args) for args in eager]
    cell = ab.cell(function, dynamic=True)
    with ab.batch():
        found = [cell(*args) for args in calls]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(calls, eager)


@pytest.fixture
def own_ops() -> Iterator[Any]:
    """Defines ops with names of PyTorch's ops that do something else."""
    library = torch.library.Library("autobatch_tests", "DEF")
    library.define("relu(Tensor(a!) x) -> Tensor(a!)")
    library.define("sum(Tensor x) -> Tensor")
    library.impl("relu", lambda x: x.mul_(2), "CompositeExplicitAutograd")
    library.impl("sum", lambda x: x.exp(), "CompositeExplicitAutograd")
    yield torch.ops.autobatch_tests
    library._destroy()


def test_names_of_other_ops_tell_nothing(own_ops: Any, xs: list[Tensor]) -> None:
    """`relu` writes to its argument, and `sum` keeps the shape."""

    def function(x: Tensor) -> Tensor:
        own_ops.relu(x)
        y = own_ops.sum(x)
        return y * y.size(0)

    compare_writes(function, alone(xs))


def test_a_result_that_is_written_elsewhere(xs: list[Tensor]) -> None:
    def function(x: Tensor, out: Tensor) -> Tensor:
        h = x.exp()
        torch.add(h, 1, out=out)
        return h.sum(0) if h[:2].size(0) > 1 else h.sum()

    compare_writes(function, [(x, torch.zeros_like(x)) for x in xs])


@pytest.mark.parametrize("name", NO_PROGRAM)
def test_what_can_not_be_replayed_runs(name: str) -> None:
    function, reason = NO_PROGRAM[name]
    leaves = [torch.randn(n, WIDTH, requires_grad=True) for n in range(1, 14)]
    counted = Counted(function)
    cell = ab.cell(counted, dynamic=True)
    with ab.batch() as scope:
        found = [cell(x) for x in leaves]
    assert counted.runs == len(leaves)
    rows = scope.report().at_once
    assert any("captured op by op" in row.reason and reason in row.reason for row in rows)
    if name in ("a value", "a custom function", "autocast", "a transform"):
        assert any(reason in r.reason and Path(__file__).name in r.site for r in rows)
    if isinstance(found[0], Tensor):
        torch.testing.assert_close(found, [function(x) for x in leaves])


def test_gradients_of_a_custom_function(xs: list[Tensor]) -> None:
    cell = ab.cell(lambda x: Double.apply(x.exp()), dynamic=True)
    leaves = [x.clone().requires_grad_() for x in xs]
    with ab.batch():
        loss = sum(cell(x).sum() for x in leaves)
    torch.testing.assert_close(
        torch.autograd.grad(loss, leaves), tuple(5 * x.detach().exp() for x in leaves)
    )


def test_gradient_mode_is_switched_in_it(xs: list[Tensor]) -> None:
    w = torch.ones(WIDTH, dtype=torch.double, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x * w).exp().sum(0)
        return x * scale * w

    gradients = []
    for enabled in (True, False):
        counted = Counted(function)
        cell = ab.cell(counted, dynamic=True)
        with ab.batch(enabled=enabled):
            loss = sum(cell(x).sum() for x in xs)
        gradients += torch.autograd.grad(loss, w)
        assert counted.runs == (2 if enabled else len(xs))
        assert torch.is_grad_enabled()
    torch.testing.assert_close(*gradients)


def test_a_write_to_an_argument_happens_once(xs: list[Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)
        x.add_(1)
        return y.sum() if y.size(0) > 100 else y.sum(0)

    compare_writes(function, alone(xs))


def test_an_error_is_at_the_functions_line(xs: list[Tensor]) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x + y  # here

    cell = ab.cell(function, dynamic=True)
    with ab.batch():
        for x in xs:
            cell(x, x.exp())
        with pytest.raises(RuntimeError, match="size of tensor") as raised:
            cell(xs[0], xs[1])
    assert "function" in [entry.name for entry in raised.traceback]


def test_hidden_state_is_found(xs: list[Tensor]) -> None:
    state = {"scale": 1.0}

    def function(x: Tensor) -> Tensor:
        return x * state["scale"]

    counted = Counted(function)
    cell = ab.cell(counted, dynamic=True)
    with ab.batch(check_cells=True):
        for i, x in enumerate(xs[:4], start=1):
            cell(x)
            assert counted.runs == i
        state["scale"] = 2.0
        with pytest.raises(
            RuntimeError, match=r"behaves differently from its first call .* 1\.0.*2\.0"
        ):
            cell(xs[4])


class KeepsSizes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> Tensor:
        ctx.count, ctx.shape = count, x.shape
        return x.mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.expand(ctx.shape) * ctx.count / ctx.shape[0], None


def hooked(x: Tensor) -> Tensor:
    h, count = x.exp(), x.shape[0]
    h.register_hook(lambda grad: grad / count)
    return h.sum(0)


@pytest.mark.parametrize("kind", ["function", "hook"])
def test_sizes_that_backward_reads(kind: str) -> None:
    """The first call is traced. Its backward must not contain a traced number."""
    functions: dict[str, Function] = {
        "function": lambda x: KeepsSizes.apply(x.exp(), x.shape[0]),
        "hook": hooked,
    }
    function = functions[kind]
    cell = ab.cell(function, dynamic=True)
    instances = [torch.randn(n, WIDTH, requires_grad=True) for n in (3, 5, 4, 3)]
    with ab.batch(adaptive=False):
        results = [cell(x) for x in instances]
    for x, result in zip(instances, results, strict=True):
        (found,) = torch.autograd.grad(result.sum(), x)
        torch.testing.assert_close(found, torch.autograd.grad(function(x).sum(), x)[0])


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matrix_that_depends_on_sizes() -> None:
    def pooled(x: Tensor) -> Tensor:
        n = x.size(0)
        places = torch.stack([torch.zeros(n, dtype=torch.long), torch.arange(n)])
        return torch.spmm(torch.sparse_coo_tensor(places, torch.ones(n), (1, n)), x.exp())

    cell = ab.cell(pooled, dynamic=True)
    instances = [torch.randn(n, WIDTH, requires_grad=True) for n in (5, 9, 7, 9, 7, 5)]
    with ab.batch(adaptive=False):
        results = [cell(x) for x in instances]
    torch.testing.assert_close(results, [pooled(x) for x in instances])
