"""Dynamic cells whose arguments are objects that hold tensors, which the cells change."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_dynamic_cells import SIZES, WIDTH, Counted, Function
from torch import Tensor, nn


class Layer:
    """The keys and values of earlier tokens, for attention."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.length = 0

    def update(self, keys: Tensor) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        self.length += keys.size(0)
        return self.keys


class Cache:
    def __init__(self, layers: int) -> None:
        self.layers = [Layer() for _ in range(layers)]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.runs = 0

    def forward(self, x: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        self.runs += 1
        cache = Cache(len(self.layers)) if cache is None else cache
        for layer, past in zip(self.layers, cache.layers, strict=True):
            h = layer(x)
            keys = past.update(h)
            x = x + (h @ keys.t()).softmax(-1) @ keys / past.length
        return x, cache


def decoded(model: nn.Module, steps: int) -> list[Any]:
    found = []
    for n in SIZES:
        x, cache = model(torch.full((n, WIDTH), 0.1))
        for _ in range(steps):
            x, same = model(x[-1:], cache)
            assert same is cache
            x = x.sin()
        found += [x, *((layer.keys, layer.length) for layer in cache.layers)]
    return found


def test_a_cache_grows() -> None:
    model = Decoder()
    cell = ab.cell(model, dynamic=True)
    with ab.batch() as scope:
        found = decoded(cell, 4)
    assert model.runs == 4  # two prompts, two steps
    torch.testing.assert_close(found, decoded(model, 4))
    assert not scope.report().at_once


def test_a_cache_in_a_map_with_reads() -> None:
    cell = ab.cell(Decoder(), dynamic=True)

    def generate(n: int) -> list[int]:
        x, cache = cell(torch.full((n, WIDTH), 0.1))
        tokens = []
        for _ in range(n):
            tokens.append(int(x[-1].argmax()))
            x, cache = cell(torch.full((1, WIDTH), tokens[-1] / WIDTH), cache)
        return tokens

    with torch.no_grad():
        eager = [generate(n) for n in SIZES]
        assert ab.map(generate, SIZES) == eager
        assert ab.map(generate, SIZES) == eager


def test_gradients_through_a_cache() -> None:
    gradients = []
    model = Decoder()
    for net in (ab.cell(model, dynamic=True), model):
        with ab.batch(enabled=net is not model):
            found = decoded(net, 3)
            loss = sum(part.square().sum() for part in found[::3])
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*gradients)


class Store:
    def __init__(self, owner: Graph, **values: Any) -> None:
        self.values = values
        self.owner = weakref.ref(owner)


class Graph:
    """A graph as in graph libraries: another object holds the attributes, and refers back."""

    def __init__(self, **values: Any) -> None:
        self.store = Store(self, **values)

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["store"].values[name]
        except KeyError:
            raise AttributeError(name) from None


def graphs() -> list[Graph]:
    return [
        Graph(x=torch.ones(n, WIDTH), edges=torch.arange(2 * n).view(2, n) % n, num_nodes=n)
        for n in SIZES
    ]


LAYER = nn.Linear(WIDTH, WIDTH)


def convolve(graph: Graph) -> Tensor:
    messages = graph.x[graph.edges[0]]
    return LAYER(graph.x.new_zeros(graph.num_nodes, WIDTH).index_add(0, graph.edges[1], messages))


def add_and_remove(graph: Graph) -> Tensor:
    graph.store.values["h"] = LAYER(graph.x)
    graph.store.values["twice"] = graph.num_nodes * 2
    del graph.store.values["edges"]
    graph.done = (graph.h.shape[0], True)
    return graph.h.sum()


def in_two_places(graph: Graph) -> list[Graph]:
    fresh = Graph(x=LAYER(graph.x))
    return [fresh, fresh]


def facts(value: Any) -> Any:
    """Returns the contents of an object."""
    if isinstance(value, (Graph, Store)):
        return {name: facts(item) for name, item in vars(value).items() if name != "owner"}
    if isinstance(value, (list, tuple)):
        return [facts(item) for item in value]
    return {k: facts(v) for k, v in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("function", "runs"), [(convolve, 2), (add_and_remove, 2), (in_two_places, len(SIZES))]
)
def test_an_objects_attributes(function: Function, runs: int) -> None:
    counted = Counted(function)
    cell = ab.cell(counted, dynamic=True)
    ours, eager = graphs(), graphs()
    with ab.batch():
        found = [cell(graph) for graph in ours]
    wanted = [function(graph) for graph in eager]
    assert counted.runs == runs
    for pair in zip([*found, *ours], [*wanted, *eager], strict=True):
        torch.testing.assert_close(*(facts(value) for value in pair))
        types = [{k: type(v) for k, v in vars(one).items()} for one in pair if type(one) is Graph]
        assert types[1:] == types[:-1]


