"""Memory of a block: only values that backward reads are kept, and freed after backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_autobatch as ab
from helpers_backward import DOUBLE, assert_close
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmarks.memory import tensor_peak as peak

WIDTH = 1 << 14
UNIT = 4 * 4 * WIDTH  # bytes of one op's results for four instances


def inputs(requires_grad: bool = True) -> list[Tensor]:
    return [torch.rand(1, WIDTH).requires_grad_(requires_grad) for _ in range(4)]


def repeated(op: Callable[[Tensor], Tensor], times: int) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        for _ in range(times):
            x = op(x)
        return x.sum()

    return run


def train(function: Callable[[Tensor], Tensor], xs: list[Tensor]) -> None:
    with ab.batch():
        losses = [function(x) for x in xs]
    torch.stack(losses).sum().backward()


def test_the_profiler_sees_the_pool() -> None:
    """The profiler counts memory that is taken from the pool, and not memory in the pool."""
    xs = inputs()
    step = repeated(torch.tanh, 10)
    train(step, xs)
    first, second = (peak(lambda: train(step, xs)) for _ in range(2))
    assert first >= 10 * UNIT
    assert abs(first - second) <= 2 * UNIT
    kept = ab.empty_cache()
    assert kept >= 10 * UNIT
    assert ab.empty_cache() == 0
    assert abs(peak(lambda: train(step, xs)) - first) <= 2 * UNIT


def test_the_profiler_knows_all_that_it_is_told_of(capfd: pytest.CaptureFixture[str]) -> None:
    """Memory that returns to the system was free, so no tensor used it."""
    ab.empty_cache()
    xs = inputs()

    def run() -> None:
        train(repeated(torch.tanh, 10), xs)
        for x in xs:
            x.grad = None
        assert ab.empty_cache() >= 10 * UNIT

    assert peak(run) >= 10 * UNIT
    assert "unknown size" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("of", ["lookups", "products"])
def test_gradients_of_weights_come_back_to_the_kept_memory(of: str) -> None:
    """If the memory returned to the system, the next step would have a page fault for each page."""
    weight = torch.nn.Parameter(torch.randn(1000, 1000))
    indices, rows = torch.tensor([1, 5]), torch.randn(2, 1000)
    with ab.batch():
        if of == "lookups":
            losses = [torch.embedding(weight, indices).sum() for _ in range(3)]
        else:
            losses = [torch.nn.functional.linear(rows, weight).sum() for _ in range(3)]
    torch.stack(losses).sum().backward()
    ab.empty_cache()
    assert weight.grad is not None
    size = weight.grad.numel() * weight.grad.element_size()
    weight.grad = None
    assert size <= ab.empty_cache() <= 1.2 * size


@pytest.mark.parametrize(
    "op",
    [torch.neg, torch.clone, lambda x: x + 1, lambda x: x.sigmoid() + x.neg()],
    ids=["neg", "clone", "add", "mixed"],
)
def test_what_backward_does_not_read_is_not_kept(op: Callable[[Tensor], Tensor]) -> None:
    saved = 20 if op(torch.zeros(1)) == 0.5 else 0
    xs = inputs()
    assert peak(lambda: train(repeated(op, 20), xs)) <= (saved * 1.25 + 12) * UNIT


def test_gradients_go_as_backward_goes() -> None:
    xs = inputs()
    assert peak(lambda: train(repeated(torch.tanh, 40), xs)) <= 60 * UNIT


def test_values_go_as_backward_goes() -> None:
    """Hooks of the inputs run at the end of backward, when most of the memory is free."""
    xs = inputs()
    with ab.batch():
        losses = [repeated(torch.tanh, 40)(x) for x in xs]
    total = torch.stack(losses).sum()
    ab.empty_cache()
    waiting: list[int] = []
    xs[0].register_hook(lambda _: waiting.append(ab.empty_cache()))
    total.backward()
    assert waiting[0] >= 30 * UNIT


def test_of_one_ops_results_only_those_are_kept_that_backward_reads() -> None:
    """In each step, eager saves x and y, but not z, which only a sum reads."""
    xs = inputs()

    def step(x: Tensor) -> Tensor:
        y = x * 0.5
        z = y * x
        return z + 1

    kept = 2 * 20
    assert peak(lambda: train(repeated(step, 20), xs)) <= (kept + 8) * UNIT


def recurrence(hidden: int, steps: int) -> tuple[Callable[[Tensor], Tensor], nn.ParameterList]:
    """One product computes the input's contribution to the gates of all steps."""
    w_x, w_h = (nn.Parameter(torch.randn(4 * hidden, hidden) / hidden) for _ in range(2))

    def run(xs: Tensor) -> Tensor:
        h = c = torch.zeros(1, hidden)
        for t in range(steps):
            gates = nn.functional.linear(xs[t : t + 1], w_x) + nn.functional.linear(h, w_h)
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h.sum()

    return run, nn.ParameterList([w_x, w_h])


