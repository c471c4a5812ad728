"""higher: model-agnostic meta-learning. Each example is a task."""

from __future__ import annotations

from typing import Any

import higher
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.real.case import Case, lengths, model

HIDDEN, STEPS = 16, 3


def tasks() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Returns the tasks: to learn sine functions from few points."""
    made = []
    for points in lengths(4, 11, 16):
        phase, x, other = torch.rand(1) * 3, torch.randn(points, 1), torch.randn(8, 1)
        made.append((x, (x + phase).sin(), other, (other + phase).sin()))
    return made


def case(track_higher_grads: bool, optimizer: type[torch.optim.Optimizer]) -> Case:
    network = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    inner = optimizer(network.parameters(), lr=0.05)

    def one(task: Any) -> Tensor:
        x, y, other_x, other_y = task
        with higher.innerloop_ctx(
            network, inner, copy_initial_weights=False, track_higher_grads=track_higher_grads
        ) as (adapted, steps):
            for _ in range(STEPS):
                steps.step(F.mse_loss(adapted(x), y))
            return F.mse_loss(adapted(other_x), other_y)

    return Case(network, tasks(), one, infers=False)


@model("MAML")
def maml() -> Case:
    return case(True, torch.optim.SGD)


@model("MAML with Adam")
def maml_adam() -> Case:
    return case(True, torch.optim.Adam)
