"""Recursive generation of trees: the doubly recurrent network of Alvarez-Melis and Jaakkola 2017,
trained on the true tree (teacher forcing)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.data import Ids, id_tensors, length
from benchmarks.workload import POOL, Sources, Workload, seed_everything

LABELS = 200
LATENT = 64
EMBEDDING = 128


@dataclass(frozen=True, slots=True)
class Target:
    """A tree to generate from a latent vector [1, LATENT]. Parents precede children."""

    latent: Tensor
    labels: list[Tensor]
    children: list[list[int]]
    topology: list[Tensor]  # [1, 2]: whether a node has children, and a next sibling
    label_ids: Ids
    topology_rows: Ids  # [nodes, 2]
    parent: Ids  # -1 for the root
    sibling: Ids  # the previous sibling, or -1
    depth: Ids
    place: Ids  # position among its siblings


class DoublyRecurrent(nn.Module):
    """Predicts each node from its ancestors and its earlier siblings."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LABELS, EMBEDDING)
        self.start = nn.Linear(LATENT, hidden)
        self.down = nn.GRUCell(EMBEDDING, hidden)
        self.along = nn.GRUCell(EMBEDDING, hidden)
        self.no_sibling = nn.Parameter(torch.randn(1, hidden) / hidden**0.5)
        self.from_parent = nn.Linear(hidden, hidden)
        self.from_sibling = nn.Linear(hidden, hidden, bias=False)
        self.label = nn.Linear(hidden, LABELS)
        self.topology = nn.Linear(hidden, 2)

    def forward(self, tree: Target) -> Tensor:
        """Returns the sum of the losses of all nodes of one tree."""
        losses: list[Tensor] = []
        root_state = self.start(tree.latent).tanh()
        self.generate(tree, 0, root_state, self.no_sibling, losses)
        return torch.stack(losses).sum()

    def generate(
        self, tree: Target, node: int, above: Tensor, before: Tensor, losses: list[Tensor]
    ) -> None:
        """Predicts a node from the states of its ancestors and siblings, and then its children."""
        features = (self.from_parent(above) + self.from_sibling(before)).tanh()
        losses.append(F.cross_entropy(self.label(features), tree.labels[node]))
        wanted = tree.topology[node]
        losses.append(F.binary_cross_entropy_with_logits(self.topology(features), wanted))
        if not tree.children[node]:
            return
        state = self.down(self.embedding(tree.labels[node]), above)
        before = self.no_sibling
        for child in tree.children[node]:
            self.generate(tree, child, state, before, losses)
            before = self.along(self.embedding(tree.labels[child]), before)


def random_tree(draw: Random, nodes: int) -> list[list[int]]:
    """Returns the children of each node, parents first. Their numbers are geometric."""
    children: list[list[int]] = [[]]
    frontier = [0]
    while len(children) < nodes:
        parent = frontier.pop(draw.randrange(len(frontier)))
        while True:
            children[parent].append(len(children))
            frontier.append(len(children))
            children.append([])
            if draw.random() < 0.45 or len(children) >= nodes:
                break
    return children


@dataclass(frozen=True)
class Chains:
    """Chains of states, by level. A state is computed from a state of the previous level."""

    labels: Tensor  # [states]: ids of the inputs
    sizes: list[int]  # number of states in each level
    sources: list[Tensor]  # for each level: rows of the previous level


@dataclass(frozen=True)
class Plan:
    latents: Tensor
    down: Chains
    along: Chains
    above: Tensor  # [nodes]: rows of the concatenation of root states and states of `down`
    before: Tensor  # [nodes]: 0 is no sibling, then states of `along`
    labels: Tensor
    topology: Tensor
    trees: Tensor


def chains(level: Ids, source: Ids, labels: Ids, first: Ids) -> tuple[Chains, Ids]:
    """Returns chains of states. If `source` is -1, a state starts from the initial row `first`.

    Also returns the row of each state in the order of levels.
    """
    order = np.argsort(level, kind="stable")
    row = np.empty(len(order), dtype=np.int64)
    row[order] = np.arange(len(order))
    sizes = np.bincount(level)
    starts = np.cumsum(sizes) - sizes
    earlier = starts[np.maximum(level - 1, 0)]
    from_row = np.where(source < 0, first, row[np.maximum(source, 0)] - earlier)
    sources = collate.tensor(from_row[order]).split(sizes.tolist())
    return Chains(collate.tensor(labels[order]), sizes.tolist(), list(sources)), row


