"""The interface of a workload: a model for one example, and a hand-batched version of it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks import devices

POOL = 1024  # number of synthetic examples from which minibatches are drawn


@dataclass(frozen=True)
class Sources:
    """Files that replace synthetic data. See ``examples/data.py`` for their formats."""

    treebank: Path | None = None
    tags: Path | None = None


class Workload(ABC):
    """One model and its data. Subclasses make both in ``__init__``.

    All work that depends on the minibatch is in ``collate``, and is timed. Work that depends on a
    single example (the depths of a tree) is done when the data is made, as in the workers of a data
    loader.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    sizes: ClassVar[tuple[int, ...]]  # measured hidden sizes, the default first
    targets: ClassVar[Mapping[int, float]] = {}  # by hidden size: target of hand's time / our time
    reads: ClassVar[bool] = False  # whether the model reads values and runs in ab.map

    model: nn.Module
    examples: Sequence[Any]
    device: torch.device = devices.CPU  # device of the model and the examples

    @abstractmethod
    def __init__(self, hidden: int, sources: Sources, seed: int) -> None: ...

    def loss(self, example: Any) -> Tensor:
        """Returns the loss of one example, of shape [], as a user writes it."""
        loss: Tensor = self.model(example)
        return loss

    @abstractmethod
    def collate(self, minibatch: Sequence[Any]) -> Any:
        """Returns what ``hand`` needs, such as index tensors. Does not use the model."""

    @abstractmethod
    def hand(self, plan: Any) -> Tensor:
        """Returns the losses of the minibatch in order, [examples], batched as by an expert."""

    def minibatch(self, size: int, turn: int) -> list[Any]:
        """Draws a minibatch, without replacement if there are enough examples.

        The minibatch depends only on ``size`` and ``turn``.
        """
        draw = random.Random(turn)
        if size <= len(self.examples):
            return draw.sample(self.examples, size)
        return draw.choices(self.examples, k=size)

    def to(self, device: torch.device) -> Workload:
        """Moves the model and the examples to the device."""
        self.device = device
        self.model.to(device)
        self.examples = devices.moved(list(self.examples), device)
        return self

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the parameters on which a loss depends, with their names."""
        return list(self.model.named_parameters())


def seed_everything(seed: int) -> random.Random:
    """Seeds PyTorch for the parameters, and returns a seeded generator for the data."""
    torch.manual_seed(seed)
    return random.Random(seed)
