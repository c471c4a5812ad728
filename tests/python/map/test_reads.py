"""Reads of every kind suspend the instance at any depth, and one flush serves many reads."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch_autobatch as ab
from mapping import agree, flushes, largest, same
from torch import Tensor, nn

DOUBLE = torch.float64
COUNT = 7


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 3, dtype=DOUBLE)


def inputs(count: int = COUNT, rows: int = 2) -> list[Tensor]:
    return [torch.randn(rows, 3, dtype=DOUBLE) for _ in range(count)]


def printed(h: Tensor) -> str:
    file = io.StringIO()
    print(h.detach(), file=file)
    return file.getvalue()


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda h: h.sum().item(),
    "bool": lambda h: bool(h[0, 0] > 0),
    "while": lambda h: [i for i in range(9) if h.detach().abs().sum() * i < 5],
    "int": lambda h: int(h[0, 0] * 100),
    "float": lambda h: float(h[0, 0]),
    "complex": lambda h: complex(h[0, 0]).real,
    "index": lambda h: list(range(9))[h[0].argmax()],
    "tolist": lambda h: h.tolist(),
    "numpy": lambda h: h.detach().numpy().copy().tolist(),
    "asarray": lambda h: np.asarray(h.detach()).tolist(),
    "nonzero": lambda h: (h > 0).nonzero(),
    "mask": lambda h: h[h > 0],
    "masked_select": lambda h: h.masked_select(h > 0),
    "unique": lambda h: (h > 0).unique(),
    "repeat_interleave": lambda h: h.repeat_interleave((h[:, 0] > 0).long() + 1, 0),
    "equal": lambda h: torch.equal(h, h + 0),
    "allclose": lambda h: torch.allclose(h, h * 1),
    "print": printed,
    "format": lambda h: f"{h[0, 0]:.3f}",
    "pickle": lambda h: pickle.loads(pickle.dumps(h.detach())),
    "deepcopy": lambda h: copy.deepcopy(h.detach()),
    "data": lambda h: h.data.sum(),
    "data_ptr": lambda h: h.data_ptr() != 0,
    "is_leaf": lambda h: h.is_leaf,
    "grad_fn": lambda h: h.grad_fn is None,
    "iterate": lambda h: [bool(x > 0) for x in h[0]],
    "any": lambda h: any(x > 0.5 for x in h[0]),
    "sort_key": lambda h: [int(i) for i in sorted(range(3), key=lambda i: h[0, i])],
    "max": lambda h: max(h[0], key=lambda x: x.item()),
    "topk": lambda h: [int(i) for i in h[0].topk(2).indices],
    "where": lambda h: torch.where(h > 0)[0],
    "ops": lambda h: torch.ops.aten.item(h[0, 0] + 0),
    "ops_default": lambda h: torch.ops.aten.nonzero.default(h > 0),
}


@pytest.mark.parametrize("name", READS)
def test_a_read_gives_what_the_loop_has(layer: nn.Linear, name: str) -> None:
    """Ops after the read are still batched."""

    def function(x: Tensor) -> Any:
        h = layer(x).tanh()
        seen = READS[name](h)
        return seen, layer(h).sum(), READS[name](layer(h).sin())

    agree(function, inputs(), layer)


# A fiber can't be suspended within a pybind11 function, so the read is immediate.
AT_ONCE = ("ops", "ops_default", "pickle")


@pytest.mark.parametrize("name", [name for name in READS if name not in AT_ONCE])
def test_a_read_is_served_for_all_at_once(layer: nn.Linear, name: str) -> None:
    def function(x: Tensor) -> Any:
        h = layer(x).tanh()
        READS[name](h)
        return layer(h).sum()

    report = agree(function, inputs(), layer)
    assert largest(report, "aten::tanh") == COUNT


def test_many_rounds(layer: nn.Linear) -> None:
    """There is one flush per round, for any number of instances."""

    def function(x: Tensor) -> Any:
        path = []
        for _ in range(5):
            x = layer(x).tanh()
            path.append(x[0].argmax().item())
            x = x * (1 + path[-1])
        return x, path

    report = agree(function, inputs(20), layer)
    assert flushes(report) == 6
    assert largest(report, "aten::linear") == 20


def test_different_numbers_of_reads(layer: nn.Linear) -> None:
    """Some instances end early, and some never read."""

    def function(pair: tuple[int, Tensor]) -> Any:
        count, x = pair
        seen = []
        for _ in range(count):
            x = layer(x).tanh()
            seen.append(x.sum().item() > 0)
        return layer(x).sum(), seen

    report = agree(function, list(enumerate(inputs(9))), layer)
    assert flushes(report) == 9  # eight reads, and the end


def test_what_is_not_needed_waits(layer: nn.Linear) -> None:
    """Losses that are not read form one batch at the end."""

    def function(x: Tensor) -> Any:
        losses = []
        for _ in range(4):
            x = layer(x).tanh()
            losses.append(x.exp().sum())
            if x.sum().item() > 9:
                break
        return torch.stack(losses).sum()

    report = agree(function, inputs(5), layer)
    assert largest(report, "aten::exp") == 20


def test_a_value_computed_meanwhile_does_not_suspend(layer: nn.Linear) -> None:
    def function(x: Tensor) -> Any:
        h = layer(x)
        first, second = h[0].sum(), h[1].sum()
        return first.item(), second.item(), h.sum().item() + first.item()

    report = agree(function, inputs(), layer)
    assert flushes(report) == 2


class Deep(nn.Module):
    """Reads values in modules, recursion, comprehensions and generators."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3, dtype=DOUBLE), nn.Tanh())

    def grow(self, x: Tensor, depth: int) -> Any:
        h = self.inner(x)
        if depth == 0 or h.sum() > 1:
            return h
        return [self.grow(h * k, depth - 1) for k in range(1, 1 + int(h[0, 0] > 0) + 1)]

    def stream(self, x: Tensor) -> Iterator[float]:
        for _ in range(3):
            x = self.inner(x)
            yield x.sum().item()

    def forward(self, x: Tensor) -> Any:
        total = sum(self.stream(x))
        big = {k: v for k, v in enumerate(self.stream(x * 2)) if v > 0.1}
        return self.grow(x, 4), total, big, x[x > 0] * self.inner(x).sum()


