"""torch.distributions: densities of sets of different sizes, compared with padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Dirichlet,
    Independent,
    LowRankMultivariateNormal,
    MixtureSameFamily,
    Normal,
    kl_divergence,
)

from benchmarks.real.case import Case, lengths, model, padded

FEATURES, HIDDEN, COMPONENTS = 6, 24, 4


def sets(network: nn.Module, score: Callable[[Tensor], Tensor]) -> Case:
    """``score`` returns a number for each point. The score of a set is the sum of these numbers."""

    def one(points: Tensor) -> Tensor:
        return -score(points).sum()

    def own(minibatch: Sequence[Tensor]) -> Tensor:
        points, mask = padded(minibatch)
        return -(score(points) * mask).sum(1)

    return Case(network, [torch.randn(n, FEATURES) for n in lengths(3, 18)], one, own)


class Density(nn.Module):
    """A mixture of Gaussians for the last half of the features, given the first half."""

    def __init__(self) -> None:
        super().__init__()
        half = FEATURES // 2
        self.hidden = nn.Linear(half, HIDDEN)
        self.weights = nn.Linear(HIDDEN, COMPONENTS)
        self.means = nn.Linear(HIDDEN, COMPONENTS * half)
        self.scales = nn.Linear(HIDDEN, COMPONENTS * half)

    def forward(self, points: Tensor) -> Tensor:
        given, wanted = points.chunk(2, -1)
        h = self.hidden(given).relu()
        shape = (*given.shape[:-1], COMPONENTS, FEATURES // 2)
        parts = Normal(self.means(h).view(shape), F.softplus(self.scales(h)).view(shape))
        mixture = MixtureSameFamily(Categorical(logits=self.weights(h)), Independent(parts, 1))
        return mixture.log_prob(wanted)


@model("mixture density network")
def mixture() -> Case:
    network = Density()
    return sets(network, network)


class Autoencoder(nn.Module):
    """A variational autoencoder, at the mean of its posterior."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(FEATURES, 8), nn.Linear(4, FEATURES)

    def forward(self, points: Tensor) -> Tensor:
        mean, scale = self.encode(points).chunk(2, -1)
        posterior = Independent(Normal(mean, F.softplus(scale)), 1)
        prior = Independent(Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
        likelihood = Independent(Normal(self.decode(posterior.mean), 1.0), 1)
        return likelihood.log_prob(points) - kl_divergence(posterior, prior)


@model("evidence lower bound")
def autoencoder() -> Case:
    network = Autoencoder()
    return sets(network, network)


class Covariances(nn.Module):
    """Gaussians with covariances of low rank, and a prior for their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Linear(FEATURES, FEATURES * 2)
        self.weights = nn.Linear(FEATURES, COMPONENTS)

    def forward(self, points: Tensor) -> Tensor:
        factor = self.factor(points).view(*points.shape, 2)
        normal = LowRankMultivariateNormal(points * 0, factor, torch.ones_like(points))
        prior = Dirichlet(torch.full((COMPONENTS,), 2.0))
        return normal.log_prob(points) + prior.log_prob(self.weights(points).softmax(-1))


@model("low-rank Gaussians, Dirichlet prior")
def covariances() -> Case:
    network = Covariances()
    return sets(network, network)
