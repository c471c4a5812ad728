"""geomloss: Sinkhorn divergences of clouds of different sizes, compared with zero weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from geomloss import SamplesLoss
from torch import Tensor, nn

from benchmarks.real.case import Case, lengths, model, padded

COUNT = 16


def case(**options: Any) -> Case:
    network = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))
    loss = SamplesLoss(backend="tensorized", **options)

    def one(example: Any) -> Tensor:
        source, target = example
        return loss(network(source), target)

    def own(minibatch: Sequence[Any]) -> Tensor:
        clouds, weights = [], []
        for part in zip(*minibatch, strict=True):
            cloud, mask = padded(part)
            clouds.append(cloud)
            weights.append(mask / mask.sum(1, keepdim=True))
        return loss(weights[0], network(clouds[0]), weights[1], clouds[1])

    sizes = zip(lengths(5, 12, COUNT), lengths(6, 11, COUNT), strict=True)
    examples = [(torch.randn(n, 3), torch.randn(m, 3)) for n, m in sizes]
    return Case(network, examples, one, own)


@model("Sinkhorn divergence")
def sinkhorn() -> Case:
    return case(loss="sinkhorn", p=2, blur=0.3, diameter=6.0)


@model("energy distance")
def energy() -> Case:
    return case(loss="energy")