def test_ints_are_ordinary_after_an_error() -> None:
    def fails(graph: Graph) -> Tensor:
        graph.store.values["num_nodes"] *= 2
        raise ValueError("no")

    cell = ab.cell(fails, dynamic=True)
    graph = graphs()[0]
    with ab.batch(), pytest.raises(ValueError, match="no"):
        cell(graph)
    assert type(graph.num_nodes) is int
    assert graph.num_nodes == 2 * SIZES[0]


def padded(ids: Tensor) -> Tensor:
    """transformers checks in this way whether a mask is missing."""
    x = TABLE(ids)
    return x.sin() if 0 in ids[[0, -1]] else x.cos()


def of_most(ids: Tensor) -> Tensor:
    """Graph libraries count nodes in this way."""
    count = ids.max().item() + 1
    return LAYER(torch.zeros(count, WIDTH).index_add(0, ids, TABLE(ids)))


TABLE = nn.Embedding(20, WIDTH)


@pytest.mark.parametrize(("function", "runs"), [(padded, 4), (of_most, 2)])
def test_known_values_are_read(function: Function, runs: int) -> None:
    """The program reads known values at each call, as conditions or as numbers."""
    counted = Counted(function)
    cell = ab.cell(counted, dynamic=True)
    inputs = [torch.arange(n) * 7 % 11 + k % 2 for k, n in enumerate((3, 5, 4, 6, 9, 8, 7, 2))]
    with ab.batch() as scope:
        found = [cell(ids) for ids in inputs]
    torch.testing.assert_close(found, [function(ids) for ids in inputs])
    assert counted.runs == runs
    assert len(scope.report().flushes) == 1


def test_values_that_were_computed_are_known() -> None:
    cell = ab.cell(padded, dynamic=True)

    def walk(n: int) -> list[int]:
        ids, found = torch.arange(1, n + 1), []
        for _ in range(4):
            index = cell(ids).sum(0).argmax()
            found.append(int(index))
            ids = index.view(1)
        return found

    with torch.no_grad():
        assert ab.map(walk, SIZES) == [walk(n) for n in SIZES]
        assert not [row for row in ab.last_report().at_once if "op by op" in row.reason]


class Slot:
    """A layer of a cache that is made before it is filled."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.is_filled = False


class Slots:
    def __init__(self) -> None:
        self.layers = [Slot(), Slot()]
        self.kind = Slot


class SlotDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.runs = 0

    def forward(self, x: Tensor, cache: Slots) -> Tensor:
        self.runs += 1
        for layer, slot in zip(self.layers, cache.layers, strict=True):
            h = layer(x)
            slot.keys = torch.cat([slot.keys, h]) if slot.is_filled else h
            slot.is_filled = True
            x = x + (h @ slot.keys.t()).softmax(-1) @ slot.keys
        return x


def generated(model: nn.Module, steps: int) -> list[Any]:
    found: list[Any] = []
    for n in (*SIZES, *SIZES):
        cache = Slots()
        x = model(torch.full((n, WIDTH), 0.1), cache)
        for _ in range(steps):
            x = model(x[-1:].sin(), cache)
        found += [x, *((slot.keys, slot.is_filled) for slot in cache.layers)]
    return found


def test_a_cache_without_tensors_yet_is_told_by_what_is_in_it() -> None:
    torch.manual_seed(0)
    plain = SlotDecoder()
    model = ab.cell(SlotDecoder(), dynamic=True)
    model.load_state_dict(plain.state_dict())
    for _ in range(3):
        with ab.batch(adaptive=False):
            ours = generated(model, 3)
        torch.testing.assert_close(ours, generated(plain, 3))
    before = model.runs
    with ab.batch(adaptive=False):
        generated(model, 3)
    assert model.runs == before


class Marker:
    pass


FIRST, SECOND = Marker(), Marker()


def test_objects_without_attributes_are_told_by_identity() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def function(x: Tensor, marker: Marker) -> Tensor:
        return (x @ weight).tanh() if marker is FIRST else (x @ weight).sin()

    cell = ab.cell(function, dynamic=True)
    for _ in range(3):
        xs = [torch.randn(n, WIDTH) for n in (2, 3, 2, 3)]
        with ab.batch(adaptive=False):
            ours = [cell(x, marker) for x in xs for marker in (FIRST, SECOND)]
        torch.testing.assert_close(
            ours, [function(x, mark) for x in xs for mark in (FIRST, SECOND)]
        )
