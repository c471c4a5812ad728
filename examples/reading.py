"""Data, training and timing for the examples of models that read values.

The models are trained on the syntax trees of functions in Python's standard library.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch_autobatch as ab
from data import Example, read_functions, split_and_encode
from torch import Tensor, nn


class Model(Protocol):
    """A model for one example. Predictions are plain Python values.

    ``accuracy`` returns the number of right predictions and the number of predictions.
    """

    def __call__(self, example: Example) -> Tensor: ...
    def predict(self, example: Example) -> Any: ...
    def accuracy(self, example: Example, predicted: Any) -> tuple[int, int]: ...


def preorder(example: Example) -> tuple[list[int], list[int]]:
    """Returns the nodes with parents first, and the index of each node's parent in this list.

    The parent of the root is -1.
    """
    order: list[int] = []
    parents: list[int] = []
    waiting = [(len(example.children) - 1, -1)]
    while waiting:
        node, parent = waiting.pop()
        waiting += [(child, len(order)) for child in reversed(example.children[node])]
        order.append(node)
        parents.append(parent)
    return order, parents


def parse(doc: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of an example."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100, help="training steps (%(default)s)")
    parser.add_argument("--minibatch", type=int, default=32, help="examples a step (%(default)s)")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size (%(default)s)")
    parser.add_argument("--longest", type=int, default=60, help="nodes at most (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps of a small model")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.minibatch, options.hidden, options.longest = 2, 6, 8, 25
    return options


def run(
    make: Callable[[int, int, int], nn.Module], doc: str, arguments: Sequence[str] | None = None
) -> int:
    """Trains ``make(vocabulary, classes, hidden)`` and times a step.

    Returns 1 if the results of the step differ from eager mode, else 0.
    """
    options = parse(doc, arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    raw = [e for e in read_functions() if len(e.symbols) <= options.longest]
    data = split_and_encode(raw, seed=0, min_count=5)
    model: Any = make(data.vocabulary, data.classes, options.hidden)
    print(f"{len(data.train):,} functions to train on, {len(data.held_out):,} held out")

    draw = random.Random(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    start = time.perf_counter()
    for step in range(options.steps):
        minibatch = draw.sample(data.train, options.minibatch)
        optimizer.zero_grad()
        loss = torch.stack(ab.map(model, minibatch)).mean()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == options.steps - 1:
            seconds = time.perf_counter() - start
            print(f"step {step:4}  loss {loss.item():8.3f}  {seconds:6.1f} s")

    held_out = data.held_out[: 4 * options.minibatch]
    with torch.no_grad():
        predicted = ab.map(model.predict, held_out)
    counts = [model.accuracy(e, p) for e, p in zip(held_out, predicted, strict=True)]
    right, of = (sum(column) for column in zip(*counts, strict=True))
    print(f"held out: {right} of {of} right ({100 * right / max(1, of):.1f} %)")
    return compare(model, draw.sample(data.train, options.minibatch))


def compare(model: nn.Module, minibatch: Sequence[Example]) -> int:
    """Times one training step in a loop and with ``ab.map``. Returns 1 if results differ."""
    seen: list[tuple[Tensor, list[Tensor]]] = []
    seconds = []
    for enabled in (False, True):
        ab.map(model, minibatch, enabled=enabled)  # warm-up
        model.zero_grad()
        start = time.perf_counter()
        losses = torch.stack(ab.map(model, minibatch, enabled=enabled))
        losses.sum().backward()
        seconds.append(time.perf_counter() - start)
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        seen.append((losses.detach(), gradients))
    print(f"a step of {len(minibatch)}: loop {seconds[0]:.2f} s, ab.map {seconds[1]:.2f} s")
    pairs = [(seen[0][0], seen[1][0]), *zip(seen[0][1], seen[1][1], strict=True)]
    worst = max(float((a - b).abs().max() / (a.abs().max() + 1e-9)) for a, b in pairs)
    print(f"largest difference {worst:.1e}")
    return int(worst > 1e-3)
