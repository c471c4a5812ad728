"""Dynamic cells, which accept tensors of any sizes (``ab.cell(function, dynamic=True)``)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_dynamic_cells import WIDTH, Counted, Function, alone, attention, compare, rows
from torch import Tensor, nn


@pytest.fixture
def xs() -> list[Tensor]:
    return rows()


def strided(x: Tensor) -> Tensor:
    half = x.size(0) // 2 + 1
    return torch.cat([x[:half].tanh(), x[half - 1 :: 2].exp()]).sum(0) / (x.shape[0] * 2)


def own_memory(x: Tensor) -> Tensor:
    out = x.new_zeros(x.size(0) + 1, x.size(1))
    out[1:] = x
    out.index_add_(0, torch.zeros(x.size(0), dtype=torch.long), x.sigmoid())
    return out.mean(0)


def pieces(x: Tensor) -> dict[str, Any]:
    a, b = x.tanh().chunk(2, dim=1)
    return {"a": a, "pair": (b, [a + b, None]), "rows": x.size(0), "mean": 1 / x.size(0)}


FUNCTIONS = [attention, strided, own_memory, pieces]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_sizes_are_traced_and_others_replayed(function: Function, xs: list[Tensor]) -> None:
    assert compare(function, alone(xs)) == (2, "")


@pytest.mark.parametrize("function", [attention, strided, own_memory])
def test_gradients(function: Function, xs: list[Tensor]) -> None:
    gradients = []
    for enabled in (True, False):
        counted = Counted(function)
        cell = ab.cell(counted, dynamic=True)
        leaves = [x.clone().requires_grad_() for x in xs]
        with ab.batch(enabled=enabled):
            loss = sum(cell(x).square().sum() for x in leaves)
        gradients.append(torch.autograd.grad(loss, leaves))
        assert counted.runs == (2 if enabled else len(xs))
    torch.testing.assert_close(*gradients)


def test_a_program_outlives_the_block(xs: list[Tensor]) -> None:
    counted = Counted(attention)
    cell = ab.cell(counted, dynamic=True)
    for x in xs:
        with ab.batch():
            found = cell(x)
        torch.testing.assert_close(found, attention(x))
    assert counted.runs == 2
    cell(xs[0])
    assert counted.runs == 3  # outside a block


def test_batches_are_those_of_plain_calls(xs: list[Tensor]) -> None:
    cell = ab.cell(strided, dynamic=True)
    leaves = [x.clone().requires_grad_() for x in xs]
    reports = []
    for function in (cell, cell, strided):
        with ab.batch() as scope:
            kept = [function(x) for x in leaves]
        reports.append(scope.report())
        assert len(kept) == len(xs)
    assert reports[1].ops == reports[2].ops
    assert reports[1].batches == reports[2].batches


def test_what_follows_from_sizes_is_computed_once(xs: list[Tensor]) -> None:
    cell = ab.cell(attention, dynamic=True)
    ops = []
    for _ in range(3):
        with ab.batch() as scope:
            found = [cell(x) for x in xs]
        torch.testing.assert_close(found, [attention(x) for x in xs])
        ops.append([row.op for row in scope.report().signatures])
    assert any("triu" in op for op in ops[0])
    assert not any("triu" in op or "arange" in op for op in ops[2])


def test_what_is_written_to_or_returned_is_made_anew(xs: list[Tensor]) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.arange(x.size(0), dtype=x.dtype) * 2
        mask = torch.ones(x.size(0), dtype=x.dtype).cumsum(0)
        mask[0] = x[0, 0]
        return x * mask[:, None], counts

    cell = ab.cell(function, dynamic=True)
    for _ in range(2):
        with ab.batch():
            found = [cell(x) for x in xs]
        torch.testing.assert_close(found, [function(x) for x in xs])
        for _, counts in found:
            counts.zero_()


# ---------------------------------------------------------------- arguments and results


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Output:
    hidden: Tensor
    pooled: Tensor | None = None


def test_structures_of_tensors(xs: list[Tensor]) -> None:
    def function(pair: Pair, more: dict[str, list[Tensor]], flag: bool) -> Pair:
        left = pair.left + more["a"][0] if flag else pair.left
        return Pair(left, pair.right.sum(0))

    calls = [(Pair(x, x.exp()), {"a": [x.cos()]}, bool(i % 2)) for i, x in enumerate(xs)]
    assert compare(function, calls)[0] == 4


def test_dataclasses_are_results(xs: list[Tensor]) -> None:
    cell = ab.cell(lambda x: Output(x.exp(), x.sum(0)), dynamic=True)
    with ab.batch():
        found = [cell(x) for x in xs]
    assert all(type(output) is Output for output in found)
    torch.testing.assert_close([output.hidden for output in found], [x.exp() for x in xs])


def test_one_tensor_in_two_places(xs: list[Tensor]) -> None:
    calls = [(x, x) for x in xs] + [(x, x + 1) for x in xs]
    assert compare(lambda a, b: a * b.exp(), calls)[0] == 4


def test_a_parameter_among_the_arguments() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.randn(WIDTH))
            self.cell = ab.cell(self.combine, dynamic=True)

        def combine(self, x: Tensor, rows: Tensor) -> Tensor:
            return x * self.empty + rows.sum(0)

    model = Model()
    xs = rows(torch.float)
    with ab.batch():
        found = [model.cell(model.empty, x) for x in xs]
        found += [model.cell(torch.ones(WIDTH), x) for x in xs]
    expected = [model.combine(model.empty, x) for x in xs]
    expected += [model.combine(torch.ones(WIDTH), x) for x in xs]
    torch.testing.assert_close(found, expected)


# ---------------------------------------------------------------- other contexts


def test_in_a_map(xs: list[Tensor]) -> None:
    counted = Counted(attention)
    cell = ab.cell(counted, dynamic=True)

    def instance(x: Tensor) -> Tensor:
        h = cell(x)
        return cell(h[: h.shape[0] // 2 + 1]) if h.sum() > 0 else h

    found = ab.map(instance, xs)
    assert counted.runs == 2
    torch.testing.assert_close(found, [instance(x) for x in xs])


def test_cells_in_cells(xs: list[Tensor]) -> None:
    inner = ab.cell(attention, dynamic=True)
    outer = Counted(lambda x: inner(inner(x)))
    cell = ab.cell(outer, dynamic=True)
    with ab.batch():
        found = [cell(x) for x in xs]
    assert outer.runs == 2
    torch.testing.assert_close(found, [attention(attention(x)) for x in xs])


def test_as_plain_functions(xs: list[Tensor]) -> None:
    counted = Counted(attention)
    cell = ab.cell(counted, dynamic=True)
    with ab.batch(granularity="op"):
        found = [cell(x) for x in xs]
    assert counted.runs == len(xs)
    torch.testing.assert_close(found, [attention(x) for x in xs])


def test_the_report_names_the_functions_line(xs: list[Tensor]) -> None:
    cell = ab.cell(attention, dynamic=True)
    for _ in range(2):
        with ab.batch() as scope:
            kept = [cell(x) for x in xs]
        assert len(kept) == len(xs)
    code = attention.__code__
    assert f"{Path(code.co_filename).name}:{code.co_firstlineno}" in str(scope.report())


def test_compile_and_dynamic_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="not both"):
        ab.cell(F.relu, compile=True, dynamic=True)


def test_activations_in_place_give_a_program_without_writes() -> None:
    """`nn.ReLU(inplace=True)`: the result has its own memory, so out of place is the same."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(inplace=True),
        nn.Linear(WIDTH, WIDTH),
        nn.ELU(inplace=True),
    ).double()
    counted = Counted(lambda x: (layers(x), F.relu(x.exp() - 1, inplace=True)))
    cell = ab.cell(counted, dynamic=True)
    xs = rows()
    for _ in range(2):
        with ab.batch(adaptive=False) as scope:
            found = [cell(x) for x in xs]
    assert counted.runs == 2
    assert {"aten::relu", "aten::elu"} <= {row.op for row in scope.report().signatures}
    torch.testing.assert_close(found, [counted.function(x) for x in xs])


def test_an_activation_in_place_of_a_view_changes_what_it_is_a_view_of() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x - 1
        return F.relu(h[:2], inplace=True).sum(), h.sum(0)

    compare(function, alone(rows()) * 2)
