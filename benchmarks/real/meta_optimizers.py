"""TorchOpt: differentiable optimizers. Each example is a task."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torchopt
from torch import Tensor, nn

from benchmarks.real.case import Case, lengths, model

HIDDEN, STEPS = 16, 3


def case(optimizer: type[torchopt.MetaOptimizer]) -> Case:
    network = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))

    def one(task: Any) -> Tensor:
        """Adapts the network's parameters to a task, and restores them."""
        x, y, other_x, other_y = task
        start = torchopt.extract_state_dict(network)
        try:
            steps = optimizer(network, lr=0.05)
            for _ in range(STEPS):
                steps.step(F.mse_loss(network(x), y))
            return F.mse_loss(network(other_x), other_y)
        finally:
            torchopt.recover_state_dict(network, start)

    tasks = []
    for points in lengths(4, 11, 16):
        phase, x, other = torch.rand(1) * 3, torch.randn(points, 1), torch.randn(8, 1)
        tasks.append((x, (x + phase).sin(), other, (other + phase).sin()))
    return Case(network, tasks, one, infers=False)


@model("MAML, MetaSGD")
def sgd() -> Case:
    return case(torchopt.MetaSGD)
