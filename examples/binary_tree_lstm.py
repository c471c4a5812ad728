"""Binary Tree-LSTM: Tai, Socher and Manning 2015, section 3.2 (arXiv:1503.00075), with N = 2.

Trained as in Neubig, Goldberg and Dyer 2017, section 5.2 (arXiv:1705.07860): the leaves are words,
and the model predicts a sentiment at every node. The model is written for one tree.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from data import Example
from torch import Tensor, nn


class BinaryTreeLSTM(nn.Module):
    """Classifies every node of a tree. E: size of an embedding, H: hidden size."""

    def __init__(self, vocabulary: int, classes: int, embedding: int = 128, hidden: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.w = nn.Linear(embedding, 3 * hidden)
        self.u = nn.Linear(2 * hidden, 5 * hidden)
        self.classifier = nn.Linear(hidden, classes)

    def leaf(self, word: Tensor) -> tuple[Tensor, Tensor]:
        """Returns hidden state and memory cell, [1, H] each, of a word with an id of shape [1]."""
        i, o, u = self.w(self.embedding(word)).chunk(3, dim=-1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c

    def node(
        self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns hidden state and memory cell of a node from its two children (eq. 9 to 14)."""
        (h_left, c_left), (h_right, c_right) = left, right
        gates = self.u(torch.cat([h_left, h_right], dim=-1))  # [1, 5H]
        i, o, u, f_left, f_right = gates.chunk(5, dim=-1)
        c = i.sigmoid() * u.tanh() + f_left.sigmoid() * c_left + f_right.sigmoid() * c_right
        return o.sigmoid() * c.tanh(), c

    def states(self, tree: Example) -> list[tuple[Tensor, Tensor]]:
        """Returns hidden state and memory cell of each node, the root last."""
        states: list[tuple[Tensor, Tensor]] = []
        for word, children in zip(tree.symbols, tree.children, strict=True):
            if children:
                left, right = children
                states.append(self.node(states[left], states[right]))
            else:
                states.append(self.leaf(word))
        return states

    def scores(self, tree: Example) -> list[Tensor]:
        """Returns the class scores of each node, of shape [1, classes], the root last."""
        return [self.classifier(h) for h, _ in self.states(tree)]

    def node_loss(self, h: Tensor, target: Tensor) -> Tensor:
        """Returns the loss at a node with hidden state ``h``, of shape []."""
        return F.cross_entropy(self.classifier(h), target)

    def forward(self, tree: Example) -> Tensor:
        """Returns the sum of the losses at the nodes of one tree, of shape []."""
        losses = [
            self.node_loss(h, target)
            for (h, _), target in zip(self.states(tree), tree.targets, strict=True)
        ]
        return torch.stack(losses).sum()
