"""mcts: tree search with a network that evaluates the leaves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mcts import mcts
from torch import Tensor, nn

from benchmarks.real.case import Case, model

SIZE, ITERATIONS = 6, 12


@dataclass(frozen=True)
class Walk:
    """A state of the search: the path so far on a grid of values, for the best final cell."""

    grid: Tensor
    network: nn.Module
    place: tuple[int, int] = (0, 0)

    def getPossibleActions(self) -> list[tuple[int, int]]:  # noqa: N802, the package's interface
        row, column = self.place
        return [(r, c) for r, c in ((row + 1, column), (row, column + 1)) if max(r, c) < SIZE]

    def takeAction(self, action: tuple[int, int]) -> Walk:  # noqa: N802
        return Walk(self.grid, self.network, action)

    def isTerminal(self) -> bool:  # noqa: N802
        return self.place == (SIZE - 1, SIZE - 1)

    def getReward(self) -> float:  # noqa: N802
        row, column = self.place
        features = torch.cat([self.grid[row], self.grid[:, column]])
        return self.network(features).item()


@model("Monte Carlo tree search")
def search() -> Case:
    network = nn.Sequential(
        nn.Linear(2 * SIZE, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 1),
        nn.Sigmoid(),
    )

    def one(grid: Tensor) -> Tensor:
        searcher = mcts(iterationLimit=ITERATIONS, rolloutPolicy=Walk.getReward)
        best = searcher.search(Walk(grid, network))
        return torch.tensor([*best, searcher.root.totalReward])

    return Case(network, [torch.randn(SIZE, SIZE) for _ in range(32)], one, trains=False)
