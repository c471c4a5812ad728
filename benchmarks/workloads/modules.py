"""Neural modules chosen by a program: the execution engine of Johnson et al. 2017 (IEP,
arXiv:1705.03633). A program is a tree of functions. Each function is a residual block of
convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from random import Random
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.data import Tree, id_tensors, make_tree
from benchmarks.workload import Sources, Workload, seed_everything

UNARY, BINARY = 30, 9
SIDE = 14  # height and width of the image's features
IMAGE = 64  # channels of the image's features
ANSWERS = 28
POOL = 256


@dataclass(frozen=True, slots=True)
class Question:
    """An image's features [1, IMAGE, SIDE, SIDE], a program and the answer.

    The symbol of a node is its function. Functions below UNARY have one argument, others have two.
    Leaves are the image.
    """

    image: Tensor
    program: Tree
    functions: list[int]
    target: Tensor


class Unary(nn.Module):
    """A residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.second(self.first(x).relu())).relu()


class Binary(nn.Module):
    """Combines two arguments, followed by a residual block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.join = nn.Conv2d(2 * channels, channels, 1)
        self.block = Unary(channels)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        block: Tensor = self.block(self.join(torch.cat([x, y], dim=1)).relu())
        return block


class ExecutionEngine(nn.Module):
    """Runs a program on an image and classifies the result."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(IMAGE, channels, 3, padding=1)
        self.functions = nn.ModuleList(
            [Unary(channels) for _ in range(UNARY)] + [Binary(channels) for _ in range(BINARY)]
        )
        self.head = nn.Conv2d(channels, 32, 1)
        self.answer = nn.Linear(32 * (SIDE // 2) ** 2, ANSWERS)

    def classify(self, x: Tensor) -> Tensor:
        """Returns the scores of the answers from the features [n, C, SIDE, SIDE]."""
        scores: Tensor = self.answer(F.max_pool2d(self.head(x).relu(), 2).flatten(1))
        return scores

    def forward(self, question: Question) -> Tensor:
        """Returns the loss of one question."""
        image = self.stem(question.image).relu()
        values: list[Tensor] = []
        for function, arguments in zip(question.functions, question.program.children, strict=True):
            if arguments:
                values.append(self.functions[function](*[values[i] for i in arguments]))
            else:
                values.append(image)
        return F.cross_entropy(self.classify(values[-1]), question.target)


def program(draw: Random) -> tuple[list[int], list[tuple[int, ...]]]:
    """Returns chains of unary functions combined by binary functions: 2 to 20 functions."""
    functions: list[int] = []
    children: list[tuple[int, ...]] = []

    def add(function: int, *arguments: int) -> int:
        functions.append(function)
        children.append(arguments)
        return len(functions) - 1

    def chain(start: int, most: int) -> int:
        for _ in range(draw.randint(1, most)):
            start = add(draw.randrange(UNARY), start)
        return start

    result = chain(add(0), 5)
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        other = chain(add(0), 4)
        result = chain(add(UNARY + draw.randrange(BINARY), result, other), 3)
    return functions, children


@dataclass(frozen=True)
class Plan:
    images: Tensor
    forest: collate.Forest
    runs: list[list[tuple[int, int]]]  # for each level: functions, and their numbers of nodes
    trees: list[Tensor]  # for each level: the trees of its leaves
    targets: Tensor
    roots: Tensor  # for each tree: its row in the last level


class NeuralModules(Workload):
    name = "neural-modules"
    title = "IEP neural modules"
    sizes = (64,)
    targets: ClassVar[Mapping[int, float]] = {64: 1.0}

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.model = ExecutionEngine(hidden)
        symbols, answers = id_tensors(UNARY + BINARY), id_tensors(ANSWERS)
        self.examples = []
        for _ in range(POOL):
            functions, children = program(draw)
            tree = make_tree([symbols[f] for f in functions], children, [])
            image = torch.randn(1, IMAGE, SIDE, SIDE)
            self.examples.append(Question(image, tree, functions, answers[draw.randrange(ANSWERS)]))

    def collate(self, minibatch: Sequence[Question]) -> Plan:
        programs = [question.program for question in minibatch]
        functions = np.concatenate([tree.symbol_ids for tree in programs])
        forest = collate.forest(programs, kind=functions)
        runs, trees, start = [], [], 0
        for level in forest.levels:
            inner = functions[forest.order[start : start + level.inner]].tolist()
            runs.append([(function, len(list(same))) for function, same in groupby(inner)])
            trees.append(forest.trees[start + level.inner : start + level.inner + level.leaves])
            start += level.inner + level.leaves
        return Plan(
            torch.cat([question.image for question in minibatch]),
            forest,
            runs,
            trees,
            torch.cat([question.target for question in minibatch]),
            collate.tensor(np.argsort(forest.trees[-len(programs) :].numpy())),
        )

    def hand(self, plan: Plan) -> Tensor:
        model = self.model
        images = model.stem(plan.images).relu()
        values = images[:0]
        for level, runs, trees in zip(plan.forest.levels, plan.runs, plan.trees, strict=True):
            below = values.index_select(0, level.children)
            results, start = [], 0
            for function, count in runs:
                if function < UNARY:
                    arguments = below[start : start + count]
                    results.append(model.functions[function](arguments))
                    start += count
                else:
                    pairs = below[start : start + 2 * count]
                    results.append(model.functions[function](pairs[::2], pairs[1::2]))
                    start += 2 * count
            if level.leaves:
                results.append(images.index_select(0, trees))
            values = torch.cat(results)
        scores = model.classify(values.index_select(0, plan.roots))
        return F.cross_entropy(scores, plan.targets, reduction="none")
