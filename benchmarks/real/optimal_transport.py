"""POT: optimal transport between clouds of different sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ot
import torch
from torch import Tensor, nn

from benchmarks.real.case import Case, lengths, model

COUNT, ITERATIONS = 16, 20


def case(score: Callable[[Tensor, Tensor], Tensor]) -> Case:
    """Makes a case. The package can't batch clouds of different sizes."""
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))

    def one(example: Any) -> Tensor:
        source, target = example
        return score(network(source), target)

    sizes = zip(lengths(5, 12, COUNT), lengths(6, 11, COUNT), strict=True)
    return Case(network, [(torch.randn(n, 3), torch.randn(m, 3)) for n, m in sizes], one)


@model("Sinkhorn's algorithm")
def sinkhorn() -> Case:
    def score(source: Tensor, target: Tensor) -> Tensor:
        cost = ot.dist(source, target)
        weights = source.new_full((len(source),), 1 / len(source))
        other = source.new_full((len(target),), 1 / len(target))
        plan = ot.sinkhorn(
            weights, other, cost, 1.0, numItermax=ITERATIONS, stopThr=0.0, warn=False
        )
        return (plan * cost).sum()

    return case(score)


@model("exact transport")
def exact() -> Case:
    def score(source: Tensor, target: Tensor) -> Tensor:
        weights = source.new_full((len(source),), 1 / len(source))
        other = source.new_full((len(target),), 1 / len(target))
        return ot.emd2(weights, other, ot.dist(source, target))

    return case(score)


@model("sliced Wasserstein distance")
def sliced() -> Case:
    directions = torch.nn.functional.normalize(torch.randn(3, 10), dim=0)
    return case(
        lambda source, target: ot.sliced_wasserstein_distance(
            source, target, projections=directions
        )
    )
