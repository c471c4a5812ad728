"""torchcde: neural controlled differential equations on series of different lengths."""

from __future__ import annotations

import torch
import torchcde
from torch import Tensor, nn

from benchmarks.real.case import Case, lengths, model

CHANNELS, HIDDEN = 3, 8


class Controlled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(CHANNELS, HIDDEN)
        self.field = nn.Sequential(nn.Linear(HIDDEN, HIDDEN * CHANNELS), nn.Tanh())
        self.out = nn.Linear(HIDDEN, 1)

    def forward(self, series: Tensor) -> Tensor:
        coefficients = torchcde.hermite_cubic_coefficients_with_backward_differences(series)
        path = torchcde.CubicSpline(coefficients)
        solution = torchcde.cdeint(
            X=path, z0=self.start(path.evaluate(path.interval[0])), t=path.interval,
            func=lambda t, z: self.field(z).view(*z.shape, CHANNELS), adjoint=False, method="rk4",
            options={"step_size": 1.0},
        )  # fmt: skip
        return self.out(solution[..., -1, :]).squeeze(-1)


@model("neural CDE, Hermite splines")
def hermite() -> Case:
    network = Controlled()

    def one(series: Tensor) -> Tensor:
        return network(series[None]).square()[0]

    examples = [torch.randn(n, CHANNELS) for n in lengths(4, 9, 16)]
    return Case(network, examples, one)
