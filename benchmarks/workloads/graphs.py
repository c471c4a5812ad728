"""A graph network of ordinary PyTorch ops: mean aggregation (Hamilton, Ying and Leskovec 2017,
arXiv:1706.02216) over random graphs of 10 to 60 nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.data import CLASSES, Ids
from benchmarks.workload import POOL, Sources, Workload, seed_everything

FEATURES = 16
SMALLEST, LARGEST = 10, 60
LAYERS = 2


@dataclass(frozen=True, slots=True)
class Graph:
    """Features of nodes [n, FEATURES], and edges [2, e] from the first row to the second row."""

    features: Tensor
    edges: Tensor
    target: Tensor
    edge_ids: Ids
    target_id: int


class GraphNetwork(nn.Module):
    """Each layer adds to a node the mean over its edges. At the end, all nodes are averaged."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        widths = [FEATURES] + [hidden] * LAYERS
        pairs = list(pairwise(widths))
        self.own = nn.ModuleList(nn.Linear(n, m) for n, m in pairs)
        self.neighbours = nn.ModuleList(nn.Linear(n, m, bias=False) for n, m in pairs)
        self.classifier = nn.Linear(hidden, CLASSES)

    def nodes(self, h: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """Returns the nodes' states after all layers, [n, H]."""
        degree = torch.zeros(len(h)).index_add(0, end, torch.ones(len(end)))
        scale = degree.clamp(min=1).reciprocal().unsqueeze(1)
        for own, neighbours in zip(self.own, self.neighbours, strict=True):
            messages = neighbours(h)[begin]
            total = torch.zeros(len(h), messages.shape[1]).index_add(0, end, messages)
            h = F.relu(own(h) + total * scale)
        return h

    def forward(self, graph: Graph) -> Tensor:
        """Returns the loss of one graph."""
        begin, end = graph.edges
        pooled = self.nodes(graph.features, begin, end).mean(0, keepdim=True)
        return F.cross_entropy(self.classifier(pooled), graph.target)


@dataclass(frozen=True)
class Plan:
    """The concatenated graphs, with offsets added to their edges."""

    features: Tensor
    begin: Tensor
    end: Tensor
    graphs: Tensor  # [nodes]: the graph of each node
    sizes: Tensor  # [graphs]
    targets: Tensor


class GraphClassifier(Workload):
    name = "graphs"
    title = "graph network"
    sizes = (64,)
    targets: ClassVar[Mapping[int, float]] = {64: 0.8}

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.model = GraphNetwork(hidden)
        self.examples = []
        for _ in range(POOL):
            nodes = draw.randint(SMALLEST, LARGEST)
            half = torch.randint(nodes, (2, 2 * nodes))
            edges = torch.cat([half, half.flip(0)], dim=1)
            target = draw.randrange(CLASSES)
            features = torch.randn(nodes, FEATURES)
            self.examples.append(
                Graph(features, edges, torch.tensor([target]), edges.numpy().copy(), target)
            )

    def collate(self, minibatch: Sequence[Graph]) -> Plan:
        sizes = np.array([len(graph.features) for graph in minibatch])
        offsets = np.cumsum(sizes) - sizes
        edges = np.concatenate(
            [graph.edge_ids + first for graph, first in zip(minibatch, offsets, strict=True)],
            axis=1,
        )
        return Plan(
            torch.cat([graph.features for graph in minibatch]),
            collate.tensor(edges[0]),
            collate.tensor(edges[1]),
            collate.tensor(np.repeat(np.arange(len(sizes)), sizes)),
            collate.tensor(sizes),
            collate.tensor([graph.target_id for graph in minibatch]),
        )

    def hand(self, plan: Plan) -> Tensor:
        model = self.model
        h = model.nodes(plan.features, plan.begin, plan.end)
        totals = torch.zeros(len(plan.sizes), h.shape[1]).index_add(0, plan.graphs, h)
        pooled = totals / plan.sizes.unsqueeze(1)
        return F.cross_entropy(model.classifier(pooled), plan.targets, reduction="none")
