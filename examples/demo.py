"""Trains a model that is written for one example, batched on the fly, and times it against eager.

    python examples/demo.py                    child-sum Tree-LSTM, Python's own syntax trees
    python examples/demo.py --treebank FILE    binary Tree-LSTM, sentiment: (3 (2 a) (4 b))
    python examples/demo.py --tags FILE        BiLSTM tagger: word|tag word|tag

The exit status is 1 if losses or gradients differ from eager mode, and 2 if the input can't be
read.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, Protocol

import torch
import torch_autobatch as ab
from bilstm_tagger import BiLSTMTagger
from binary_tree_lstm import BinaryTreeLSTM
from child_sum_tree_lstm import ChildSumTreeLSTM
from data import (
    DataError,
    Dataset,
    Example,
    RawExample,
    read_functions,
    read_tags,
    read_treebank,
    split_and_encode,
)
from torch import Tensor, nn

TOLERANCE = 1e-4  # relative to the largest expected magnitude
LEARNING_RATE = 1e-3
EVALUATED = 256  # number of held-out examples for the accuracy
MIN_ROUNDS = 3
TIMING_SECONDS = 60.0  # no further round starts after this time


class Model(Protocol):
    """The methods of a model that the demo calls."""

    def __call__(self, example: Example) -> Tensor: ...
    def scores(self, example: Example) -> list[Tensor]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the demo and returns the exit status."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    try:
        dataset, model = load(options)
    except DataError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    if options.steps > 0:
        train(model, dataset, options)
    return compare(model, dataset, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""

    def at_least(least: int) -> Any:
        def number(text: str) -> int:
            value = int(text)
            if value < least:
                raise argparse.ArgumentTypeError(f"{value} is less than {least}")
            return value

        return number

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--treebank", type=Path, metavar="FILE", help="binary trees, one a line")
    data.add_argument("--tags", type=Path, metavar="FILE", help="tagged sentences, one a line")
    add = parser.add_argument
    add("--steps", type=at_least(0), default=300, help="training steps at most (%(default)s)")
    add(
        "--seconds-budget",
        type=float,
        default=120.0,
        metavar="S",
        help="training seconds at most (%(default)s)",
    )
    add("--minibatch", type=at_least(1), default=64, help="examples a step (%(default)s)")
    add("--embedding", type=at_least(1), default=128, help="size of an embedding (%(default)s)")
    add("--hidden", type=at_least(1), help="size of a hidden state (trees 128, tagger 256)")
    add(
        "--min-count",
        type=at_least(1),
        default=2,
        help="rarer symbols are unknown (%(default)s)",
    )
    add("--rounds", type=at_least(MIN_ROUNDS), default=5, help="rounds timed (%(default)s)")
    add("--threads", type=at_least(1), default=1, help="threads of PyTorch (%(default)s)")
    add("--policy", default="auto", help="how batches are chosen (%(default)s)")
    add("--seed", type=int, default=0)
    add("--report", action="store_true", help="print the report of the last minibatch")
    return parser.parse_args(arguments)


def load(options: argparse.Namespace) -> tuple[Dataset, Model]:
    """Reads the data, prints its properties, and makes a model for it."""
    start = time.perf_counter()
    raw: list[RawExample]
    model_class: type[ChildSumTreeLSTM | BinaryTreeLSTM | BiLSTMTagger]
    if options.treebank:
        source, what, unit = str(options.treebank), "binary trees", "nodes"
        raw = read_treebank(options.treebank)
        model_class, hidden = BinaryTreeLSTM, 128
    elif options.tags:
        source, what, unit = str(options.tags), "tagged sentences", "words"
        raw = read_tags(options.tags)
        model_class, hidden = BiLSTMTagger, 256
    else:
        source, what, unit = "Python's standard library", "syntax trees of functions", "nodes"
        raw = read_functions()
        model_class, hidden = ChildSumTreeLSTM, 128
    if len(raw) < 2:
        raise DataError(Path(source), None, "one example", "at least two, to hold one out")

    dataset = split_and_encode(raw, seed=options.seed, min_count=options.min_count)
    sizes = [len(example.symbols) for example in raw]
    seconds = time.perf_counter() - start
    print(f"{len(raw):,} {what} from {source}, read in {seconds:.1f} s")
    print(f"  {unit}: mean {mean(sizes):.1f}, least {min(sizes)}, most {max(sizes)}")
    print(f"  {len(dataset.train):,} to train on, {len(dataset.held_out):,} held out")
    print(f"  {dataset.vocabulary:,} symbols, {dataset.classes} classes")

    hidden = options.hidden or hidden
    model = model_class(dataset.vocabulary, dataset.classes, options.embedding, hidden)
    count = sum(parameter.numel() for parameter in model.parameters())
    name = model_class.__name__
    print(f"{name}, embedding {options.embedding}, hidden {hidden}: {count:,} parameters\n")
    return dataset, model


def shuffled_minibatches(
    examples: Sequence[Example], size: int, seed: int
) -> Iterator[list[Example]]:
    """Yields minibatches endlessly. Shuffles the examples before each pass."""
    order = list(examples)
    shuffle = random.Random(seed).shuffle
    while True:
        shuffle(order)
        for start in range(0, max(1, len(order) - size + 1), size):
            yield order[start : start + size]


# ---------------------------------------------------------------- training


def train(model: Model, dataset: Dataset, options: argparse.Namespace) -> None:
    """Trains until the limit of steps or the limit of seconds is reached."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    minibatches = shuffled_minibatches(dataset.train, options.minibatch, options.seed)
    print(f"accuracy on held-out data before training: {accuracy(model, dataset, options):.1%}")
    progress = Progress(options.steps, options.seconds_budget)
    while not progress.finished:
        minibatch = next(minibatches)
        optimizer.zero_grad(set_to_none=True)
        with ab.batch(policy=options.policy):
            loss = torch.stack([model(example) for example in minibatch]).sum()
        loss.backward()
        optimizer.step()
        progress.step(loss.item() / sum(len(example.targets) for example in minibatch))
    progress.close()
    print(f"accuracy on held-out data after training: {accuracy(model, dataset, options):.1%}\n")


