"""Cells: their use in a model, ways to make a cell, options, and state."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_cells import TREES, Counted, Tree, losses_and_gradients, vectors
from torch import Tensor, nn

# ---------------------------------------------------------------- use in a model


def test_a_model_of_cells() -> None:
    ours, plain = Tree(True), Tree(False)
    torch.testing.assert_close(
        losses_and_gradients(ours, TREES, True), losses_and_gradients(plain, TREES, False)
    )
    assert ours.runs < 12 < plain.runs  # once for each kind of arguments


def test_a_cell_adds_the_same_ops() -> None:
    reports = []
    for as_cells in (True, False):
        model = Tree(as_cells)
        with ab.batch() as scope:
            kept = [model(tree) for tree in TREES]
        reports.append(scope.report())
        assert len(kept) == len(TREES)
    assert reports[0].ops == reports[1].ops
    assert reports[0].batches < reports[1].batches  # the ops of a cell run as one node


def test_outside_a_block_and_under_no_grad() -> None:
    ours, plain = Tree(True), Tree(False)
    torch.testing.assert_close(ours(TREES[0]), plain(TREES[0]))
    with torch.no_grad(), ab.batch():
        found = [ours(tree) for tree in TREES]
    assert not any(f.requires_grad for f in found)
    torch.testing.assert_close(found, [plain(tree).detach() for tree in TREES])


def test_grad_mode_is_part_of_the_kind() -> None:
    w = torch.ones(3, requires_grad=True)
    times = ab.cell(lambda x: x * w)
    with ab.batch():
        a = times(torch.ones(3))
        with torch.no_grad():
            b = times(torch.ones(3))
        c = times(torch.ones(3))
    assert [t.requires_grad for t in (a, b, c)] == [True, False, True]
    torch.testing.assert_close([a, b, c], [torch.ones(3)] * 3)
    (a * 2 + c).sum().backward()
    torch.testing.assert_close(w.grad, torch.full((3,), 3.0))


def test_create_graph() -> None:
    cube = ab.cell(lambda x: (x * x * x).sum())
    xs = [v.requires_grad_() for v in vectors(4)]
    with ab.batch():
        losses = [cube(x) for x in xs]
    grads = torch.autograd.grad(losses, xs, create_graph=True)
    second = torch.autograd.grad([g.sum() for g in grads], xs)
    for x, first, g in zip(xs, grads, second, strict=True):
        torch.testing.assert_close(first, 3 * x * x)
        torch.testing.assert_close(g, 6 * x.detach())


# ---------------------------------------------------------------- ways to make a cell


def test_kinds_of_callables() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    @ab.cell
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module
            self.runs = 0

        def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
            self.runs += 1
            return self.inner(x) * scale

    doubled = Doubled()
    of_module = ab.cell(module)
    with ab.batch():
        a = [doubled(x) for x in vectors(4)]
        b = [doubled(x, scale=3.0) for x in vectors(4)]
        c = [of_module(x) for x in vectors(4)]
    assert doubled.runs == 2
    for k, x in enumerate(vectors(4)):
        torch.testing.assert_close([a[k], b[k], c[k]], [module(x) * 2, module(x) * 3, module(x)])
    assert isinstance(Doubled, type)
    assert isinstance(doubled, nn.Module)


def test_it_looks_like_the_function() -> None:
    @ab.cell
    def double(x: Tensor) -> Tensor:
        """Twice x."""
        return x * 2

    assert double.__name__ == "double"
    assert double.__doc__ == "Twice x."
    assert double.__wrapped__(torch.ones(1)).item() == 2  # type: ignore[attr-defined]
    assert weakref.ref(double)() is double
    with pytest.raises(TypeError, match="a function or another callable, not int"):
        ab.cell(3)  # type: ignore[type-var]


def test_cells_in_cells() -> None:
    runs = []

    @ab.cell
    def inner(x: Tensor) -> Tensor:
        runs.append("inner")
        return x.tanh()

    @ab.cell
    def outer(x: Tensor) -> Tensor:
        runs.append("outer")
        return inner(x) + inner(x * 2)

    xs = [x.requires_grad_() for x in vectors(5)]
    with ab.batch():
        found = [outer(x) for x in xs]
    assert runs == ["outer", "inner", "inner"]
    expected = [x.tanh() + (x * 2).tanh() for x in xs]
    torch.testing.assert_close(found, expected)
    ours = torch.autograd.grad([f.sum() for f in found], xs)
    torch.testing.assert_close(ours, torch.autograd.grad([e.sum() for e in expected], xs))


# ---------------------------------------------------------------- options


def test_granularity() -> None:
    runs = {}
    for granularity in ("op", "cell", "auto"):
        model = Tree(True)
        with ab.batch(granularity=granularity):
            kept = [model(tree) for tree in TREES]
        torch.testing.assert_close(kept, [Tree(False)(tree) for tree in TREES])
        runs[granularity] = model.runs
    assert runs["op"] > 20 > runs["cell"] == runs["auto"]
    with pytest.raises(ValueError, match=r"granularity='graph'.*'auto', 'cell', 'op'"):
        ab.batch(granularity="graph")


@pytest.mark.parametrize("options", [{"verify": True}, {"max_pending": 5}, {"policy": "depth"}])
def test_with_other_options(options: dict[str, Any]) -> None:
    model = Tree(True)
    with ab.batch(**options):
        found = [model(tree) for tree in TREES]
    torch.testing.assert_close(found, [Tree(False)(tree) for tree in TREES])


# ---------------------------------------------------------------- state


def test_nothing_outlives_the_block() -> None:
    class Marker:
        pass

    marker = Marker()
    module = nn.Linear(2, 2)
    counted = Counted()

    @ab.cell
    def called(module: nn.Module, x: Tensor, marker: Marker) -> Tensor:
        counted.runs += 1
        return module(x)

    with ab.batch():
        kept = [called(module, torch.ones(2), marker) for _ in range(3)]
    assert counted.runs == 1
    gone = weakref.ref(marker), weakref.ref(module)
    del marker, module, kept
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_threads_have_their_own_templates() -> None:
    model = Tree(True)
    expected = losses_and_gradients(Tree(False), TREES, False)[0]
    found: dict[int, Tensor] = {}

    def work(k: int) -> None:
        for _ in range(3):
            with ab.batch():
                losses = [model(tree).square().sum() for tree in TREES]
            found[k] = torch.stack(losses).detach()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(3):
        torch.testing.assert_close(found[k], expected)


def test_very_many_kinds() -> None:
    scaled = ab.cell(lambda x, k: x * k)
    x = torch.ones(2, requires_grad=True)
    with ab.batch():
        found = [scaled(x, k) for k in range(6000)]
    assert [int(f[0]) for f in found] == list(range(6000))


def test_autocast_is_part_of_the_kind() -> None:
    module = nn.Linear(4, 4)
    called = ab.cell(module)
    x = torch.ones(4)
    with ab.batch():
        a = called(x)
        with torch.autocast("cpu"):
            b = [called(x) for _ in range(2)]
        c = called(x)
    with torch.autocast("cpu"):
        expected = module(x)
    assert [t.dtype for t in (a, *b, c)] == [
        torch.float,
        torch.bfloat16,
        torch.bfloat16,
        torch.float,
    ]
    torch.testing.assert_close([a, *b, c], [module(x), expected, expected, module(x)])


SELECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x[mask]": lambda x, mask: x.exp()[mask],
    "masked_select": lambda x, mask: torch.masked_select(x.exp(), mask),
    "x[mask] = v": lambda x, mask: _assign(x.exp(), mask),
}


def _assign(x: Tensor, mask: Tensor) -> Tensor:
    x[mask] = 0.0
    return x


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_selected_follows_from_values(name: str, dynamic: bool) -> None:
    """An argument is a mask. A different mask selects different elements."""
    function = SELECTIONS[name]
    cell = ab.cell(function, dynamic=dynamic)
    xs = [torch.randn(3, 4, requires_grad=True) for _ in range(4)]
    masks = [torch.rand(3, 4) > 0.5 for _ in xs]
    with ab.batch():
        found = [cell(x, mask) for x, mask in zip(xs, masks, strict=True)]
    expected = [function(x, mask) for x, mask in zip(xs, masks, strict=True)]
    torch.testing.assert_close(found, expected)
