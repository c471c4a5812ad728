"""Pyro: probabilistic programs on data of different sizes, compared with plates."""

from __future__ import annotations

from collections.abc import Sequence

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate
from torch import Tensor, nn

from benchmarks.real.case import EXAMPLES, Case, lengths, model, padded

FEATURES, HIDDEN, STATES = 4, 16, 3


class Regression(nn.Module):
    """Points in a plate, whose mean and scale a network computes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 2))

    def program(self, x: Tensor, y: Tensor, mask: bool | Tensor = True) -> None:
        mean, scale = self.net(x).unbind(-1)
        with pyro.plate("points", x.size(-2)), poutine.mask(mask=mask):
            pyro.sample("y", dist.Normal(mean, scale.exp()), obs=y)


@model("regression, log joint")
def regression() -> Case:
    network = Regression()

    def one(points: Tensor) -> Tensor:
        trace = poutine.trace(network.program).get_trace(points, points.sum(-1))
        return -trace.log_prob_sum()

    def own(minibatch: Sequence[Tensor]) -> Tensor:
        points, mask = padded(minibatch)
        trace = poutine.trace(network.program).get_trace(points, points.sum(-1), mask)
        trace.compute_log_prob()
        return -trace.nodes["y"]["log_prob"].sum(-1)

    return Case(network, [torch.randn(n, FEATURES) for n in lengths(3, 18)], one, own)


class Mixture(nn.Module):
    """Each point has a component, over which the program sums."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(STATES))
        self.means = nn.Parameter(torch.randn(STATES))

    @config_enumerate
    def program(self, x: Tensor) -> None:
        with pyro.plate("points", len(x)):
            component = pyro.sample("component", dist.Categorical(logits=self.weights))
            pyro.sample("x", dist.Normal(self.means[component], 0.5), obs=x)


@model("mixture, enumerated")
def mixture() -> Case:
    network = Mixture()
    bound = TraceEnum_ELBO(max_plate_nesting=1)

    def one(points: Tensor) -> Tensor:
        return bound.differentiable_loss(network.program, lambda x: None, points)

    return Case(network, [torch.randn(n) for n in lengths(3, 18)], one, infers=False)


class HiddenMarkov(nn.Module):
    """Each step has a state, over which the program sums."""

    def __init__(self) -> None:
        super().__init__()
        self.transition = nn.Parameter(torch.randn(STATES, STATES))
        self.means = nn.Parameter(torch.randn(STATES))

    @config_enumerate
    def program(self, x: Tensor) -> None:
        state = 0
        for t in pyro.markov(range(len(x))):
            scores = self.transition[state]
            state = pyro.sample(f"state {t}", dist.Categorical(logits=scores))
            pyro.sample(f"x {t}", dist.Normal(self.means[state], 0.5), obs=x[t])


@model("hidden Markov model, enumerated")
def markov() -> Case:
    network = HiddenMarkov()
    bound = TraceEnum_ELBO(max_plate_nesting=0)

    def one(sequence: Tensor) -> Tensor:
        return bound.differentiable_loss(network.program, lambda x: None, sequence)

    return Case(network, [torch.randn(n) for n in lengths(2, 7, EXAMPLES // 4)], one, infers=False)