@pytest.mark.needs("chunk_batches", "member_order")
def test_a_recurrence_takes_no_more_memory_than_eager() -> None:
    run, weights = recurrence(256, 24)
    xs = [torch.randn(24, 256) for _ in range(64)]

    def eager() -> None:
        torch.stack([run(x) for x in xs]).sum().backward()

    def ours() -> None:
        train(run, xs)

    figures = []
    for step in (eager, ours):
        weights.zero_grad()
        step()  # the first step allocates the gradients
        figures.append(peak(step))
    assert figures[1] <= 1.05 * figures[0]


@pytest.mark.needs("chunk_batches")
def test_a_divided_batch_counts_once_and_gives_the_same() -> None:
    """128 x 24 rows of 512 are 6 MB. They are computed in parts, shortly before each read."""
    counts = []
    for hidden in (16, 128):
        run, weights = recurrence(hidden, 24)
        xs = [torch.randn(24, hidden) for _ in range(128)]
        with ab.batch() as scope:
            losses = [run(x) for x in xs]
        counts.append((scope.report().batches, scope.report().launches))
        total = torch.stack(losses).sum()
        total.backward()
        gradients = [w.grad for w in weights]
        weights.zero_grad(set_to_none=True)
        expected = torch.stack([run(x) for x in xs]).sum()
        expected.backward()
        torch.testing.assert_close(total, expected)
        for gradient, w in zip(gradients, weights, strict=True):
            torch.testing.assert_close(gradient, w.grad, rtol=1e-4, atol=1e-4)
    (small, few), (large, many) = counts
    assert small == large == few
    assert many > large


def test_without_gradients_nothing_is_kept() -> None:
    xs = inputs()

    def run() -> None:
        with torch.no_grad(), ab.batch():
            w = [repeated(torch.tanh, 40)(x * x) for x in (nn.Parameter(x) for x in xs)]
        assert all(value.isfinite() for value in w)

    assert peak(run) <= 14 * UNIT


# --- results are unchanged ---


def chain(x: Tensor, w: Tensor) -> Tensor:
    h = torch.tanh(x @ w)
    return ((h.neg() + x).sigmoid() * h).sum()


def test_one_loss_after_the_other() -> None:
    """Data that is freed after the first backward must not be needed by the second."""
    w = torch.rand(8, 8, dtype=DOUBLE, requires_grad=True)
    xs = [torch.rand(1, 8, dtype=DOUBLE, requires_grad=True) for _ in range(4)]
    with ab.batch():
        losses = [chain(x, w) for x in xs]
    eager = [chain(x, w) for x in xs]
    for i in (2, 0, 3, 1):
        ours = torch.autograd.grad(losses[i], [w, xs[i]], retain_graph=i == 0)
        theirs = torch.autograd.grad(eager[i], [w, xs[i]], retain_graph=i == 0)
        assert_close(list(ours), list(theirs))
    again = torch.autograd.grad(losses[0], [w, xs[0]])
    assert_close(list(again), list(torch.autograd.grad(eager[0], [w, xs[0]])))
    for i in range(4):
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(losses[i], [w])


def test_held_values_and_create_graph() -> None:
    """If the graph is computed again, held values are read again."""
    w = torch.rand(8, 8, dtype=DOUBLE, requires_grad=True)
    xs = [torch.rand(1, 8, dtype=DOUBLE, requires_grad=True) for _ in range(3)]

    def second_order(block: bool) -> list[Tensor]:
        with ab.batch(enabled=block):
            hs = [torch.tanh(x @ w) for x in xs]
            losses = [(h.sigmoid() * h.neg()).sum() for h in hs]
        grads = torch.autograd.grad(torch.stack(losses).sum(), [w, *hs], create_graph=True)
        return list(torch.autograd.grad(sum((g * g).sum() for g in grads), [w, *xs]))

    assert_close(second_order(True), second_order(False))


def test_a_value_that_is_read_late() -> None:
    """A slab lives until its last reader has run."""

    def model(x: Tensor) -> Tensor:
        first = x.neg()
        y = first
        for _ in range(12):
            y = y.tanh().neg()
        return (y + first).sum()

    xs = [torch.rand(1, WIDTH, dtype=DOUBLE, requires_grad=True) for _ in range(3)]
    with ab.batch():
        losses = [model(x) for x in xs]
    grads = torch.autograd.grad(torch.stack(losses).sum(), xs)
    expected = torch.autograd.grad(torch.stack([model(x) for x in xs]).sum(), xs)
    assert_close(list(grads), list(expected))
