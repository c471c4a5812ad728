"""What a workload is: a model for one example, and the same by hand for a whole minibatch."""

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

POOL = 1024  # examples that minibatches are drawn from, if the data are made


@dataclass(frozen=True)
class Sources:
    """Files to read in place of made data; see ``examples/data.py`` for their formats."""

    treebank: Path | None = None
    tags: Path | None = None


class Workload(ABC):
    """One model and its data. Subclasses make both in ``__init__`` from the arguments below.

    Everything that depends on the minibatch is in ``collate`` and is timed; what depends on one
    example alone (a tree's depths, say) is made with the data, as a data loader's workers would.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    sizes: ClassVar[tuple[int, ...]]  # hidden sizes measured, the usual one first
    targets: ClassVar[Mapping[int, float]] = {}  # by hidden size: hand's time / ours that we want
    reads: ClassVar[bool] = False  # values in the middle: ours is ab.map

    model: nn.Module
    examples: Sequence[Any]
    device: torch.device = devices.CPU  # of both

    @abstractmethod
    def __init__(self, hidden: int, sources: Sources, seed: int) -> None: ...

    def loss(self, example: Any) -> Tensor:
        """What a user writes: the loss of one example, of shape []."""
        loss: Tensor = self.model(example)
        return loss

    @abstractmethod
    def collate(self, minibatch: Sequence[Any]) -> Any:
        """Index tensors and the like for ``hand``: Python or NumPy, no model in it."""

    @abstractmethod
    def hand(self, plan: Any) -> Tensor:
        """What an expert writes: the losses of the minibatch, in order, of shape [examples]."""

    def minibatch(self, size: int, turn: int) -> list[Any]:
        """A minibatch drawn without replacement, if there are examples enough."""
        draw = random.Random(turn)
        if size <= len(self.examples):
            return draw.sample(self.examples, size)
        return draw.choices(self.examples, k=size)

    def to(self, device: torch.device) -> Workload:
        """Moves the model and the examples."""
        self.device = device
        self.model.to(device)
        self.examples = devices.moved(list(self.examples), device)
        return self

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those that a loss depends on, and their names."""
        return list(self.model.named_parameters())


def seed_everything(seed: int) -> random.Random:
    """Makes parameters and data repeatable; the generator is for the data."""
    torch.manual_seed(seed)
    return random.Random(seed)
