"""A classifier that stops as soon as it is sure: early exits (Teerapittayanon, McDanel and Kung
2016, arXiv:1709.01686).

Says which module of the standard library a function is from. After each layer a small classifier is
asked; if it is sure enough, the layers above are not run. So each example has a depth of its own,
and those that go on are batched among themselves.

    python examples/early_exit.py
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from data import Example
from reading import run
from torch import Tensor, nn

LAYERS = 6
SURE = 0.9


class EarlyExit(nn.Module):
    """Residual layers over the nodes of a function, and a classifier above each."""

    def __init__(self, vocabulary: int, classes: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU())
            for _ in range(LAYERS)
        )
        self.mix = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(LAYERS))
        self.exits = nn.ModuleList(nn.Linear(hidden, classes) for _ in range(LAYERS))

    def scores(self, example: Example) -> list[Tensor]:
        """Of the classes [classes], at each exit that was asked: up to the first that is sure."""
        nodes = self.embedding(torch.cat(example.symbols))
        asked: list[Tensor] = []
        for layer, mix, leave in zip(self.layers, self.mix, self.exits, strict=True):
            nodes = nodes + layer(nodes + mix(nodes.mean(0, keepdim=True)))
            asked.append(leave(nodes.mean(0)))
            if asked[-1].softmax(-1).max() > SURE:
                break
        return asked

    def forward(self, example: Example) -> Tensor:
        """The mean loss of the exits that were asked."""
        losses = [F.cross_entropy(s.unsqueeze(0), example.targets[0]) for s in self.scores(example)]
        return torch.stack(losses).mean()

    def predict(self, example: Example) -> tuple[int, int]:
        """The class, and at which layer it was found."""
        asked = self.scores(example)
        return int(asked[-1].argmax()), len(asked)

    def accuracy(self, example: Example, predicted: tuple[int, int]) -> tuple[int, int]:
        """Whether the class is right."""
        return int(predicted[0] == example.targets[0].item()), 1


if __name__ == "__main__":
    sys.exit(run(EarlyExit, __doc__ or ""))
