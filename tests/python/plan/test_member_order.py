"""The members of a batch are ordered as their consumers need them, not by order of capture."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import check, rand
from torch import Tensor

WIDTH = 4


def test_instances_that_end_at_different_steps() -> None:
    def run(w: Tensor, u: Tensor, steps: Tensor) -> Tensor:
        h = torch.zeros(1, WIDTH, dtype=steps.dtype)
        states = []
        for x in steps.split(1):
            h = torch.tanh(F.linear(x, w) + F.linear(h, u))
            states.append(h)
        return F.linear(torch.cat(states), w)

    lengths = (2, 5, 1, 4, 3, 5)
    parameters = [rand(WIDTH, WIDTH), rand(WIDTH, WIDTH)]
    check(run, *[(rand(n, WIDTH),) for n in lengths], parameters=parameters)


def test_readers_in_another_order() -> None:
    """Rows are read in reverse order, by two ops, or not at all."""
    weight = rand(WIDTH, WIDTH).requires_grad_()
    x = [rand(1, WIDTH).requires_grad_() for _ in range(6)]

    def step(enabled: bool) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        with ab.batch(enabled=enabled):
            rows = [torch.tanh(each) for each in x]
            products = [rows[i] @ weight for i in (5, 1, 3, 0)]
            sums = [products[i] * rows[j] for i, j in ((2, 0), (0, 4), (1, 1), (3, 5))]
            held = [rows[2], products[1], *sums]
        total = torch.stack([each.sum() * (i + 1) for i, each in enumerate(held)]).sum()
        return held, torch.autograd.grad(total, [weight, *x])

    (results, grads), (expected, wanted) = step(True), step(False)
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("op", [torch.bernoulli, torch.rand_like])
def test_random_numbers_are_drawn_in_the_order_of_capture(op: object) -> None:
    probabilities = [torch.full((3,), 0.5) for _ in range(4)]

    def step(order: tuple[int, ...]) -> list[Tensor]:
        torch.manual_seed(0)
        with ab.batch():
            drawn = [op(each) for each in probabilities]  # type: ignore[operator]
            _read = [drawn[i] * 2 for i in order]
        return drawn

    torch.testing.assert_close(step((0, 1, 2, 3)), step((3, 1, 0, 2)))
