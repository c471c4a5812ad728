"""Generation of trees whose shape the model decides as it goes: the doubly recurrent network of
Alvarez-Melis and Jaakkola 2017, trained on its own decisions (the log-likelihood of a sample, as in
REINFORCE with a return of 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import collate
from benchmarks.workload import POOL, Sources, Workload, seed_everything
from benchmarks.workloads.generation import LATENT, DoublyRecurrent

DEPTH = 6  # nodes below have no children
BREADTH = 4  # the most children of a node
MOST = 40  # nodes of a tree, after which none has children or a next sibling


WIDTH, BIAS = 3.0, 0.2  # of what decides, before training


@dataclass(frozen=True, slots=True)
class Seed:
    """What a tree grows from: [1, LATENT]."""

    latent: Tensor


class FreeGenerator(DoublyRecurrent):
    """Decides at each node what it is, and whether it has children and a next sibling."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.decisions = [
            [torch.tensor([[float(a), float(b)]]) for b in range(2)] for a in range(2)
        ]

    def forward(self, seed: Seed) -> Tensor:  # type: ignore[override]
        """The sum of the losses of all nodes of one tree."""
        losses: list[Tensor] = []
        self.grow(self.start(seed.latent).tanh(), self.no_sibling, 0, 1, losses)
        return torch.stack(losses).sum()

    def grow(
        self, above: Tensor, before: Tensor, depth: int, place: int, losses: list[Tensor]
    ) -> None:
        """A node, what is below it, and its later siblings."""
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
    """A node that is still to be made: rows of memory."""

    above: int
    before: int
    depth: int
    place: int


class FreeTreeGeneration(Workload):
    name = "tree-generation-free"
    title = "generation of trees, free"
    sizes = (256,)
    targets: ClassVar[Mapping[int, float]] = {256: 0.5}
    reads = True

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        seed_everything(seed)
        self.model = FreeGenerator(hidden)
        with torch.no_grad():  # so that trees differ
            self.model.topology.weight.mul_(WIDTH)
            self.model.topology.bias.fill_(BIAS)
        self.examples = [Seed(4 * torch.randn(1, LATENT)) for _ in range(POOL)]

    def collate(self, minibatch: Sequence[Seed]) -> Sequence[Seed]:
        """What can be prepared depends on the decisions."""
        return minibatch

    def hand(self, plan: Sequence[Seed]) -> Tensor:
        """All trees in lockstep, a node each."""
        model = self.model
        roots = model.start(torch.cat([seed.latent for seed in plan])).tanh()
        memory = torch.cat([model.no_sibling, roots])  # states that nodes to come start from
        stacks = [[Frame(1 + k, 0, 0, 1)] for k in range(len(plan))]
        live = list(range(len(plan)))
        counts = [0] * len(plan)
        losses, owners = [], []
        while live:
            frames = [stacks[k].pop() for k in live]
            above = memory.index_select(0, collate.tensor([f.above for f in frames]))
            before = memory.index_select(0, collate.tensor([f.before for f in frames]))
            features = (model.from_parent(above) + model.from_sibling(before)).tanh()
            scores, topology = model.label(features), model.topology(features)
            labels = scores.argmax(-1)
            decided = (topology > 0).tolist()
            small = [counts[k] < MOST for k in live]
            for k in live:
                counts[k] += 1
            down = [
                s and d and f.depth < DEPTH
                for s, (d, _), f in zip(small, decided, frames, strict=True)
            ]
            along = [
                s and a and f.depth > 0 and f.place < BREADTH
                for s, (_, a), f in zip(small, decided, frames, strict=True)
            ]
            wanted = torch.tensor([[float(d), float(a)] for d, a in zip(down, along, strict=True)])
            shape = F.binary_cross_entropy_with_logits(topology, wanted, reduction="none").mean(-1)
            losses.append(F.cross_entropy(scores, labels, reduction="none") + shape)
            owners += live

            embedded = model.embedding(labels)
            fresh = [memory]
            size = len(memory)
            for cell, chosen, states in (
                (model.down, down, above),
                (model.along, along, before),
            ):
                places = [i for i, yes in enumerate(chosen) if yes]
                if not places:
                    continue
                rows = collate.tensor(places)
                fresh.append(cell(embedded.index_select(0, rows), states.index_select(0, rows)))
                for place, i in enumerate(places, start=size):
                    f = frames[i]
                    if cell is model.down:
                        frame = Frame(place, 0, f.depth + 1, 1)
                    else:
                        frame = Frame(f.above, place, f.depth, f.place + 1)
                        below = stacks[live[i]].pop() if down[i] else None
                        stacks[live[i]].append(frame)  # after all that is below the node
                        frame = below
                    if frame is not None:
                        stacks[live[i]].append(frame)
                size += len(places)
            live = [k for k in live if stacks[k]]
            if not live:
                break
            # Only what is still to be read is kept.
            used = sorted({row for k in live for f in stacks[k] for row in (f.above, f.before)})
            used = sorted({0, *used})
            number = {row: i for i, row in enumerate(used)}
            for k in live:
                for f in stacks[k]:
                    f.above, f.before = number[f.above], number[f.before]
            memory = torch.cat(fresh).index_select(0, collate.tensor(used))
        return collate.sum_by(collate.tensor(owners), torch.cat(losses), len(plan))