@torch.no_grad()
def accuracy(model: Model, dataset: Dataset, options: argparse.Namespace) -> float:
    """Returns the share of right predictions on the first held-out examples."""
    examples = dataset.held_out[:EVALUATED]
    right = total = 0
    for start in range(0, len(examples), options.minibatch):
        minibatch = examples[start : start + options.minibatch]
        with ab.batch(policy=options.policy):
            scores = [score for example in minibatch for score in model.scores(example)]
        targets = torch.cat([target for example in minibatch for target in example.targets])
        right += int((torch.cat(scores).argmax(dim=-1) == targets).sum())
        total += len(targets)
    return right / total


class Progress:
    """Counts steps and seconds. Prints a bar on a terminal, or else a line after each tenth."""

    def __init__(self, steps: int, seconds: float) -> None:
        self.steps, self.seconds = steps, seconds
        self.done = 0
        self.first: float | None = None
        self.loss = 0.0
        self.tenths = 0
        self.start = time.perf_counter()
        self.terminal = sys.stdout.isatty()

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    @property
    def finished(self) -> bool:
        return self.done >= self.steps or (self.done > 0 and self.elapsed >= self.seconds)

    def step(self, loss: float) -> None:
        """Counts a step with mean loss ``loss`` per prediction. Prints a moving average."""
        self.done += 1
        if self.first is None:
            self.first = self.loss = loss
        weight = max(0.05, 1 / self.done)
        self.loss += weight * (loss - self.loss)
        elapsed = self.elapsed
        fraction = 1.0 if self.finished else max(self.done / self.steps, elapsed / self.seconds)
        text = f"step {self.done}/{self.steps}  loss {self.loss:.3f}  {elapsed:.0f} s"
        if self.terminal:
            filled = round(30 * fraction)
            print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {text} ", end="", flush=True)
        elif int(10 * fraction) > self.tenths or self.done == 1:
            print(text, flush=True)
        self.tenths = int(10 * fraction)

    def close(self) -> None:
        """Prints why the training ended, and the first and last loss."""
        if self.terminal:
            print()
        enough = "all steps done" if self.done >= self.steps else "the time was used up"
        print(
            f"trained {self.done} steps in {self.elapsed:.0f} s ({enough}); "
            f"loss a prediction: {self.first:.3f} at first, {self.loss:.3f} in the end"
        )


