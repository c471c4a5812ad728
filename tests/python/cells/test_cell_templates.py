"""Cells whose calls can't be replayed from the first call, and cells that break their contract."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_cells import (
    TREES,
    Counted,
    Tree,
    Variant,
    check_function,
    compare_with_eager,
    rows,
    vectors,
)
from torch import Tensor, nn
from torch.nn.functional import linear

# ---------------------------------------------------------------- calls that can't be templates


def run_op_by_op(function: Callable[..., Any], reason: str) -> None:
    report = check_function(function, [(v,) for v in vectors(4)], runs=4)
    assert any(reason in entry.reason for entry in report.at_once), report.at_once


def test_writes_run_op_by_op() -> None:
    def fill(x: Tensor) -> Tensor:
        out = torch.zeros(3)
        out[1] = x[0]
        return out + x

    run_op_by_op(fill, "writes to a tensor")
    run_op_by_op(lambda x: (x * 2).mul_(3), "writes to a tensor")


def test_ops_at_once_run_op_by_op() -> None:
    mask = torch.tensor([True, False, True])

    def masked(x: Tensor) -> Tensor:
        return x * mask.to(torch.int64).cumsum(0)

    run_op_by_op(masked, "runs eagerly")


def test_results_that_are_no_tensors() -> None:
    class Box:
        def __init__(self, h: Tensor) -> None:
            self.h = h

    boxed = ab.cell(lambda x: Box(x * 2))
    with ab.batch() as scope:
        found = [boxed(x.requires_grad_()) for x in vectors(3)]
    torch.testing.assert_close([b.h for b in found], [x * 2 for x in vectors(3)])
    assert "a replay cannot construct" in scope.report().at_once[0].reason


def test_a_tensor_from_outside() -> None:
    state = {}

    @ab.cell
    def accumulate(x: Tensor) -> Tensor:
        return x + state["h"]

    with ab.batch() as scope:
        found = []
        state["h"] = torch.zeros(3, requires_grad=True) * 1
        for x in vectors(3):
            state["h"] = accumulate(x)  # breaks the contract of a cell
            found.append(state["h"])
    x, y, z = vectors(3)
    torch.testing.assert_close(found, [x, x + y, x + y + z])
    assert "is not an argument" in scope.report().at_once[0].reason


@pytest.mark.parametrize("change", ["in place", "data", "grad", "no grad", "flush", "backward"])
def test_weights_that_change_between_uses(change: str) -> None:
    """A template checks its weights at each use."""

    def program(variant: Variant) -> Any:
        weights = [torch.linspace(-1, 1, 9).view(3, 3), torch.linspace(0, 1, 3)]
        w, b = (t.clone().requires_grad_(change != "grad") for t in weights)
        cell = variant.cell(lambda x: linear(x, w, b).tanh() * x)
        xs = [x.requires_grad_() for x in rows(6, 3)]
        losses = []
        with variant.block() as scope:
            for k, x in enumerate(xs):
                losses.append(cell(x * 1).sum())
                if k % 2 == 0:
                    continue
                if change == "in place":
                    with torch.no_grad():
                        w.mul_(2)
                elif change == "data":
                    b.data = b.data + 1
                elif change in ("grad", "no grad"):
                    w.requires_grad_(not w.requires_grad)
                elif change == "backward":
                    torch.stack(losses).sum().backward()
                    losses = [t.detach() for t in losses]
                elif scope is not None:
                    scope.flush()
        total = torch.stack(losses).sum()
        if change not in ("in place", "backward"):  # a written tensor gets no gradient
            total.backward()
        return total, [t.grad for t in (w, b, *xs) if t.grad is not None]

    compare_with_eager(program)


def test_hooks_run_each_time() -> None:
    module = nn.Linear(3, 3)
    seen = []
    module.register_forward_hook(lambda m, i, o: seen.append(1))
    called = ab.cell(module)
    with ab.batch():
        kept = [called(x) for x in vectors(4)]
    assert len(seen) == len(kept) == 4
    torch.testing.assert_close(kept, [module(x) for x in vectors(4)])


@pytest.mark.parametrize(
    ("read", "text"),
    [("item", "y.sum().item()"), ("bool", "y.sum() > 0"), ("nonzero", "nonzero()")],
)
def test_a_read_is_an_error_that_names_the_line(read: str, text: str) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        if read == "item":
            return y * y.sum().item()
        if read == "bool":
            return y if y.sum() > 0 else -y
        return y.nonzero() if read == "nonzero" else y

    called = ab.cell(function)
    with ab.batch():
        x = torch.ones(3, requires_grad=True) * 1
        message = r"the cell '.*function' reads .*test_cell_templates\.py:(\d+)"
        with pytest.raises(RuntimeError, match=message) as error:
            called(x)
        fine = x + 1
    assert fine.tolist() == [2, 2, 2]
    (number,) = re.findall(message, str(error.value))
    assert text in linecache.getline(__file__, int(number))
    torch.testing.assert_close(called(x.detach()), function(x.detach()))  # outside a block


def test_printing_runs_each_time(capsys: Any) -> None:
    @ab.cell
    def loud(x: Tensor) -> Tensor:
        print(x)
        return x * 2

    with ab.batch():
        found = [loud(x.requires_grad_() * 1) for x in vectors(3)]
    assert capsys.readouterr().out.count("tensor(") == 3
    torch.testing.assert_close(found, [x * 2 for x in vectors(3)])


def test_arguments_that_are_not_hashable() -> None:
    called = ab.cell(lambda x, options: x * 2)
    with ab.batch(), pytest.raises(TypeError, match="type 'set', which is not hashable"):
        called(torch.ones(2), {1, 2})
    nested: list[Any] = []
    nested.append(nested)
    with ab.batch(), pytest.raises(RecursionError, match="nested too deeply"):
        called(torch.ones(2), nested)


@dataclass(eq=False)
class Linked:
    h: Tensor
    back: Any = None
    forward: Any = None


def test_arguments_that_contain_themselves() -> None:
    """The function runs in each call, and its ops are captured."""
    called = ab.cell(lambda node: node.forward.back.h * 2)
    first, second = (Linked(x.requires_grad_()) for x in vectors(2))
    first.forward, second.back = second, first
    first.back = second.forward = first
    with ab.batch() as scope:
        found = [called(first) for _ in range(3)]
        assert all(ab.is_pending(x) for x in found)
    assert scope.report().batches == 1
    torch.testing.assert_close(found, [first.h * 2] * 3)


def test_tensors_as_keys() -> None:
    called = ab.cell(lambda ranks: sum(key * rank for key, rank in ranks.items()))
    x, y = vectors(2)
    with ab.batch():
        found = called({x: 2, y: 3})
    torch.testing.assert_close(found, x * 2 + y * 3)


def test_errors_pass_through() -> None:
    @ab.cell
    def wrong(x: Tensor, fail: bool) -> Tensor:
        if fail:
            raise KeyError("mine")
        return x @ x

    with ab.batch():
        with pytest.raises(KeyError, match="mine"):
            wrong(torch.ones(2), True)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            wrong(torch.ones(2, 3, requires_grad=True) * 1, False)
        w = torch.ones(2, requires_grad=True) * 1
        found = [wrong(w, False) for _ in range(3)]
    assert [f.item() for f in found] == [2, 2, 2]


# ---------------------------------------------------------------- broken contracts


def test_check_cells() -> None:
    counter = Counted()

    @ab.cell
    def changing(x: Tensor, how: str) -> Any:
        counter.runs += 1
        if how == "constant":
            return x * counter.runs
        if how == "op":
            return x.tanh() if counter.runs % 2 else x.sigmoid()
        if how == "more":
            return x + 1 if counter.runs % 2 else x + 1 + 1
        if how == "result":
            return x * 2, counter.runs
        return x * 2

    x = torch.ones(2, requires_grad=True)
    for how, message in [
        ("constant", "mul.Tensor with different arguments"),
        ("op", r"(sigmoid|tanh) instead of"),
        ("more", "(an additional|a missing) op"),
        ("result", "a different constant result"),
    ]:
        with ab.batch(check_cells=True):
            changing(x, how)
            with pytest.raises(
                RuntimeError, match=rf"'.*changing' at .*test_cell_templates.*{message}"
            ):
                changing(x, how)
    with ab.batch(check_cells=True):
        counter.runs = 0
        found = [changing(x, "not") for _ in range(3)]
    assert counter.runs == 3
    torch.testing.assert_close(found, [x * 2] * 3)
    model = Tree(True)
    with ab.batch(check_cells=True):
        trees = [model(tree) for tree in TREES]
    torch.testing.assert_close(trees, [Tree(False)(tree) for tree in TREES])
