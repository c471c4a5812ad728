"""Dynamic cells whose sizes depend on the values of data: masks, counts, numbers from tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_dynamic_cells import Counted, Function, compare
from helpers_switches import uses, without
from torch import Tensor, nn
from torch_autobatch import _C

DOUBLE = torch.double
WIDTH = 4
SIZES = (6, 9, 4, 7, 12, 5, 8, 10)
LAYER = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)


def graph(nodes: int) -> tuple[Tensor, Tensor]:
    """The nodes' features, ``[nodes, WIDTH]``, and edges, ``[2, 3 * nodes]``, with self loops."""
    edges = torch.randint(nodes, (2, 3 * nodes))
    edges[:, 0] = nodes - 1
    return torch.randn(nodes, WIDTH, dtype=DOUBLE), edges


def graphs() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [graph(n) for n in SIZES]


def without_loops(x: Tensor, edges: Tensor) -> Tensor:
    mask = edges[0] != edges[1]
    weight = torch.ones(edges.size(1), dtype=x.dtype)
    edges, weight = edges[:, mask], weight[mask]
    loops = torch.full((x.size(0),), 2.0, dtype=x.dtype)
    loops[edges[0]] = weight
    messages = LAYER(x)[edges[0]] * weight[:, None]
    return torch.zeros_like(x).index_add_(0, edges[1], messages) + loops[:, None]


def by_count(x: Tensor, edges: Tensor) -> Tensor:
    count = int(edges.max()) + 1
    total = torch.zeros(count, WIDTH, dtype=x.dtype).index_add_(0, edges[1], LAYER(x)[edges[0]])
    return total / float(edges.size(1))


def by_relation(x: Tensor, edges: Tensor) -> Tensor:
    out = LAYER(x)
    kind = (edges[0] + edges[1]) % 3
    for k in range(3):
        source, target = edges[:, kind == k]
        out = out + torch.zeros_like(x).index_add_(0, target, LAYER(x)[source] * (k + 1))
    return out


def inverse_degree(x: Tensor, edges: Tensor) -> Tensor:
    degree = torch.zeros(x.size(0), dtype=x.dtype).index_add_(
        0, edges[1], torch.ones(edges.size(1), dtype=x.dtype)
    )
    scale = 1.0 / degree
    scale[scale == math.inf] = 0
    return LAYER(x) * scale[:, None]


def set_rows(x: Tensor, edges: Tensor) -> Tensor:
    out = LAYER(x).clone()
    is_target = torch.zeros(x.size(0), dtype=torch.bool)
    is_target[edges[1]] = True
    out[is_target] = x[is_target] * 2
    return out


def fraction(x: Tensor, edges: Tensor) -> Tensor:
    n = x.size(0)
    kept = math.ceil(0.5 * n) + (n >> 2) - (~n & 1)
    return LAYER(x)[: int(kept)] * int(n * 0.3) + round(n / 2)


FUNCTIONS: dict[str, Function] = {
    "a mask of edges": without_loops,
    "a count": by_count,
    "a mask for each relation": by_relation,
    "a mask that is filled": inverse_degree,
    "rows that are set": set_rows,
    "a rounded size": fraction,
}


CONVERTING = ("a count", "a rounded size")
NEEDS = pytest.mark.needs("number_conversions")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=NEEDS if n in CONVERTING else ()) for n in FUNCTIONS]
)
def test_one_program_serves_all_values(name: str) -> None:
    runs, why = compare(FUNCTIONS[name], graphs() * 2)
    assert (runs, why) == (2, "")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_eager_mode(name: str) -> None:
    function, calls = FUNCTIONS[name], graphs()
    cell = ab.cell(function, dynamic=True)

    def gradients(called: Function, enabled: bool) -> list[Tensor]:
        xs = [x.clone().requires_grad_() for x, _ in calls]
        for _ in range(3):
            with ab.batch(enabled=enabled, adaptive=False):
                losses = [called(x, e).square().sum() for x, (_, e) in zip(xs, calls, strict=True)]
                loss = torch.stack(losses).sum()
        return list(torch.autograd.grad(loss, [*xs, *LAYER.parameters()]))

    torch.testing.assert_close(gradients(cell, True), gradients(function, False))


def test_all_graphs_are_one_batch_an_op() -> None:
    cell = ab.cell(without_loops, dynamic=True)
    for _ in range(3):
        with ab.batch(adaptive=False) as scope:
            _ = [cell(*each) for each in graphs()]
    assert len(scope.report().flushes) == 1
    assert scope.report().batches < 24


@NEEDS
def test_without_the_switch_a_conversion_needs_the_same_value() -> None:
    before = uses("number_conversions")
    with without("number_conversions"):
        runs, _ = compare(by_count, graphs())
    assert runs == len(SIZES)
    assert uses("number_conversions") == before
    assert compare(by_count, graphs()) == (2, "")
    assert uses("number_conversions") > before


def test_conversions_outside_of_a_trace_are_ordinary() -> None:
    seen: list[Any] = []

    def function(x: Tensor, edges: Tensor) -> Tensor:
        seen.append(int(edges.max()))
        return LAYER(x)

    compare(function, graphs())
    assert type(int(torch.tensor(3))) is int
    assert type(float(torch.tensor(3))) is float
    assert [type(n) for n in seen[2:]] == [int] * (len(seen) - 2)

    class Length(int):
        pass

    assert type(Length(4)) is Length
    assert int("12", 3) == 5


