"""pytorch-tree-lstm: child-sum Tree-LSTMs, compared with the package's batching of trees."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from treelstm import TreeLSTM, batch_tree_input, calculate_evaluation_orders

from benchmarks.real.case import Case, lengths, model

FEATURES, HIDDEN, CLASSES = 16, 32, 5


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tree = TreeLSTM(FEATURES, HIDDEN)
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, tree: dict[str, Tensor]) -> Tensor:
        parts = ("features", "node_order", "adjacency_list", "edge_order")
        h, _ = self.tree(*(tree[part] for part in parts))
        return self.out(h)


def tree(nodes: int, draw: random.Random) -> dict[str, Tensor]:
    """Makes a random tree whose root is node 0."""
    # The package requires that a node's children are adjacent.
    edges = sorted([draw.randint(max(0, i - 4), i - 1), i] for i in range(1, nodes))
    node_order, edge_order = calculate_evaluation_orders(edges, nodes)
    return {
        "features": torch.randn(nodes, FEATURES),
        "node_order": torch.from_numpy(node_order),
        "adjacency_list": torch.tensor(edges),
        "edge_order": torch.from_numpy(edge_order),
        "label": torch.randint(CLASSES, (1,)),
    }


@model("child-sum Tree-LSTM")
def child_sum() -> Case:
    network, draw = Classifier(), random.Random(0)

    def one(example: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(network(example)[:1], example["label"])

    def own(minibatch: Sequence[Any]) -> Tensor:
        trees = batch_tree_input(list(minibatch))
        sizes = torch.tensor(trees["tree_sizes"])
        roots = network(trees)[sizes.cumsum(0) - sizes]
        labels = torch.cat([example["label"] for example in minibatch])
        return F.cross_entropy(roots, labels, reduction="none")

    return Case(network, [tree(n, draw) for n in lengths(3, 18)], one, own)
