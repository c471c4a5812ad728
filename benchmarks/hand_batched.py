"""What an expert would write by hand: the examples' Tree-LSTMs, a minibatch level by level.

    python benchmarks/hand_batched.py [--treebank FILE]

checks each against the per-example model (losses and gradients) and times both. A level holds the
nodes at one distance from their root, so that all children of a level are in the next deeper one:
every state is gathered once, and the cost is linear in the nodes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from binary_tree_lstm import BinaryTreeLSTM
from child_sum_tree_lstm import ChildSumTreeLSTM
from data import Example, read_functions, read_treebank, split_and_encode

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Level:
    """Index tensors of one level; its rows are the inner nodes first, then the leaves."""

    inner: int
    leaves: int
    children: Tensor  # [children]: rows of the deeper level, in order of their parents
    parents: Tensor  # [children]: row of each child's parent, among the inner nodes


@dataclass(frozen=True)
class Plan:
    """Index tensors of a minibatch of trees; the deepest level comes first everywhere."""

    levels: list[Level]
    leaf_symbols: Tensor  # [leaves]
    inner_symbols: Tensor  # [inner nodes]
    trees: Tensor  # [nodes]: which tree each row belongs to
    targets: Tensor  # [nodes], or [trees] where only roots have one
    size: int  # number of trees


def plan(minibatch: Sequence[Example]) -> Plan:
    """Sort the nodes of all trees into levels."""
    inner: list[list[tuple[int, int]]] = []  # (tree, node) of each level, from the roots down
    leaves: list[list[tuple[int, int]]] = []
    for t, tree in enumerate(minibatch):
        depth = [0] * len(tree.children)
        for node in range(len(depth) - 1, -1, -1):
            level = depth[node]
            if level == len(inner):
                inner.append([])
                leaves.append([])
            (inner if tree.children[node] else leaves)[level].append((t, node))
            for child in tree.children[node]:
                depth[child] = level + 1

    levels: list[Level] = []
    rows: dict[tuple[int, int], int] = {}  # of the deeper level
    order: list[tuple[int, int]] = []
    for parents, words in zip(reversed(inner), reversed(leaves), strict=True):
        links = [
            (rows[t, child], row)
            for row, (t, node) in enumerate(parents)
            for child in minibatch[t].children[node]
        ]
        index = torch.tensor(links, dtype=torch.long).reshape(-1, 2)
        columns = index.t().contiguous()
        levels.append(Level(len(parents), len(words), columns[0], columns[1]))
        rows = {key: row for row, key in enumerate(parents + words)}
        order += parents + words

    def symbols(keys: list[list[tuple[int, int]]]) -> Tensor:
        ids = [minibatch[t].symbols[node] for level in reversed(keys) for t, node in level]
        return torch.cat(ids) if ids else torch.empty(0, dtype=torch.long)

    roots = [(t, len(tree.children) - 1) for t, tree in enumerate(minibatch)]
    if all(len(tree.targets) == len(tree.children) for tree in minibatch):
        targets = [minibatch[t].targets[node] for t, node in order]
    else:
        targets = [minibatch[t].targets[0] for t, node in order if (t, node) == roots[t]]
    trees = torch.tensor([t for t, _ in order])
    return Plan(levels, symbols(leaves), symbols(inner), trees, torch.cat(targets), len(minibatch))


def _leaf_states(gates: Tensor) -> tuple[Tensor, Tensor]:
    """States [n, H] of nodes without children, from the gates i, o and u of shape [n, 3H]."""
    i, o, u = gates.chunk(3, dim=-1)
    c = i.sigmoid() * u.tanh()
    return o.sigmoid() * c.tanh(), c


def binary_losses(model: BinaryTreeLSTM, batch: Plan) -> Tensor:
    """The loss of each tree, [trees]: what ``[model(tree) for tree in minibatch]`` gives."""
    leaves = [level.leaves for level in batch.levels]
    leaf_h, leaf_c = _leaf_states(model.w(model.embedding(batch.leaf_symbols)))
    h = c = leaf_h.new_empty(0, leaf_h.shape[1])
    states: list[Tensor] = []
    for level, h_words, c_words in zip(
        batch.levels, leaf_h.split(leaves), leaf_c.split(leaves), strict=True
    ):
        if level.inner:
            hidden = h.shape[1]
            # The two children of a node lie side by side: [n, 2H] is their concatenation.
            h_pairs = h.index_select(0, level.children).view(level.inner, 2 * hidden)
            c_pairs = c.index_select(0, level.children).view(level.inner, 2, hidden)
            i, o, u, f = model.u(h_pairs).split([hidden, hidden, hidden, 2 * hidden], dim=-1)
            c = i.sigmoid() * u.tanh() + (f.sigmoid().view_as(c_pairs) * c_pairs).sum(1)
            h = o.sigmoid() * c.tanh()
            h, c = torch.cat([h, h_words]), torch.cat([c, c_words])
        else:
            h, c = h_words, c_words
        states.append(h)
    losses = F.cross_entropy(model.classifier(torch.cat(states)), batch.targets, reduction="none")
    return losses.new_zeros(batch.size).index_add(0, batch.trees, losses)


def child_sum_losses(model: ChildSumTreeLSTM, batch: Plan) -> Tensor:
    """The loss of each tree, [trees]: what ``[model(tree) for tree in minibatch]`` gives."""
    leaves = [level.leaves for level in batch.levels]
    inner = [level.inner for level in batch.levels]
    leaf_h, leaf_c = _leaf_states(model.w_iou(model.embedding(batch.leaf_symbols)))
    inner_x = model.embedding(batch.inner_symbols)
    h = c = leaf_h.new_empty(0, leaf_h.shape[1])
    for level, h_leaves, c_leaves, x_iou, x_f in zip(
        batch.levels,
        leaf_h.split(leaves),
        leaf_c.split(leaves),
        model.w_iou(inner_x).split(inner),
        model.w_f(inner_x).split(inner),
        strict=True,
    ):
        if level.inner:
            h, c = h.index_select(0, level.children), c.index_select(0, level.children)
            zeros = h.new_zeros(level.inner, h.shape[1])
            h_sum = zeros.index_add(0, level.parents, h)
            f = (x_f.index_select(0, level.parents) + model.u_f(h)).sigmoid()
            i, o, u = (x_iou + model.u_iou(h_sum)).chunk(3, dim=-1)
            c = (i.sigmoid() * u.tanh()).index_add(0, level.parents, f * c)
            h = o.sigmoid() * c.tanh()
            h, c = torch.cat([h, h_leaves]), torch.cat([c, c_leaves])
        else:
            h, c = h_leaves, c_leaves
    losses = F.cross_entropy(model.classifier(h), batch.targets, reduction="none")
    roots = batch.trees[-len(losses) :]
    return losses.new_zeros(batch.size).index_add(0, roots, losses)


# ---------------------------------------------------------------- check and timing


def main() -> int:
    """Compare and time; returns 1 where results differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--treebank", type=Path, help="binary trees, for the binary Tree-LSTM")
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)

    model: Any
    by_hand: Callable[[Any, Plan], Tensor]
    if options.treebank:
        data = split_and_encode(read_treebank(options.treebank), seed=options.seed)
        model = BinaryTreeLSTM(data.vocabulary, data.classes, hidden=options.hidden)
        by_hand = binary_losses
    else:
        data = split_and_encode(read_functions(), seed=options.seed)
        model = ChildSumTreeLSTM(data.vocabulary, data.classes, hidden=options.hidden)
        by_hand = child_sum_losses

    def per_example(model: Any, minibatch: Sequence[Example]) -> Tensor:
        return torch.stack([model(tree) for tree in minibatch])

    def step(losses: Callable[[Any, Any], Tensor], inputs: Any) -> tuple[float, list[Tensor]]:
        start = time.perf_counter()
        model.zero_grad(set_to_none=True)
        result = losses(model, inputs)
        torch.autograd.backward(result.sum())
        seconds = time.perf_counter() - start
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return seconds, [result.detach(), *grads]

    times: dict[str, list[float]] = {"eager": [], "by hand": [], "planning alone": []}
    differences: list[float] = []
    for turn in range(options.rounds + 1):
        minibatch = data.train[turn * options.minibatch :][: options.minibatch]
        start = time.perf_counter()
        batch = plan(minibatch)
        planning = time.perf_counter() - start
        eager, expected = step(per_example, minibatch)
        hand, values = step(by_hand, batch)
        for a, b in zip(expected, values, strict=True):
            differences.append(((a - b).abs().max() / a.abs().max()).item())
        if turn > 0:  # the first is the warm-up
            times["eager"].append(eager)
            times["by hand"].append(hand + planning)
            times["planning alone"].append(planning)

    print(
        f"{type(model).__name__}, {options.minibatch} trees, hidden {options.hidden}, one thread:"
    )
    for variant, seconds in times.items():
        rate = options.minibatch / median(seconds)
        print(f"  {variant:<16}{1e3 * median(seconds):9.1f} ms a training step{rate:10.1f} trees/s")
    print(f"  largest relative difference of losses and gradients {max(differences):.1e}")
    return int(not all(difference <= TOLERANCE for difference in differences))


if __name__ == "__main__":
    sys.exit(main())
