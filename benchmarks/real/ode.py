"""torchdiffeq: neural ODEs whose horizon differs between examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchdiffeq import odeint, odeint_adjoint

from benchmarks.real.case import EXAMPLES, Case, lengths, model

STATE, HIDDEN = 4, 32


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(STATE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, STATE))

    def forward(self, time: Tensor, state: Tensor) -> Tensor:
        return self.net(state) * torch.cos(time)


def case(solve: Callable[..., Tensor], own_tolerance: float = 0.0, **options: Any) -> Case:
    """Makes a case that computes the final state. The package's batches use the longest horizon."""
    network = Field()
    examples = [
        (torch.randn(STATE), torch.linspace(0, 0.1 * n, n + 1))
        for n in lengths(3, 8, EXAMPLES // 2)
    ]

    def one(example: Any) -> Tensor:
        state, times = example
        return solve(network, state, times, **options)[-1].square().sum()

    def own(minibatch: Sequence[Any]) -> Tensor:
        ends = torch.tensor([len(times) - 1 for _, times in minibatch])
        longest = max((times for _, times in minibatch), key=len)
        states = torch.stack([state for state, _ in minibatch])
        solution = solve(network, states, longest, **options)
        return solution[ends, torch.arange(len(minibatch))].square().sum(-1)

    return Case(network, examples, one, own, own_tolerance=own_tolerance)


@model("Runge-Kutta 4")
def rk4() -> Case:
    return case(odeint, 1e-6, method="rk4")


@model("Dormand-Prince 5")
def dopri5() -> Case:
    return case(odeint, 1e-2, method="dopri5", rtol=1e-5, atol=1e-7)


@model("Dormand-Prince 5, adjoint")
def adjoint() -> Case:
    return case(odeint_adjoint, 1e-2, method="dopri5", rtol=1e-5, atol=1e-7)
