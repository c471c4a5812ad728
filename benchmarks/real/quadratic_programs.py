"""qpth: a quadratic program as a layer (OptNet), compared with the package's batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from qpth.qp import QPFunction
from torch import Tensor, nn

from benchmarks.real.case import Case, model

FEATURES, VARIABLES, CONSTRAINTS = 5, 4, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, VARIABLES)
        self.root = nn.Parameter(torch.eye(VARIABLES))
        self.sides = nn.Parameter(torch.randn(CONSTRAINTS, VARIABLES))
        self.bounds = nn.Parameter(torch.ones(CONSTRAINTS))

    def forward(self, x: Tensor) -> Tensor:
        quadratic = self.root @ self.root.T + 1e-3 * torch.eye(VARIABLES)
        # The tensors that all programs share are expanded, because the package averages their
        # gradients over the programs instead of adding them.
        shared = (t.expand(len(x), *t.shape) for t in (quadratic, self.sides, self.bounds))
        quadratics, sides, bounds = shared
        none = torch.empty(0)
        solve = QPFunction(verbose=-1, maxIter=20)
        return solve(quadratics, self.linear(x), sides, bounds, none, none)


@model("OptNet")
def optnet() -> Case:
    network = Layer()

    def one(x: Tensor) -> Tensor:
        return network(x[None]).square().sum()

    def own(minibatch: Sequence[Tensor]) -> Tensor:
        return network(torch.stack(list(minibatch))).square().sum(-1)

    return Case(network, [torch.randn(FEATURES) for _ in range(16)], one, own, own_tolerance=1e-4)
