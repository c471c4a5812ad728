"""Models of the engine's tests: straight-line trees, loops that read values, generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

Tree = Any  # an int, or a tuple of two trees


class TreeNet(nn.Module):
    """A tree model that reads no value, so the whole tree is captured without a wait."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.leaf = nn.Embedding(50, width)
        self.inner = nn.Linear(2 * width, width)

    def forward(self, tree: Tree) -> Tensor:
        if isinstance(tree, int):
            return self.leaf(torch.tensor(tree))
        return self.inner(torch.cat([self(child) for child in tree])).tanh()


class Walker(nn.Module):
    """Reads a value at each step, which determines the next step."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.symbols = nn.Embedding(11, width)
        self.cell = nn.GRUCell(width, width)
        self.out = nn.Linear(width, 11)

    def steps(self, first: int, most: int) -> Iterator[int]:
        h = self.symbols.weight.new_zeros(1, self.cell.hidden_size)
        symbol = first
        for _ in range(most):
            h = self.cell(self.symbols(torch.tensor([symbol])), h)
            symbol = int(self.out(h).argmax())
            yield symbol

    def forward(self, first: int, most: int) -> tuple[list[int], Tensor]:
        h = self.symbols.weight.new_zeros(1, self.cell.hidden_size)
        symbol, seen = first, []
        for _ in range(most):
            h = self.cell(self.symbols(torch.tensor([symbol])), h)
            symbol = int(self.out(h).argmax())
            seen.append(symbol)
        return seen, h


def tree(rng: random.Random, leaves: int) -> Tree:
    if leaves == 1:
        return rng.randrange(50)
    left = rng.randint(1, leaves - 1)
    return (tree(rng, left), tree(rng, leaves - left))


def expected(model: Any, *args: Any) -> Any:
    with torch.inference_mode():
        return model(*args)


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        return
    if isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
        return
    assert found == wanted


LAYER = nn.Linear(3, 3).eval()


def forever(x: Tensor) -> Tensor:
    """Reads a value at each step, and never ends."""
    while True:
        x = LAYER(x).tanh()
        if x.sum() > 1e9:
            return x
