"""Generation of trees whose shape the model decides during generation: the doubly recurrent network
of Alvarez-Melis and Jaakkola 2017. It is trained on its own decisions (the log-likelihood of a
sample, as in REINFORCE with a return of 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.workload import POOL, Sources, Workload, seed_everything
from benchmarks.workloads.generation import LATENT, DoublyRecurrent

DEPTH = 6  # nodes at this depth have no children
BREADTH = 4  # maximum number of children of a node
MOST = 40  # after this number of nodes, no node has children or a next sibling


WIDTH, BIAS = 3.0, 0.2  # scale and bias of the decisions before training


@dataclass(frozen=True, slots=True)
class Seed:
    """The vector from which a tree is generated, [1, LATENT]."""

    latent: Tensor


class FreeGenerator(DoublyRecurrent):
    """Decides the symbol of each node, and whether it has children and a next sibling."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.decisions = [
            [torch.tensor([[float(a), float(b)]]) for b in range(2)] for a in range(2)
        ]

    def forward(self, seed: Seed) -> Tensor:  # type: ignore[override]
        """Returns the sum of the losses of all nodes of one tree."""
        losses: list[Tensor] = []
        self.grow(self.start(seed.latent).tanh(), self.no_sibling, 0, 1, losses)
        return torch.stack(losses).sum()

    def grow(
        self, above: Tensor, before: Tensor, depth: int, place: int, losses: list[Tensor]
    ) -> None:
        """Generates a node, its descendants, and its later siblings."""
        features = (self.from_parent(above) + self.from_sibling(before)).tanh()
        scores, topology = self.label(features), self.topology(features)
        down, along = (topology[0] > 0).tolist()
        label = scores.argmax(-1)
        small = len(losses) < 2 * MOST
        down = small and down and depth < DEPTH
        along = small and along and depth > 0 and place < BREADTH
        losses.append(F.cross_entropy(scores, label))
        losses.append(F.binary_cross_entropy_with_logits(topology, self.decisions[down][along]))
        embedded = self.embedding(label)
        if down:
            self.grow(self.down(embedded, above), self.no_sibling, depth + 1, 1, losses)
        if along:
            self.grow(above, self.along(embedded, before), depth, place + 1, losses)


@dataclass
class Frame:
    """A node that has not been generated yet. ``above`` and ``before`` are rows of memory."""

    above: int
    before: int
    depth: int
    place: int


class Lockstep:
    """Generates all trees with hand-written batches, one node of each tree at a time."""

    def __init__(self, model: FreeGenerator, plan: Sequence[Seed]) -> None:
        self.model = model
        roots = model.start(torch.cat([seed.latent for seed in plan])).tanh()
        self.memory = torch.cat([model.no_sibling, roots])  # states from which later nodes start
        self.stacks = [[Frame(1 + k, 0, 0, 1)] for k in range(len(plan))]
        self.live = list(range(len(plan)))  # the trees that are not complete
        self.counts = [0] * len(plan)

    def step(self) -> Tensor:
        """Generates a node of each live tree. Returns the losses of these nodes, [live]."""
        model, memory = self.model, self.memory
        frames = [self.stacks[k].pop() for k in self.live]
        above = memory.index_select(0, collate.tensor([f.above for f in frames]))
        before = memory.index_select(0, collate.tensor([f.before for f in frames]))
        features = (model.from_parent(above) + model.from_sibling(before)).tanh()
        scores, topology = model.label(features), model.topology(features)
        labels = scores.argmax(-1)
        down, along = self.decide(frames, topology)
        wanted = torch.tensor([[float(d), float(a)] for d, a in zip(down, along, strict=True)])
        shape = F.binary_cross_entropy_with_logits(topology, wanted, reduction="none").mean(-1)
        losses = F.cross_entropy(scores, labels, reduction="none") + shape

        embedded = model.embedding(labels)
        fresh = [memory]
        children = [i for i, yes in enumerate(down) if yes]
        if children:
            fresh.append(following(model.down, children, embedded, above))
            self.push_children(frames, children, len(memory))
        siblings = [i for i, yes in enumerate(along) if yes]
        if siblings:
            fresh.append(following(model.along, siblings, embedded, before))
            self.push_siblings(frames, siblings, len(memory) + len(children), down)
        self.live = [k for k in self.live if self.stacks[k]]
        if self.live:
            self.keep_used(fresh)
        return losses

    def decide(self, frames: list[Frame], topology: Tensor) -> tuple[list[bool], list[bool]]:
        """Returns whether each node has children, and whether it has a next sibling."""
        decided = (topology > 0).tolist()
        small = [self.counts[k] < MOST for k in self.live]
        for k in self.live:
            self.counts[k] += 1
        down = [
            s and d and f.depth < DEPTH for s, (d, _), f in zip(small, decided, frames, strict=True)
        ]
        along = [
            s and a and f.depth > 0 and f.place < BREADTH
            for s, (_, a), f in zip(small, decided, frames, strict=True)
        ]
        return down, along

    def push_children(self, frames: list[Frame], places: list[int], row: int) -> None:
        """Adds the first children of the nodes at ``places``. Their states begin at ``row``."""
        for place, i in enumerate(places, start=row):
            self.stacks[self.live[i]].append(Frame(place, 0, frames[i].depth + 1, 1))

    def push_siblings(
        self, frames: list[Frame], places: list[int], row: int, down: list[bool]
    ) -> None:
        """Adds the next siblings of the nodes at ``places``, after the nodes' descendants."""
        for place, i in enumerate(places, start=row):
            f, stack = frames[i], self.stacks[self.live[i]]
            below = stack.pop() if down[i] else None
            stack.append(Frame(f.above, place, f.depth, f.place + 1))
            if below is not None:
                stack.append(below)

    def keep_used(self, fresh: list[Tensor]) -> None:
        """Keeps only the states that are needed later."""
        stacks = [self.stacks[k] for k in self.live]
        used = sorted({row for stack in stacks for f in stack for row in (f.above, f.before)})
        used = sorted({0, *used})
        number = {row: i for i, row in enumerate(used)}
        for stack in stacks:
            for f in stack:
                f.above, f.before = number[f.above], number[f.before]
        self.memory = torch.cat(fresh).index_select(0, collate.tensor(used))


def following(cell: nn.Module, places: list[int], embedded: Tensor, states: Tensor) -> Tensor:
    """Returns the states that a cell computes from the nodes at ``places``."""
    rows = collate.tensor(places)
    return cell(embedded.index_select(0, rows), states.index_select(0, rows))


class FreeTreeGeneration(Workload):
    name = "tree-generation-free"
    title = "generation of trees, free"
    sizes = (256,)
    targets: ClassVar[Mapping[int, float]] = {256: 0.5}
    reads = True

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        seed_everything(seed)
        self.model = FreeGenerator(hidden)
        with torch.no_grad():  # makes the trees differ
            self.model.topology.weight.mul_(WIDTH)
            self.model.topology.bias.fill_(BIAS)
        self.examples = [Seed(4 * torch.randn(1, LATENT)) for _ in range(POOL)]

    def collate(self, minibatch: Sequence[Seed]) -> Sequence[Seed]:
        """Prepares nothing, because all work depends on the decisions."""
        return minibatch

    def hand(self, plan: Sequence[Seed]) -> Tensor:
        """Generates all trees in lockstep, one node per step."""
        trees = Lockstep(self.model, plan)
        losses, owners = [], []
        while trees.live:
            owners += trees.live
            losses.append(trees.step())
        return collate.sum_by(collate.tensor(owners), torch.cat(losses), len(plan))
