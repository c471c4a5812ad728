"""A classifier with early exits (Teerapittayanon, McDanel and Kung 2016, arXiv:1709.01686).

Predicts in which module of the standard library a function is defined. Each layer has a small
classifier. If its confidence is high enough, the remaining layers do not run. So examples have
different depths, and the examples that continue are batched together.

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
        """Returns the class scores, [classes], of each exit up to the first confident one."""
        nodes = self.embedding(torch.cat(example.symbols))
        asked: list[Tensor] = []
        for layer, mix, leave in zip(self.layers, self.mix, self.exits, strict=True):
            nodes = nodes + layer(nodes + mix(nodes.mean(0, keepdim=True)))
            asked.append(leave(nodes.mean(0)))
            if asked[-1].softmax(-1).max() > SURE:
                break
        return asked

    def forward(self, example: Example) -> Tensor:
        """Returns the mean loss of the exits that ran, of shape []."""
        losses = [F.cross_entropy(s.unsqueeze(0), example.targets[0]) for s in self.scores(example)]
        return torch.stack(losses).mean()

    def predict(self, example: Example) -> tuple[int, int]:
        """Returns the class, and the number of layers that ran."""
        asked = self.scores(example)
        return int(asked[-1].argmax()), len(asked)

    def accuracy(self, example: Example, predicted: tuple[int, int]) -> tuple[int, int]:
        """Returns 1 if the class is right, else 0, and the number of predictions, 1."""
        return int(predicted[0] == example.targets[0].item()), 1


if __name__ == "__main__":
    sys.exit(run(EarlyExit, __doc__ or ""))