CHANGES: dict[str, Function] = {
    "in place": lambda edges: edges.copy_(edges.flip(1)),
    "through .data": lambda edges: edges.data.copy_(edges.flip(1)),
    "through NumPy": lambda edges: edges.numpy().__setitem__(slice(None), edges.flip(1).numpy()),
    "other data": lambda edges: edges.set_(edges.flip(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_data_are_noticed(name: str) -> None:
    calls = graphs()
    cell = ab.cell(without_loops, dynamic=True)
    for _ in range(4):
        with ab.batch(adaptive=False):
            found = [cell(*each) for each in calls]
        torch.testing.assert_close(found, [without_loops(*each) for each in calls])
        for _, edges in calls:
            CHANGES[name](edges)


def test_kept_results_are_no_views_of_the_data() -> None:
    """Other data with the same values get the same results, although the first data changed."""

    def function(x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        rows = source[source != target]  # reads both views
        return LAYER(x)[rows] + LAYER(x)[source].sum() * target.max()

    cell = ab.cell(function, dynamic=True)
    calls = graphs()
    copies = [(x, edges.clone()) for x, edges in calls]
    for step in range(3):
        with ab.batch(adaptive=False):
            found = [cell(*each) for each in (calls if step < 2 else copies)]
        torch.testing.assert_close(found, [function(*e) for e in (calls if step < 2 else copies)])
        if step == 1:
            for _, edges in calls:
                edges.zero_()


def test_results_from_inference_mode_are_not_used_in_training() -> None:
    calls = graphs()
    cell = ab.cell(without_loops, dynamic=True)
    for mode in (torch.inference_mode, torch.enable_grad, torch.no_grad, torch.inference_mode):
        for _ in range(3):
            with mode(), ab.batch(adaptive=False):
                found = [cell(*each) for each in calls]
                loss = torch.stack([value.square().sum() for value in found]).sum()
            torch.testing.assert_close(found, [without_loops(*each) for each in calls])
        if mode is torch.enable_grad:
            loss.backward()


def test_layers_share_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer finds the rows of the mask that the first layer computed."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=DOUBLE)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            edges = edges[:, edges[0] != edges[1]]
            return F.relu(self.linear(x)).index_add(0, edges[1], x[edges[0]])

    layers = [ab.cell(Layer(), dynamic=True) for _ in range(3)]
    added: list[Any] = []

    class Known(_C.DataResults):
        def add(self, values: Any, results: Any) -> Any:
            added.append(values)
            return super().add(values, results)

    monkeypatch.setattr("torch_autobatch._cell_by_data._C.DataResults", Known)
    for _ in range(2):
        with ab.batch(adaptive=False):
            for x, edges in graphs():
                for layer in layers:
                    x = layer(x, edges)
    assert len(added) <= len(SIZES)
    assert len(added) >= len(SIZES) - 2  # the first two calls of a layer are traced


def test_pending_masks_are_read_as_without_a_cell() -> None:
    def function(x: Tensor, edges: Tensor) -> Tensor:
        h = LAYER(x)
        return h[h[:, 0] > 0].sum(0)

    counted = Counted(function)
    cell = ab.cell(counted, dynamic=True)
    with ab.batch():
        found = [cell(*each) for each in graphs()]
    torch.testing.assert_close(found, [function(*each) for each in graphs()])


def test_strides_of_selected_rows_are_those_of_indexing() -> None:
    def function(x: Tensor, edges: Tensor) -> Tensor:
        picked = x.t()[:, edges[0, : x.size(0)] > 1]
        return LAYER(picked.t()) * picked.stride(0)

    assert compare(function, graphs() * 2)[1] == ""


def propagate(x: Tensor, edges: Tensor) -> Tensor:
    """Has no parameters, so all results depend only on data."""
    out = x
    for _ in range(3):
        out = 0.9 * torch.zeros_like(x).index_add_(0, edges[1], out[edges[0]]) + 0.1 * x
    return out


def test_functions_without_parameters_are_captured() -> None:
    layers = [ab.cell(propagate, dynamic=True) for _ in range(2)]
    for _ in range(4):
        with ab.batch(adaptive=False) as scope:
            found = [LAYER(layers[1](layers[0](x, e).relu(), e)) for x, e in graphs()]
    expected = [LAYER(propagate(propagate(x, e).relu(), e)) for x, e in graphs()]
    torch.testing.assert_close(found, expected)
    assert len(scope.report().flushes) == 1
    assert scope.report().nodes > len(SIZES) * 24
    assert scope.report().batches < 40


@pytest.mark.parametrize("calls", [1, len(SIZES)])
def test_results_of_data_that_are_read_after_each_call_are_not_captured(calls: int) -> None:
    """`calls`: number of calls in a block. A single call's result is read when the block ends."""
    cell = ab.cell(propagate, dynamic=True)
    flushes = 0
    for x, edges in graphs() if calls == 1 else [graphs()[0]] * 4:
        with ab.batch(adaptive=False) as scope:
            for each in [(x, edges)] if calls == 1 else graphs():
                value = float(cell(*each).sum())
                assert value == pytest.approx(float(propagate(*each).sum()))
        flushes += len(scope.report().flushes)
    assert flushes <= 1
