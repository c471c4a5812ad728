"""Modules as dynamic cells: changes of their state, and state that they keep."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_dynamic_cells import SIZES, WIDTH, rows, run
from torch import Tensor, nn


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.dropout(self.norm(self.layer(x)).relu()) + x


class Convolution(nn.Module):
    """Computes means over neighbours in a graph, from rows and from pairs of rows (edges)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        messages = x.index_select(0, edges[0])
        to = edges[1].view(-1, 1).expand_as(messages)
        sums = messages.new_zeros(x.shape).scatter_add(0, to, messages)
        degrees = messages.new_zeros(x.size(0)).index_add(
            0, edges[1], messages.new_ones(edges.size(1))
        )
        return self.layer(sums / degrees.clamp(min=1).view(-1, 1))


@pytest.fixture
def floats() -> list[Tensor]:
    return rows(torch.float)


def test_a_module(floats: list[Tensor]) -> None:
    model = ab.cell(Encoder().eval(), dynamic=True)
    found = run(model, floats)
    assert model.runs == 2
    torch.testing.assert_close(found, [model(x) for x in floats])


def test_a_class_of_modules(floats: list[Tensor]) -> None:
    @ab.cell(dynamic=True)
    class Model(Encoder):
        pass

    one, other = Model().eval(), Model().eval()
    torch.testing.assert_close(run(one, floats), [one(x) for x in floats])
    torch.testing.assert_close(run(other, floats), [other(x) for x in floats])


