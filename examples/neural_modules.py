"""Neural modules: a program selects the functions that answer a question about a scene, as in
Johnson et al. 2017 (IEP, arXiv:1705.03633).

    python examples/neural_modules.py [--steps N]

"How many are red and not round?" is the tree count(and(find[red], not(find[round]))). Scenes and
programs are synthetic. Each word and each connective has a module, which is learned from answers
only. Each module is a cell (``ab.cell``): a call is captured as one node, and calls of one kind run
as one batch. The script compares loss and gradients of a step with eager mode, op by op and in
cells. Then it trains, and times all three variants.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

TOLERANCE = 1e-4
OBJECTS = 8
WORDS = ("red", "green", "blue", "round", "square", "small", "large", "shiny")

# A program is a word, ("not", program), or ("and" or "or", program, program).
Program = Any


@dataclass(frozen=True)
class Question:
    """A scene [OBJECTS, features], a program, and the number of objects that satisfy it, []."""

    scene: Tensor
    program: Program
    answer: Tensor


@ab.cell
class Find(nn.Module):
    """Computes features of how well each object matches a word: [OBJECTS, H]."""

    def __init__(self, hidden: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(len(WORDS), hidden), nn.ReLU(), nn.Linear(hidden, hidden)
        )

    def forward(self, scene: Tensor) -> Tensor:
        return self.layers(scene).tanh()


@ab.cell
class Connective(nn.Module):
    """Combines the features of one or two subprograms: [OBJECTS, H]."""

    def __init__(self, arguments: int, hidden: int):
        super().__init__()
        self.inner = nn.Linear(arguments * hidden, hidden)
        self.outer = nn.Linear(hidden, hidden)

    def forward(self, *below: Tensor) -> Tensor:
        return self.outer(self.inner(torch.cat(below, dim=-1)).relu()).tanh()


class Answerer(nn.Module):
    """Runs the program of one question on its scene."""

    def __init__(self, hidden: int = 64):
        super().__init__()
        self.find = nn.ModuleDict({word: Find(hidden) for word in WORDS})
        self.connect = nn.ModuleDict(
            {
                "not": Connective(1, hidden),
                "and": Connective(2, hidden),
                "or": Connective(2, hidden),
            }
        )
        self.holds = nn.Linear(hidden, 1)

    def run(self, program: Program, scene: Tensor) -> Tensor:
        if isinstance(program, str):
            return self.find[program](scene)
        name, *parts = program
        return self.connect[name](*[self.run(part, scene) for part in parts])

    @ab.cell
    def count_loss(self, found: Tensor, answer: Tensor) -> Tensor:
        """Returns the loss of the predicted number of objects, of shape []."""
        return F.mse_loss(self.holds(found).sigmoid().sum(), answer)

    def forward(self, question: Question) -> Tensor:
        return self.count_loss(self.run(question.program, question.scene), question.answer)


def make_program(draw: random.Random, depth: int) -> Program:
    name = draw.choice(("not", "and", "or", "")) if depth else ""
    if not name:
        return draw.choice(WORDS)
    return (name, *(make_program(draw, depth - 1) for _ in range(1 if name == "not" else 2)))


def true_of(program: Program, words: set[str]) -> bool:
    if isinstance(program, str):
        return program in words
    name, *parts = program
    values = [true_of(part, words) for part in parts]
    return not values[0] if name == "not" else all(values) if name == "and" else any(values)


def make_questions(draw: random.Random, count: int) -> list[Question]:
    """Makes random questions. An object is a vector of 0 or 1 for each word, plus noise."""
    questions = []
    for _ in range(count):
        objects = [{word for word in WORDS if draw.random() < 0.5} for _ in range(OBJECTS)]
        features = torch.tensor([[float(word in words) for word in WORDS] for words in objects])
        program = make_program(draw, depth=4)
        answer = torch.tensor(float(sum(true_of(program, words) for words in objects)))
        questions.append(Question(features + 0.1 * torch.randn_like(features), program, answer))
    return questions


def mean_loss(model: Answerer, questions: Sequence[Question], **options: Any) -> Tensor:
    """Returns the mean loss. Runs one question after the other, without a batch dimension."""
    with ab.batch(**options):
        return torch.stack([model(question) for question in questions]).mean()


WAYS: dict[str, dict[str, Any]] = {
    "eager": {"enabled": False},
    "op by op": {"granularity": "op"},
    "in cells": {},
}


def step(
    model: Answerer, questions: Sequence[Question], way: str
) -> tuple[float, list[Tensor | None]]:
    """Runs forward and backward. Returns the seconds, and the loss with the gradients."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    loss = mean_loss(model, questions, **WAYS[way])
    torch.autograd.backward(loss)
    seconds = time.perf_counter() - start
    return seconds, [loss.detach(), *[p.grad for p in model.parameters()]]


def difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """Returns the largest difference, relative to the largest expected value.

    A missing gradient counts as zero.
    """
    worst = 0.0
    largest = max(t.abs().max().item() for t in expected if t is not None)
    for a, b in zip(expected, found, strict=True):
        gap = b if a is None else a if b is None else a - b
        if gap is not None:
            worst = max(worst, gap.abs().max().item() / largest)
    return worst


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, times and trains. Returns 1 if results differ from eager mode."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="of timing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    model = Answerer(options.hidden)

    times: dict[str, list[float]] = {way: [] for way in WAYS}
    worst = 0.0
    for turn in range(options.rounds + 2):
        questions = make_questions(draw, options.minibatch)
        results = {}
        for way, taken in times.items():
            seconds, results[way] = step(model, questions, way)
            if turn > 1:  # the first two turns are warm-up
                taken.append(seconds)
        worst = max(worst, *(difference(results["eager"], found) for found in results.values()))
    print(f"differs from eager by {worst:.1e} of the largest gradient")
    for way, taken in times.items():
        print(f"  {way:<10}{options.minibatch / median(taken):8.0f} questions/s")

    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for number in range(1, options.steps + 1):
        _, (loss, *_) = step(model, make_questions(draw, options.minibatch), "in cells")
        optimizer.step()
        if loss is not None and (number % 100 == 0 or number == options.steps):
            print(f"  step {number:4d}: mean squared error {loss.item():.3f}")
    return int(not worst <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
