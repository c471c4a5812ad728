"""Matrix-vector recursion (MV-RNN): Socher et al. 2012. A word is a vector and a matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.data import Tree, sentiment_trees
from benchmarks.workload import POOL, Sources, Workload, seed_everything


class MatrixVectorRNN(nn.Module):
    """Classifies every node of a binary tree. N is the size of a word's vector."""

    def __init__(self, vocabulary: int, classes: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.vector = nn.Embedding(vocabulary, size)
        self.matrix = nn.Embedding(vocabulary, size * size)
        with torch.no_grad():  # the identity and a little noise, as in the paper
            self.matrix.weight.mul_(0.01).add_(torch.eye(size).flatten())
        self.w = nn.Parameter(torch.randn(size, 2 * size) / (2 * size) ** 0.5)
        self.w_matrix = nn.Parameter(torch.randn(size, 2 * size) / (2 * size) ** 0.5)
        self.classifier = nn.Linear(size, classes)

    def leaf(self, word: Tensor) -> tuple[Tensor, Tensor]:
        """Returns a word's vector [N, 1] and matrix [N, N]."""
        return (
            self.vector(word).view(self.size, 1),
            self.matrix(word).view(self.size, self.size),
        )

    def node(
        self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns the vector and the matrix of a phrase."""
        (a, A), (b, B) = left, right
        p = (self.w @ torch.cat([B @ a, A @ b])).tanh()
        return p, self.w_matrix @ torch.cat([A, B])

    def node_loss(self, p: Tensor, target: Tensor) -> Tensor:
        """Returns the loss at a node with vector ``p``, of shape []."""
        return F.cross_entropy(self.classifier(p.t()), target)

    def forward(self, tree: Tree) -> Tensor:
        """Returns the sum of the losses at the nodes of one tree."""
        states: list[tuple[Tensor, Tensor]] = []
        losses = []
        for word, children, target in zip(tree.symbols, tree.children, tree.targets, strict=True):
            if children:
                left, right = children
                states.append(self.node(states[left], states[right]))
            else:
                states.append(self.leaf(word))
            losses.append(self.node_loss(states[-1][0], target))
        return torch.stack(losses).sum()


@dataclass(frozen=True)
class Plan:
    forest: collate.Forest
    words: Tensor
    targets: Tensor


class MatrixVector(Workload):
    name = "mv-rnn"
    title = "MV-RNN"
    sizes = (32,)
    targets: ClassVar[Mapping[int, float]] = {32: 0.9}

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.examples, vocabulary, classes = sentiment_trees(sources.treebank, POOL, draw)
        self.model = MatrixVectorRNN(vocabulary, classes, hidden)

    def collate(self, minibatch: Sequence[Tree]) -> Plan:
        forest = collate.forest(minibatch)
        symbols = np.concatenate([tree.symbol_ids for tree in minibatch])
        targets = np.concatenate([tree.target_ids for tree in minibatch])
        return Plan(
            forest,
            collate.tensor(symbols[forest.leaf_order]),
            collate.tensor(targets[forest.order]),
        )

    def hand(self, plan: Plan) -> Tensor:
        # Vectors are rows and matrices are transposed, so that W [A; B] of a level is one product.
        model, n = self.model, self.model.size
        leaves = [level.leaves for level in plan.forest.levels]
        words = model.vector(plan.words)
        matrices = model.matrix(plan.words).view(-1, n, n).transpose(1, 2)
        v, M = words[:0], matrices[:0]
        vectors = []
        for level, v_words, M_words in zip(
            plan.forest.levels, words.split(leaves), matrices.split(leaves), strict=True
        ):
            if level.inner:
                v = v.index_select(0, level.children).view(-1, 2, 1, n)
                M = M.index_select(0, level.children).view(-1, 2, n, n)
                # Each child's vector times the other's matrix: [B a; A b].
                products = torch.matmul(v.flip(1), M).flip(1).reshape(-1, 2 * n)
                v = F.linear(products, model.w).tanh()
                # [n, N, 2N]: the matrices of the two children side by side
                M = F.linear(M.transpose(1, 2).reshape(-1, n, 2 * n), model.w_matrix)
                if level.leaves:
                    v, M = torch.cat([v, v_words]), torch.cat([M, M_words])
            else:
                v, M = v_words, M_words
            vectors.append(v)
        scores = model.classifier(torch.cat(vectors))
        losses = F.cross_entropy(scores, plan.targets, reduction="none")
        return collate.sum_by(plan.forest.trees, losses, plan.forest.size)