def test_reads_at_any_depth() -> None:
    model = Deep()
    agree(model, inputs(), model)


def test_a_function_that_reads_nothing(layer: nn.Linear) -> None:
    report = agree(lambda x: layer(x).sum(), inputs(), layer)
    assert flushes(report) == 1


def test_a_function_without_tensors() -> None:
    assert ab.map(lambda x: x * x, range(4)) == [0, 1, 4, 9]
    assert ab.map(lambda x: x, []) == []


def test_results_of_any_structure(layer: nn.Linear) -> None:
    class Result:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    results = ab.map(lambda x: Result(layer(x) if x.sum() > 0 else x), xs := inputs())
    for result, x in zip(results, xs, strict=True):
        assert isinstance(result, Result)
        same(result.value, layer(x) if x.sum() > 0 else x)


def test_generators_and_reads_of_others(layer: nn.Linear) -> None:
    """Instances also read a tensor of another instance, from a shared list."""
    shared: list[Tensor] = []

    def function(x: Tensor) -> Any:
        h = layer(x)
        shared.append(h.detach().sum())
        value = h.sum().item()
        return value, [s.item() for s in shared[:1]]

    results = ab.map(function, xs := inputs())
    assert len({first for _, (first,) in results}) == 1
    same([value for value, _ in results], [layer(x).sum().item() for x in xs])


def test_nested_maps(layer: nn.Linear) -> None:
    """One flush serves the reads of the inner instances of all outer instances."""

    def inner(x: Tensor) -> Any:
        h = layer(x)
        if h.sum() > 0:
            h = layer(h).tanh()
        return h.sum(), h[0].argmax().item()

    def outer(xs: list[Tensor]) -> Any:
        found = ab.map(inner, xs)
        best = max(range(len(found)), key=lambda i: found[i][0].item())
        return found, best, found[best][0] * 2

    report = agree(outer, [inputs(n) for n in (3, 1, 4, 2)], layer)
    assert largest(report, "aten::linear") == 10


def test_inside_a_block_all_joins(layer: nn.Linear) -> None:
    """Ops that are pending around the map stay pending, and are batched with ops of the map."""
    x = inputs()
    with ab.batch() as scope:
        before = layer(x[0]).exp()
        results = ab.map(lambda x: layer(x).exp(), x)
        assert not flushes(scope.report())
    assert largest(scope.report(), "aten::exp") == COUNT + 1
    same([before, *results], [layer(v).exp() for v in [x[0], *x]])


@pytest.mark.parametrize("options", [{"verify": True}, {"policy": "depth"}, {"max_pending": 5}])
def test_options_of_the_block(layer: nn.Linear, options: dict[str, Any]) -> None:
    def function(x: Tensor) -> Any:
        for _ in range(3):
            x = layer(x).tanh()
            if x.sum() > 0.5:
                x = x * 0.5
        return x

    agree(function, inputs(), layer, **options)


def test_writes(layer: nn.Linear) -> None:
    """Tests in-place ops, deferred or not, before and after reads."""

    def function(x: Tensor) -> Any:
        h = layer(x)
        out = torch.zeros(4, 3, dtype=DOUBLE)
        out[0] = h[0]
        count = int((h > 0).sum())
        out[1] += h[1] * count
        out[h[0].argmax().item()] *= 2
        h2 = layer(out)
        h2[h2 < 0] = 0
        h2.clamp_(max=1.0)
        return h2.sum(), out.sum()

    agree(function, inputs(), layer)


def test_other_greenlets(layer: nn.Linear) -> None:
    """The user's greenlet is between the fiber and the read."""
    import greenlet

    def function(x: Tensor) -> Any:
        def body() -> float:
            return layer(x).sum().item() + layer(x * 2).sum().item()

        return greenlet.greenlet(body).switch()

    agree(function, inputs())


def test_cells(layer: nn.Linear) -> None:
    """Calls a function that is captured as a whole, between reads."""

    @ab.cell
    def step(x: Tensor) -> Tensor:
        return layer(x).tanh()

    def function(x: Tensor) -> Any:
        for _ in range(4):
            x = step(x)
            if x.sum() > 0.5:
                break
        return x

    report = agree(function, inputs(), layer)
    assert largest(report, "autobatch::cell") == COUNT
