"""Child-sum Tree-LSTM: Tai, Socher and Manning 2015, section 3.1 (arXiv:1503.00075).

The model is written for one tree. Nodes have any number of children, without an order.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from data import Example
from torch import Tensor, nn


class ChildSumTreeLSTM(nn.Module):
    """Classifies a tree from the state of its root. E: size of an embedding, H: hidden size."""

    def __init__(self, vocabulary: int, classes: int, embedding: int = 128, hidden: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.w_iou = nn.Linear(embedding, 3 * hidden)
        self.u_iou = nn.Linear(hidden, 3 * hidden, bias=False)
        self.w_f = nn.Linear(embedding, hidden)
        self.u_f = nn.Linear(hidden, hidden, bias=False)
        self.classifier = nn.Linear(hidden, classes)

    def node(self, symbol: Tensor, below: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Returns hidden state and memory cell of a node, [1, H] each (equations 2 to 8).

        ``symbol`` is an id of shape [1], ``below`` the states of the node's children.
        """
        x = self.embedding(symbol)  # [1, E]
        if not below:
            i, o, u = self.w_iou(x).chunk(3, dim=-1)
            c = i.sigmoid() * u.tanh()
        else:
            h = torch.stack([h for h, _ in below])  # [children, 1, H]
            c = torch.stack([c for _, c in below])
            i, o, u = (self.w_iou(x) + self.u_iou(h.sum(0))).chunk(3, dim=-1)
            f = (self.w_f(x) + self.u_f(h)).sigmoid()  # one forget gate for each child
            c = i.sigmoid() * u.tanh() + (f * c).sum(0)
        return o.sigmoid() * c.tanh(), c

    def scores(self, tree: Example) -> list[Tensor]:
        """Returns a list with the class scores of the root, of shape [1, classes]."""
        states: list[tuple[Tensor, Tensor]] = []
        for symbol, children in zip(tree.symbols, tree.children, strict=True):
            states.append(self.node(symbol, [states[child] for child in children]))
        h, _ = states[-1]
        return [self.classifier(h)]

    def forward(self, tree: Example) -> Tensor:
        """Returns the loss of one tree, of shape []."""
        (scores,) = self.scores(tree)
        return F.cross_entropy(scores, tree.targets[0])
