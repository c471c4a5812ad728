"""torchode: a solver with a step size for each row, so its batches compute the same as a loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchode
from torch import Tensor, nn

from benchmarks.real.case import EXAMPLES, Case, lengths, model

STATE, HIDDEN, POINTS = 4, 32, 4


def case(method: type[nn.Module]) -> Case:
    network = nn.Sequential(nn.Linear(STATE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, STATE))
    term = torchode.ODETerm(lambda time, state: network(state))
    controller = torchode.IntegralController(atol=1e-6, rtol=1e-4, term=term)
    solver = torchode.AutoDiffAdjoint(method(term=term), controller)

    def solve(states: Tensor, times: Tensor) -> Tensor:
        problem = torchode.InitialValueProblem(y0=states, t_eval=times)
        return solver.solve(problem).ys[:, -1].square().sum(-1)

    def one(example: Any) -> Tensor:
        state, times = example
        return solve(state[None], times[None])[0]

    def own(minibatch: Sequence[Any]) -> Tensor:
        states, times = zip(*minibatch, strict=True)
        return solve(torch.stack(states), torch.stack(times))

    examples = [
        (torch.randn(STATE), torch.linspace(0, 0.2 * n, POINTS))
        for n in lengths(2, 6, EXAMPLES // 4)
    ]
    return Case(network, examples, one, own)


@model("Dormand-Prince 5")
def dopri5() -> Case:
    return case(torchode.Dopri5)


@model("Tsitouras 5")
def tsit5() -> Case:
    return case(torchode.Tsit5)