def test_what_changes_in_a_module_is_noticed(floats: list[Tensor]) -> None:
    model = ab.cell(Encoder().eval(), dynamic=True)
    run(model, floats)
    model.layer.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    torch.testing.assert_close(run(model, floats), [model(x) for x in floats])
    with torch.no_grad():
        model.layer.weight.mul_(2)  # the same parameter
    runs = model.runs
    found = run(model, floats)
    assert model.runs == runs
    torch.testing.assert_close(found, [model(x) for x in floats])
    model.train()
    rate, model.dropout.p = model.dropout.p, 1.0
    torch.testing.assert_close(run(model, floats), floats)
    model.eval()
    model.dropout.p = rate
    runs = model.runs
    run(model, floats)
    assert model.runs == runs  # the existing program is replayed


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda model: setattr(model, "scale", 3.0),
    "a rate": lambda model: setattr(model.dropout, "p", 1.0),
    "a constant of a layer": lambda model: setattr(model.norm, "eps", 2.0),
    "a function": lambda model: setattr(model, "activation", torch.sin),
    "a tensor": lambda model: setattr(model, "shift", torch.ones(WIDTH)),
    "a tuple": lambda model: setattr(model, "factors", (3.0, 1.0)),
    "forward": lambda model: setattr(model.layer, "forward", lambda x: x * 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_that_change_between_blocks(name: str, floats: list[Tensor]) -> None:
    class Model(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.activation, self.shift = 1.0, torch.tanh, torch.zeros(WIDTH)
            self.factors = (2.0, 1.0)
            self.dropout.p = 0.0

        def forward(self, x: Tensor) -> Tensor:
            h = self.activation(super().forward(x) * self.scale) + self.shift
            return self.dropout(h) * self.factors[0]

    model = ab.cell(Model().train(), dynamic=True)
    run(model, floats)
    runs = model.runs
    run(model, floats)
    assert model.runs == runs  # the function itself changes `runs`
    CHANGES[name](model)
    torch.testing.assert_close(run(model, floats), [model(x) for x in floats])


STORES: dict[str, Callable[[Any, Tensor], object]] = {
    "tuple": lambda model, x: setattr(model, "grid", (x.size(0), x.size(1))),
    "tuple in a tuple": lambda model, x: setattr(model, "grid", ("grid", (x.size(0), 1))),
    "list": lambda model, x: model.sizes.append(x.size(0)),
    "item of a list": lambda model, x: model.sizes.__setitem__(0, (x.size(0),)),
    "dict": lambda model, x: model.table.update(rows=x.size(0)),
    "shape": lambda model, x: model.table.update(shape=x.shape),
}


@pytest.mark.parametrize("name", STORES)
def test_sizes_in_containers_are_stored_in_each_call(name: str, floats: list[Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid: Any = (0, 0)
            self.sizes: list[Any] = [0]
            self.table: dict[str, Any] = {}

        def forward(self, x: Tensor) -> Tensor:
            STORES[name](self, x)
            return x.exp()

    plain, cell = Model(), ab.cell(Model(), dynamic=True)
    with ab.batch(adaptive=False):
        for x in floats:
            torch.testing.assert_close(cell(x), plain(x))
            assert (cell.grid, cell.sizes, cell.table) == (plain.grid, plain.sizes, plain.table)
    pickle.dumps(cell.__dict__)


def test_sizes_that_are_kept_are_ordinary_numbers(floats: list[Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.most, self.shapes, self.last = 0, [], ()

        def forward(self, x: Tensor) -> Tensor:
            self.most = max(self.most, x.size(0))
            self.shapes.append(x.shape)
            self.last = x.shape
            return x.exp()

    model = ab.cell(Model(), dynamic=True)
    run(model, floats)
    assert type(model.most) is int
    assert {type(shape) for shape in (*model.shapes, model.last)} == {torch.Size}
    pickle.dumps(model.__dict__)


def test_sizes_that_a_failing_call_keeps(floats: list[Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.rows = x.size(0)
            raise ValueError("after it")

    model = ab.cell(Model(), dynamic=True)
    with pytest.raises(ValueError, match="after it"):
        run(model, floats)
    assert type(model.rows) is int


def test_what_is_done_to_indices_is_captured_with_the_rest() -> None:
    """Each op is one batch, although eager would run the op for each graph."""
    conv = Convolution()
    graphs = [(torch.randn(n, WIDTH), torch.randint(n, (2, 2 * n))) for n in SIZES]
    cell = ab.cell(conv, dynamic=True)
    with ab.batch():
        for graph in graphs[:2]:
            cell(*graph)
    with ab.batch() as scope:
        found = [cell(*graph) for graph in graphs]
    torch.testing.assert_close(found, [conv.forward(*graph) for graph in graphs])
    report = scope.report()
    selects = [row for row in report.signatures if row.op == "aten::index_select"]
    assert sum(row.instances for row in selects) == len(graphs)
    assert sum(row.launches for row in selects) == 1
    assert not report.at_once


def test_data_that_is_returned_may_be_read() -> None:
    """Results that depend only on arguments are computed immediately, as without the cell."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x.sum(1) > 0
        return layer(x), mask

    layer = nn.Linear(WIDTH, WIDTH)
    cell = ab.cell(function, dynamic=True)
    with ab.batch() as scope:
        found = [cell(torch.randn(n, WIDTH)) for n in SIZES]
        counts = [int(mask.sum()) for _, mask in found]
    assert len(counts) == len(SIZES)
    assert len(scope.report().flushes) == 1


def test_dropout_draws_anew(floats: list[Tensor]) -> None:
    model = ab.cell(Encoder().train(), dynamic=True)
    x = torch.randn(50, WIDTH)
    run(model, floats)
    first, second = run(model, [x, x])
    assert not torch.equal(first, second)


def test_hooks_run(floats: list[Tensor]) -> None:
    model = Encoder().eval()
    called: list[int] = []
    model.layer.register_forward_hook(lambda *_: called.append(1))
    run(ab.cell(model, dynamic=True), floats)
    assert len(called) == len(floats)


def test_copies_and_pickles(floats: list[Tensor]) -> None:
    model = ab.cell(Encoder().eval(), dynamic=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = other.runs
        torch.testing.assert_close(run(other, floats), run(model, floats))
        assert other.runs == before + 2


def test_programs_keep_no_module_alive(floats: list[Tensor]) -> None:
    @ab.cell(dynamic=True)
    class Model(Encoder):
        pass

    model = Model().eval()
    run(model, floats)
    dead = weakref.ref(model), weakref.ref(model.layer.weight)
    del model
    gc.collect()
    assert [ref() for ref in dead] == [None, None]