# ---------------------------------------------------------------- eager and autobatched


@dataclass(frozen=True)
class Step:
    """Time and results of one training step, without the optimizer."""

    seconds: float
    losses: Tensor  # [examples]
    gradients: dict[str, Tensor | None]
    scope: Any = None


def training_step(model: Model, minibatch: Sequence[Example], policy: str | None) -> Step:
    """Runs forward and backward, batched with ``policy``, or eagerly if it is None."""
    scope = None
    start = time.perf_counter()
    model.zero_grad(set_to_none=True)
    if policy is None:
        losses = torch.stack([model(example) for example in minibatch])
    else:
        with ab.batch(policy=policy) as scope:
            losses = torch.stack([model(example) for example in minibatch])
    losses.sum().backward()
    seconds = time.perf_counter() - start
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(seconds, losses.detach(), gradients, scope)


def relative_difference(expected: Tensor | None, value: Tensor | None) -> float:
    """Returns the largest difference, relative to the largest expected magnitude. NaN gives inf."""
    if expected is None or value is None:
        return 0.0 if expected is value else math.inf
    difference = (expected - value).abs().max().item()
    scale = expected.abs().max().item()
    if math.isnan(difference):
        return math.inf
    return difference / scale if scale > 0 else difference


def compare(model: Model, dataset: Dataset, options: argparse.Namespace) -> int:
    """Times eager and batched steps in turn on the same minibatches, and compares the results."""
    minibatches = shuffled_minibatches(dataset.train, options.minibatch, options.seed + 1)
    rate: dict[str, list[float]] = {"eager": [], "autobatched": []}
    policies = {"eager": None, "autobatched": options.policy}
    worst_loss, worst_gradient, worst_name = 0.0, 0.0, ""
    ops = batches = bound = 0
    steps: dict[str, Step] = {}
    start = time.perf_counter()
    for turn in range(-1, options.rounds):  # turn -1 is the warm-up
        if turn >= MIN_ROUNDS and time.perf_counter() - start > TIMING_SECONDS:
            break
        minibatch = next(minibatches)
        steps.clear()
        for variant in sorted(rate, reverse=turn % 2 == 0):
            steps[variant] = training_step(model, minibatch, policies[variant])
        if turn < 0:
            continue
        for variant, step in steps.items():
            rate[variant].append(len(minibatch) / step.seconds)
        eager, ours = steps["eager"], steps["autobatched"]
        worst_loss = max(worst_loss, relative_difference(eager.losses, ours.losses))
        for name, gradient in eager.gradients.items():
            difference = relative_difference(gradient, ours.gradients[name])
            if difference > worst_gradient:
                worst_gradient, worst_name = difference, name
        report = ours.scope.report()
        ops, batches, bound = ops + report.ops, batches + report.batches, bound + report.lower_bound

    rounds = len(rate["eager"])
    print(
        f"a training step of {len(minibatch)} examples, {options.threads} thread"
        f"{'s' if options.threads > 1 else ''}, median of {rounds} rounds (least to most):"
    )
    slow = median(rate["eager"])
    for variant, rates in rate.items():
        middle = median(rates)
        spread = f"({min(rates):.1f} to {max(rates):.1f})"
        print(f"  {variant:<12}{middle:9.1f} examples/s  {spread:<20}{middle / slow:6.2f}x")
    place = f" ({worst_name})" if worst_name else ""
    print(
        f"largest relative difference: loss {worst_loss:.1e}, gradient {worst_gradient:.1e}{place}"
    )
    print(
        f"a minibatch: {ops // rounds:,} ops captured, run as {batches / rounds:,.0f} batches; "
        f"at least {bound / rounds:,.0f} are needed ({batches / max(bound, 1):.2f}x)"
    )
    if options.report:
        print(f"\n{steps['autobatched'].scope.report()}")
    if max(worst_loss, worst_gradient) > TOLERANCE:
        print(f"demo: a difference is larger than {TOLERANCE:.0e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
