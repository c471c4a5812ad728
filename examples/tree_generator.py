"""Generation of trees whose shape the model decides: the doubly recurrent network of Alvarez-Melis
and Jaakkola 2017, trained on syntax trees of Python functions.

A node is predicted from the states of its parent and its previous sibling. The model also predicts
whether the node has children, and whether it has a next sibling. Training follows the true tree.
However, some states are computed from the symbol that the model predicts, which needs a read
(scheduled sampling, Bengio et al. 2015). Generation reads every decision.

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

SAMPLED = 0.25  # share of the symbols in training that are the model's predictions
DEPTH, BREADTH = 8, 6  # limits for generated trees


class TreeGenerator(nn.Module):
    """Generates a tree from the id of the function's module."""

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
        """Returns scores of the symbol, [1, vocabulary], and of the shape, [2].

        The shape is whether the node has children, and whether it has a next sibling.
        """
        features = self.mix(torch.cat([above, before], dim=-1)).tanh()
        return self.symbol(features), self.shape(features)[0]

    def forward(self, example: Example) -> Tensor:
        """Returns the mean loss of all decisions of this tree, of shape []."""
        losses: list[Tensor] = []
        draw = random.Random(len(example.symbols))

        def visit(node: int, above: Tensor, before: Tensor, has_next: bool) -> Tensor:
            """Adds the losses of a node and its descendants. Returns the embedded symbol, [1, H].

            This is the true symbol or the predicted symbol.
            """
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
        """Generates a tree for the same module: (symbol, [children])."""

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
        """Returns 1 if the generated root is the true root, else 0; and the number of trees, 1."""
        return int(predicted[0] == example.symbols[-1].item()), 1


if __name__ == "__main__":
    sys.exit(run(TreeGenerator, __doc__ or ""))
