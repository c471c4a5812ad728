"""Memory that a block needs: what backward does not read is not kept, and what it has read goes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_autobatch as ab
from helpers_backward import DOUBLE, assert_close
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

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
    """What waits in the pool is nobody's, and what is taken from it counts."""
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
    """Hooks of the inputs run at the end of backward: by then most of it is free."""
    xs = inputs()
    with ab.batch():
        losses = [repeated(torch.tanh, 40)(x) for x in xs]
    total = torch.stack(losses).sum()
    ab.empty_cache()
    waiting: list[int] = []
    xs[0].register_hook(lambda _: waiting.append(ab.empty_cache()))
    total.backward()
    assert waiting[0] >= 30 * UNIT


def test_without_gradients_nothing_is_kept() -> None:
    xs = inputs()

    def run() -> None:
        with torch.no_grad(), ab.batch():
            w = [repeated(torch.tanh, 40)(x * x) for x in (nn.Parameter(x) for x in xs)]
        assert all(value.isfinite() for value in w)

    assert peak(run) <= 14 * UNIT


# --- the answers are the same ---


def chain(x: Tensor, w: Tensor) -> Tensor:
    h = torch.tanh(x @ w)
    return ((h.neg() + x).sigmoid() * h).sum()


def test_one_loss_after_the_other() -> None:
    """What is dropped after the first must not be missed by the second."""
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
    """Held values are read again where the graph is computed again."""
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
    """A slab whose readers are far apart lives as long as the last of them needs."""

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