class TreeGeneration(Workload):
    name = "tree-generation"
    title = "recursive generation of trees"
    sizes = (256,)

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.model = DoublyRecurrent(hidden)
        self.labels = id_tensors(LABELS)
        self.examples = [self.tree(draw) for _ in range(POOL)]

    def tree(self, draw: Random) -> Target:
        children = random_tree(draw, length(draw, 20.0, 10.0, 3, 60))
        parent, sibling, depth, place = ([-1] * len(children) for _ in range(4))
        depth[0] = place[0] = 0
        topology = np.zeros((len(children), 2), dtype=np.float32)
        for node, below in enumerate(children):
            topology[node, 0] = bool(below)
            for k, child in enumerate(below):
                parent[child], depth[child], place[child] = node, depth[node] + 1, k
                sibling[child] = below[k - 1] if k else -1
                topology[child, 1] = k + 1 < len(below)
        ids = [draw.randrange(LABELS) for _ in children]
        return Target(
            torch.randn(1, LATENT),
            [self.labels[i] for i in ids],
            children,
            list(torch.tensor(topology).split(1)),
            np.array(ids),
            topology,
            *map(np.array, (parent, sibling, depth, place)),
        )

    def collate(self, minibatch: Sequence[Target]) -> Plan:
        sizes = np.array([len(tree.labels) for tree in minibatch])
        offsets = np.repeat(np.cumsum(sizes) - sizes, sizes)
        trees = np.repeat(np.arange(len(minibatch)), sizes)

        def joined(name: str) -> Ids:
            return np.concatenate([getattr(tree, name) for tree in minibatch])

        labels, topology = joined("label_ids"), joined("topology_rows")
        parent, sibling = joined("parent"), joined("sibling")
        parent = np.where(parent < 0, -1, parent + offsets)
        sibling = np.where(sibling < 0, -1, sibling + offsets)

        def over(nodes: Ids, links: Ids, level: Ids, first: Ids) -> tuple[Chains, Ids]:
            """Returns chains over some nodes, and the row of each node's state."""
            number = np.full(len(labels), -1)
            number[nodes] = np.arange(len(nodes))
            source = np.where(links[nodes] < 0, -1, number[links[nodes]])
            made, row = chains(level[nodes], source, labels[nodes], first[nodes])
            rows = np.full(len(labels), -1)
            rows[nodes] = row
            return made, rows

        inner = np.flatnonzero(topology[:, 0])
        down, down_row = over(inner, parent, joined("depth"), trees)
        followed = np.flatnonzero(topology[:, 1])
        along, along_row = over(followed, sibling, joined("place"), np.zeros_like(trees))
        above = np.where(parent < 0, trees, down_row[np.maximum(parent, 0)] + len(minibatch))
        before = np.where(sibling < 0, 0, along_row[np.maximum(sibling, 0)] + 1)
        return Plan(
            torch.cat([tree.latent for tree in minibatch]),
            down,
            along,
            collate.tensor(above),
            collate.tensor(before),
            collate.tensor(labels),
            torch.from_numpy(topology),
            collate.tensor(trees),
        )

    def hand(self, plan: Plan) -> Tensor:
        model = self.model
        roots = model.start(plan.latents).tanh()
        above = self.states(model.down, plan.down, roots).index_select(0, plan.above)
        before = self.states(model.along, plan.along, model.no_sibling)
        side = model.from_sibling(before).index_select(0, plan.before)
        features = (model.from_parent(above) + side).tanh()
        scores = model.label(features)
        losses = F.cross_entropy(scores, plan.labels, reduction="none")
        topology = F.binary_cross_entropy_with_logits(
            model.topology(features), plan.topology, reduction="none"
        )
        losses = losses + topology.mean(-1)
        return collate.sum_by(plan.trees, losses, len(plan.latents))

    def states(self, cell: nn.GRUCell, plan: Chains, first: Tensor) -> Tensor:
        """Returns the first states and the states of the chains, [first + states, H]."""
        states = [first]
        inputs = self.model.embedding(plan.labels).split(plan.sizes)
        for x, sources in zip(inputs, plan.sources, strict=True):
            states.append(cell(x, states[-1].index_select(0, sources)))
        return torch.cat(states)
