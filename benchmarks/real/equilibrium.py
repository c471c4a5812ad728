"""torchdeq: deep equilibrium models, whose number of iterations differs between examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchdeq import get_deq

from benchmarks.real.case import Case, model

FEATURES, HIDDEN = 12, 24


class Equilibrium(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inject = nn.Linear(FEATURES, HIDDEN)
        self.recur = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1)
        with torch.no_grad():
            self.recur.weight *= 0.8
        self.solve = get_deq(f_max_iter=30, b_max_iter=30, **options)

    def forward(self, x: Tensor) -> Tensor:
        injected = self.inject(x)
        states, _ = self.solve(lambda z: torch.tanh(self.recur(z) + injected), injected * 0)
        return self.out(states[-1]).squeeze(-1)


def case(own_tolerance: float, **options: Any) -> Case:
    network = Equilibrium(**options)

    def one(x: Tensor) -> Tensor:
        return network(x[None]).square()[0]

    def own(minibatch: Sequence[Tensor]) -> Tensor:
        return network(torch.stack(list(minibatch))).square()

    examples = [scale * torch.randn(FEATURES) for scale in torch.linspace(0.2, 2, 16)]
    return Case(network, examples, one, own, own_tolerance=own_tolerance)


@model("fixed-point iteration, implicit gradients")
def implicit() -> Case:
    return case(2e-2, f_solver="fixed_point_iter", ift=True)


@model("Anderson's acceleration, one-step gradients")
def anderson() -> Case:
    return case(2e-2, f_solver="anderson", grad=1)
