"""Generation of trees that decides their shape as it goes: the doubly recurrent network of
Alvarez-Melis and Jaakkola 2017, for the syntax trees of Python functions.

A node is predicted from the state of its parent and of its sibling before; whether it has children,
and a next sibling, are two more predictions. In training the tree is the true one, but the states
are sometimes made from the symbol that the model would have chosen (scheduled sampling, Bengio et
al. 2015): that is a read in every node. Generating reads every decision.

    python examples/tree_generator.py
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
import torch.nn.functional as F
from data import Example
from reading import run
from torch import Tensor, nn

SAMPLED = 0.25  # of the symbols in training
DEPTH, BREADTH = 8, 6  # what is generated is no deeper, no wider


class TreeGenerator(nn.Module):
    """Grows a tree from the id of the module that the function is in."""

    def __init__(self, vocabulary: int, classes: int, hidden: int) -> None:
        super().__init__()
        self.start = nn.Embedding(classes, hidden)
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.down = nn.GRUCell(hidden, hidden)
        self.along = nn.GRUCell(hidden, hidden)
        self.first = nn.Parameter(torch.zeros(1, hidden))
        self.mix = nn.Linear(2 * hidden, hidden)
        self.symbol = nn.Linear(hidden, vocabulary)
        self.shape = nn.Linear(hidden, 2)

    def look(self, above: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the symbol [1, V]; of having children, and a next sibling [2]."""
        features = self.mix(torch.cat([above, before], dim=-1)).tanh()
        return self.symbol(features), self.shape(features)[0]

    def forward(self, example: Example) -> Tensor:
        """The mean loss of all decisions that make this tree."""
        losses: list[Tensor] = []
        draw = random.Random(len(example.symbols))

        def visit(node: int, above: Tensor, before: Tensor, has_next: bool) -> Tensor:
            """Learns a node and what is below it; its symbol as the model goes on with it."""
            scores, shape = self.look(above, before)
            below = example.children[node]
            wanted = shape.new_tensor([float(len(below) > 0), float(has_next)])
            losses.append(F.cross_entropy(scores, example.symbols[node]))
            losses.append(F.binary_cross_entropy_with_logits(shape, wanted))
            symbol = example.symbols[node]
            if draw.random() < SAMPLED:
                symbol = torch.tensor([int(scores.argmax())])
            embedded = self.embedding(symbol)
            if below:
                state, sibling = self.down(embedded, above), self.first
                for k, child in enumerate(below):
                    of_child = visit(child, state, sibling, k + 1 < len(below))
                    sibling = self.along(of_child, sibling)
            return embedded

        visit(len(example.children) - 1, self.start(example.targets[0]), self.first, False)
        return torch.stack(losses).mean()

    def predict(self, example: Example) -> Any:
        """A tree of its own for the same module: (symbol, [children])."""

        def grow(above: Tensor, before: Tensor, depth: int, place: int) -> tuple[Any, bool, Tensor]:
            scores, shape = self.look(above, before)
            has_children, has_next = (shape > 0).tolist()
            symbol = int(scores.argmax())
            embedded = self.embedding(torch.tensor([symbol]))
            children: list[Any] = []
            if has_children and depth < DEPTH:
                state, sibling, more = self.down(embedded, above), self.first, True
                while more:
                    child, more, of_child = grow(state, sibling, depth + 1, len(children) + 1)
                    children.append(child)
                    sibling = self.along(of_child, sibling)
            return (symbol, children), has_next and place < BREADTH, embedded

        return grow(self.start(example.targets[0]), self.first, 0, BREADTH)[0]

    def accuracy(self, example: Example, predicted: Any) -> tuple[int, int]:
        """Whether the generated root is the true one."""
        return int(predicted[0] == example.symbols[-1].item()), 1


if __name__ == "__main__":
    sys.exit(run(TreeGenerator, __doc__ or ""))
