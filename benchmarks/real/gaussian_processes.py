"""GPyTorch: Gaussian processes on data of different sizes."""

from __future__ import annotations

from typing import Any

import gpytorch
import torch
from torch import Tensor, nn

from benchmarks.real.case import Case, lengths, model

FEATURES = 2


class Process(gpytorch.models.ExactGP):
    """A Gaussian process on features from a network."""

    def __init__(self, network: nn.Module, kernel: nn.Module, likelihood: nn.Module) -> None:
        super().__init__(None, None, likelihood)
        self.network, self.kernel = network, kernel
        self.mean = gpytorch.means.ConstantMean()

    def forward(self, x: Tensor) -> Any:
        h = self.network(x)
        return gpytorch.distributions.MultivariateNormal(self.mean(h), self.kernel(h))


def case(kernel: nn.Module) -> Case:
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    process = Process(nn.Linear(FEATURES, FEATURES), kernel, likelihood)
    likelihood_of = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, process)

    def one(x: Tensor) -> Tensor:
        process.set_train_data(x, None, strict=False)
        return -likelihood_of(process(x), x.sum(-1).sin())

    examples = [torch.randn(n, FEATURES) for n in lengths(5, 12, 16)]
    return Case(process, examples, one, infers=False)


@model("marginal likelihood, RBF")
def rbf() -> Case:
    return case(gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()))


@model("marginal likelihood, Matérn")
def matern() -> Case:
    return case(gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=1.5)))
