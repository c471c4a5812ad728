"""Tree-LSTMs (Tai, Socher and Manning 2015, arXiv:1503.00075): binary, and child-sum on pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.data import (
    VOCABULARY,
    Ids,
    Tree,
    dependency_children,
    id_tensors,
    length,
    make_tree,
    sentiment_trees,
    word_ids,
)
from benchmarks.workload import POOL, Sources, Workload, seed_everything

# isort: split
from binary_tree_lstm import BinaryTreeLSTM  # benchmarks.data put examples/ on the path
from child_sum_tree_lstm import ChildSumTreeLSTM


def _leaf_states(gates: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the states [n, H] of nodes without children, from the gates i, o and u, [n, 3H]."""
    i, o, u = gates.chunk(3, dim=-1)
    c = i.sigmoid() * u.tanh()
    return o.sigmoid() * c.tanh(), c


# ---------------------------------------------------------------- binary, a loss at each node


@dataclass(frozen=True)
class BinaryPlan:
    forest: collate.Forest
    words: Tensor  # [leaves]
    targets: Tensor  # [nodes]


class BinaryTrees(Workload):
    name = "binary-tree-lstm"
    title = "binary Tree-LSTM"
    sizes = (128, 256)
    targets: ClassVar[Mapping[int, float]] = {128: 0.45, 256: 0.6}

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.examples, vocabulary, classes = sentiment_trees(sources.treebank, POOL, draw)
        self.model = BinaryTreeLSTM(vocabulary, classes, embedding=hidden, hidden=hidden)

    def collate(self, minibatch: Sequence[Tree]) -> BinaryPlan:
        forest = collate.forest(minibatch)
        symbols = np.concatenate([tree.symbol_ids for tree in minibatch])
        targets = np.concatenate([tree.target_ids for tree in minibatch])
        return BinaryPlan(
            forest,
            collate.tensor(symbols[forest.leaf_order]),
            collate.tensor(targets[forest.order]),
        )

    def hand(self, plan: BinaryPlan) -> Tensor:
        model, forest = self.model, plan.forest
        leaves = [level.leaves for level in forest.levels]
        leaf_h, leaf_c = _leaf_states(model.w(model.embedding(plan.words)))
        h = c = leaf_h.new_empty(0, leaf_h.shape[1])
        states: list[Tensor] = []
        for level, h_words, c_words in zip(
            forest.levels, leaf_h.split(leaves), leaf_c.split(leaves), strict=True
        ):
            if level.inner:
                hidden = h.shape[1]
                # The two children of a node are adjacent rows, so a view as [n, 2H] concatenates
                # them.
                h_pairs = h.index_select(0, level.children).view(level.inner, 2 * hidden)
                c_pairs = c.index_select(0, level.children).view(level.inner, 2, hidden)
                i, o, u, f = model.u(h_pairs).split([hidden, hidden, hidden, 2 * hidden], dim=-1)
                c = i.sigmoid() * u.tanh() + (f.sigmoid().view_as(c_pairs) * c_pairs).sum(1)
                h = o.sigmoid() * c.tanh()
                if level.leaves:
                    h, c = torch.cat([h, h_words]), torch.cat([c, c_words])
            else:
                h, c = h_words, c_words
            states.append(h)
        scores = model.classifier(torch.cat(states))
        losses = F.cross_entropy(scores, plan.targets, reduction="none")
        return collate.sum_by(forest.trees, losses, forest.size)


# ---------------------------------------------------------------- child-sum, on sentence pairs

EMBEDDING = 300
SIMILARITY = 50
SCORES = 5


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sentences and their similarity, a distribution over the scores, [1, SCORES]."""

    left: Tree
    right: Tree
    target: Tensor


class PairSimilarity(nn.Module):
    """Predicts the similarity of two sentences from the states of their roots (section 4.2)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        # The encoder's classifier is not used. It has one score, and gets no gradient.
        self.encoder = ChildSumTreeLSTM(VOCABULARY, 1, EMBEDDING, hidden)
        del self.encoder.classifier
        self.angle = nn.Linear(hidden, SIMILARITY, bias=False)
        self.distance = nn.Linear(hidden, SIMILARITY)
        self.out = nn.Linear(SIMILARITY, SCORES)

    def root(self, tree: Tree) -> Tensor:
        """Returns the hidden state [1, H] of a tree's root."""
        states: list[tuple[Tensor, Tensor]] = []
        for symbol, children in zip(tree.symbols, tree.children, strict=True):
            states.append(self.encoder.node(symbol, [states[child] for child in children]))
        return states[-1][0]

    def log_probabilities(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns the log-probability of each score, from the states of the two roots."""
        similar = self.angle(left * right) + self.distance((left - right).abs())
        return self.out(similar.sigmoid()).log_softmax(-1)

    def forward(self, pair: Pair) -> Tensor:
        """Returns the loss of one pair."""
        scores = self.log_probabilities(self.root(pair.left), self.root(pair.right))
        return F.kl_div(scores, pair.target, reduction="sum")


@dataclass(frozen=True)
class PairPlan:
    forest: collate.Forest
    leaves: Tensor  # word ids
    inner: Tensor
    roots: Tensor  # for each tree: its row among the roots
    targets: Tensor


class SentencePairs(Workload):
    name = "child-sum-pairs"
    title = "child-sum Tree-LSTM, sentence pairs"
    sizes = (150,)
    targets: ClassVar[Mapping[int, float]] = {150: 0.45}

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.model = PairSimilarity(hidden)
        symbols = id_tensors(VOCABULARY)

        def tree() -> Tree:
            words: Ids | list[int] = word_ids(draw, length(draw, 9.7, 3.8, 3, 36))
            return make_tree([symbols[i] for i in words], dependency_children(draw, len(words)), [])

        self.examples = []
        for _ in range(POOL):
            target = torch.zeros(1, SCORES)
            score = draw.uniform(0, SCORES - 1.001)
            target[0, int(score)] = 1 - score % 1
            target[0, int(score) + 1] = score % 1
            self.examples.append(Pair(tree(), tree(), target))

    def collate(self, minibatch: Sequence[Pair]) -> PairPlan:
        trees = [pair.left for pair in minibatch] + [pair.right for pair in minibatch]
        forest = collate.forest(trees)
        symbols = np.concatenate([tree.symbol_ids for tree in trees])
        last = forest.trees[-len(trees) :].numpy()
        return PairPlan(
            forest,
            collate.tensor(symbols[forest.leaf_order]),
            collate.tensor(symbols[forest.inner_order]),
            collate.tensor(np.argsort(last)),
            torch.cat([pair.target for pair in minibatch]),
        )

    def hand(self, plan: PairPlan) -> Tensor:
        roots = self.roots(plan).index_select(0, plan.roots)
        scores = self.model.log_probabilities(*roots.chunk(2))
        return F.kl_div(scores, plan.targets, reduction="none").sum(-1)

    def roots(self, plan: PairPlan) -> Tensor:
        """Returns the hidden states of all roots, in the order of the last level."""
        model, levels = self.model.encoder, plan.forest.levels
        leaves = [level.leaves for level in levels]
        inner = [level.inner for level in levels]
        leaf_h, leaf_c = _leaf_states(model.w_iou(model.embedding(plan.leaves)))
        inner_x = model.embedding(plan.inner)
        h = c = leaf_h.new_empty(0, leaf_h.shape[1])
        for level, h_leaves, c_leaves, x_iou, x_f in zip(
            levels,
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
                if level.leaves:
                    h, c = torch.cat([h, h_leaves]), torch.cat([c, c_leaves])
            else:
                h, c = h_leaves, c_leaves
        return h
