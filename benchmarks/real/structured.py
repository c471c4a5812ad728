"""torch-struct: distributions over chains and trees, compared with the package's ``lengths``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch_struct import DependencyCRF, LinearChainCRF, TreeCRF

from benchmarks.real.case import EXAMPLES, Case, lengths, model, padded

HIDDEN, TAGS = 16, 5


class Chain(nn.Module):
    """Computes scores of pairs of neighbouring tags."""

    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Linear(HIDDEN, TAGS)
        self.transition = nn.Parameter(torch.randn(TAGS, TAGS))

    def forward(self, h: Tensor) -> Tensor:
        emitted = self.emit(h)
        edges = emitted[:, 1:, :, None] + self.transition
        first = emitted[:, :1, None, :] + torch.zeros_like(edges[:, :1])
        return torch.cat([edges[:, :1] + first, edges[:, 1:]], dim=1)


class Pairs(nn.Module):
    """Computes one score or several for each pair of words."""

    def __init__(self, *scores: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(HIDDEN, 8), nn.Linear(HIDDEN, 8)
        self.weight = nn.Parameter(torch.randn(8, 8, *scores) / 8)

    def forward(self, h: Tensor) -> Tensor:
        return torch.einsum("bia,ac...,bjc->bij...", self.left(h), self.weight, self.right(h))


def case(
    network: nn.Module,
    score: Callable[..., Tensor],
    shortest: int,
    longest: int,
    infers: bool = True,
) -> Case:
    """Makes a case. ``score`` takes potentials and lengths, and returns a number per sentence."""

    def one(h: Tensor) -> Tensor:
        return score(network(h[None]), torch.tensor([len(h)]))[0]

    def own(minibatch: Sequence[Any]) -> Tensor:
        h, mask = padded(minibatch)
        return score(network(h), mask.sum(1))

    sizes = lengths(shortest, longest, EXAMPLES // 2)
    return Case(network, [torch.randn(n, HIDDEN) for n in sizes], one, own, infers=infers)


@model("linear chain, partition")
def chain() -> Case:
    return case(Chain(), lambda p, n: LinearChainCRF(p, lengths=n).partition, 4, 12)


@model("linear chain, marginals")
def chain_marginals() -> Case:
    def score(potentials: Tensor, sizes: Tensor) -> Tensor:
        marginals = LinearChainCRF(potentials, lengths=sizes).marginals
        return (marginals * marginals).sum((1, 2, 3))

    return case(Chain(), score, 4, 12)


@model("linear chain, entropy")
def chain_entropy() -> Case:
    return case(Chain(), lambda p, n: LinearChainCRF(p, lengths=n).entropy, 4, 12)


@model("dependency trees, partition")
def dependency() -> Case:
    return case(Pairs(), lambda p, n: DependencyCRF(p, lengths=n).partition, 3, 8, infers=False)


@model("dependency trees, marginals")
def dependency_marginals() -> Case:
    def score(potentials: Tensor, sizes: Tensor) -> Tensor:
        marginals = DependencyCRF(potentials, lengths=sizes).marginals
        return (marginals * potentials).sum((1, 2))

    return case(Pairs(), score, 3, 8, infers=False)


@model("constituent trees, partition")
def constituents() -> Case:
    return case(Pairs(3), lambda p, n: TreeCRF(p, lengths=n).partition, 3, 8)
