"""Parts shared by the hand-batched variants: levels of forests, packed sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.data import Ids, Tree


def tensor(ids: Ids | Sequence[int]) -> Tensor:
    """Converts ids to an int64 tensor."""
    return torch.from_numpy(np.ascontiguousarray(ids, dtype=np.int64))


def positions(lengths: Ids) -> Ids:
    """Returns 0, 1, ..., n - 1 for each length n, concatenated."""
    starts = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) - np.repeat(starts, lengths)


# ---------------------------------------------------------------- trees


@dataclass(frozen=True)
class Level:
    """The nodes at one distance from their root. Rows are the inner nodes, then the leaves."""

    inner: int
    leaves: int
    children: Tensor  # [children]: rows of the deeper level, in order of their parents
    parents: Tensor  # [children]: row of each child's parent, among the inner nodes


@dataclass(frozen=True)
class Forest:
    """A minibatch of trees by levels, the deepest first.

    All children of a level are in the next deeper level, so each state is gathered only once.
    """

    levels: list[Level]
    order: Ids  # [nodes]: for each row, the node's number in the concatenated trees
    leaf_order: Ids  # [leaves]: `order` without the inner nodes
    inner_order: Ids  # [inner nodes]: `order` without the leaves
    trees: Tensor  # [nodes]: for each row, the number of its tree
    size: int  # number of trees


def forest(trees: Sequence[Tree], kind: Ids | None = None) -> Forest:
    """Sorts the nodes of all trees into levels.

    ``kind``: a number for each node, [nodes], or None. The inner nodes of a level, and its leaves,
    are sorted by this number.
    """
    sizes = np.array([len(tree.children) for tree in trees])
    offsets = np.cumsum(sizes) - sizes
    depth = np.concatenate([tree.depth for tree in trees])
    leaf = np.concatenate([tree.is_leaf for tree in trees])
    links = np.concatenate(
        [tree.links + offset for tree, offset in zip(trees, offsets, strict=True)], axis=1
    )
    deepest = depth.max()
    level = deepest - depth
    order = np.lexsort((leaf, level) if kind is None else (kind, leaf, level))
    row = np.empty(len(order), dtype=np.int64)
    row[order] = np.arange(len(order))
    counts = np.bincount(level, minlength=deepest + 1)
    leaves = np.bincount(level[leaf], minlength=deepest + 1)
    starts = np.cumsum(counts) - counts

    child, parent = links[:, np.argsort(row[links[1]], kind="stable")]
    child_level = level[child]
    children = tensor(row[child] - starts[child_level])
    parents = tensor(row[parent] - starts[child_level + 1])
    in_level = np.bincount(child_level + 1, minlength=deepest + 1).tolist()
    levels = [
        Level(int(count - words), int(words), below, above)
        for count, words, below, above in zip(
            counts, leaves, children.split(in_level), parents.split(in_level), strict=True
        )
    ]
    tree_of = np.repeat(np.arange(len(trees)), sizes)
    is_leaf = leaf[order]
    return Forest(
        levels,
        order,
        order[is_leaf],
        order[~is_leaf],
        tensor(tree_of[order]),
        len(trees),
    )


# ---------------------------------------------------------------- sequences


@dataclass(frozen=True)
class Packed:
    """Sequences sorted by length and laid out step by step, as in PackedSequence."""

    order: Ids  # [all steps]: for each row, the index in the concatenated sequences
    batch_sizes: list[int]  # [longest length]: number of sequences that have this step
    sequence: Ids  # [all steps]: for each row, the number of its sequence
    rank: Ids  # [sequences]: index of each sequence when sorted by length, longest first
    ends: Ids  # [sequences], sorted by length: the row of each sequence's last step


def pack(lengths: Ids) -> Packed:
    """Returns the layout for sequences of these lengths."""
    rank = np.empty(len(lengths), dtype=np.int64)
    rank[np.argsort(-lengths, kind="stable")] = np.arange(len(lengths))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    step = positions(lengths)
    order = np.lexsort((rank[sequence], step))
    sizes = np.bincount(step)
    starts = np.cumsum(sizes) - sizes
    ends = starts[-np.sort(-lengths) - 1] + np.arange(len(lengths))
    return Packed(order, sizes.tolist(), sequence[order], rank, ends)


def run_lstm(
    cell: nn.LSTMCell, inputs: Tensor, batch_sizes: list[int], reverse: bool = False
) -> Tensor:
    """Returns the hidden states [all steps, H] of packed sequences, in the layout of the inputs.

    Computes the same as nn.LSTM for a PackedSequence, with the parameters of an LSTMCell. On one
    thread it is faster than nn.LSTM. (At each step, the backward of nn.LSTM fills a tensor that is
    as large as all steps.)
    """
    hidden = cell.weight_hh.shape[1]
    gates = F.linear(inputs, cell.weight_ih, cell.bias_ih + cell.bias_hh).split(batch_sizes)
    recurrent = cell.weight_hh.t()
    h = c = inputs.new_zeros(0, hidden)
    states: list[Tensor] = []
    for of_step in reversed(gates) if reverse else gates:
        size, before = len(of_step), len(h)
        if before > size:
            h, c = h[:size], c[:size]
        elif 0 < before < size:  # in the reverse direction, shorter sequences begin later
            h, c = (F.pad(x, (0, 0, 0, size - before)) for x in (h, c))
        if before:
            of_step = torch.addmm(of_step, h, recurrent)
        both, g, o = of_step.split([2 * hidden, hidden, hidden], dim=-1)
        i, f = both.sigmoid().chunk(2, dim=-1)
        written = i * g.tanh()
        c = torch.addcmul(written, f, c) if before else written
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return torch.cat(states[::-1] if reverse else states)


def sum_by(owner: Tensor, values: Tensor, size: int) -> Tensor:
    """Returns the sum of the values of each owner, of shape [size]."""
    return values.new_zeros(size).index_add(0, owner, values)
