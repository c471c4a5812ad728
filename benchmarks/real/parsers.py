"""supar: a biaffine parser and its distributions over trees, compared with the package's masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from supar.models import BiaffineDependencyModel
from supar.structs import ConstituencyCRF, DependencyCRF, MatrixTree
from torch import Tensor, nn

from benchmarks.real.case import EXAMPLES, Case, lengths, model, padded

WORDS, TAGS, HIDDEN, RELATIONS = 60, 8, 24, 5


def sentence(words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns words after a root symbol, the head of each word, and the relation to its head."""
    heads = torch.arange(words + 1).flip(0) % (words + 1)
    return torch.randint(2, WORDS, (words + 1,)), heads, torch.randint(RELATIONS, (words + 1,))


def make() -> BiaffineDependencyModel:
    return BiaffineDependencyModel(
        WORDS, RELATIONS, TAGS, feat=["tag"], n_feat_embed=8, n_embed=HIDDEN, n_pretrained=HIDDEN,
        n_lstm_hidden=16, n_lstm_layers=1, n_arc_mlp=16, n_rel_mlp=8, embed_dropout=0.0,
        encoder_dropout=0.0, mlp_dropout=0.0,
    )  # fmt: skip


def mask_of(words: Tensor) -> Tensor:
    mask = words.ne(0)
    mask[:, 0] = False  # the root has no head
    return mask


@model("biaffine parser")
def biaffine() -> Case:
    network = make()

    def one(example: Any) -> Tensor:
        words, heads, relations = (part[None] for part in example)
        return network.loss(*network(words, [words % TAGS]), heads, relations, mask_of(words))

    def own(minibatch: Sequence[Any]) -> Tensor:
        words, heads, relations = (padded(part)[0] for part in zip(*minibatch, strict=True))
        arc_scores, scores = network(words, [words % TAGS])
        scores = scores.gather(2, heads[:, :, None, None].expand(-1, -1, 1, RELATIONS)).squeeze(2)
        mask = mask_of(words)
        losses = F.cross_entropy(arc_scores.transpose(1, 2), heads, reduction="none")
        losses = losses + F.cross_entropy(scores.transpose(1, 2), relations, reduction="none")
        return (losses * mask).sum(1) / mask.sum(1)

    return Case(network, [sentence(n) for n in lengths(3, 12)], one, own)


def trees(score: Callable[[Tensor, Tensor], Tensor], shortest: int, longest: int) -> Case:
    """Makes a case. ``score`` is called with the scores of pairs and the lengths."""
    network = nn.Bilinear(HIDDEN, HIDDEN, 1)

    def pairs(h: Tensor) -> Tensor:
        size = h.size(1)
        left = h[:, :, None].expand(-1, -1, size, -1).contiguous()
        right = h[:, None].expand(-1, size, -1, -1).contiguous()
        return network(left, right).squeeze(-1)

    def one(h: Tensor) -> Tensor:
        return score(pairs(h[None]), torch.tensor([len(h) - 1]))[0]

    def own(minibatch: Sequence[Any]) -> Tensor:
        h, mask = padded(minibatch)
        return score(pairs(h), mask.sum(1) - 1)

    sizes = lengths(shortest + 1, longest + 1, EXAMPLES // 2)
    return Case(network, [torch.randn(n, HIDDEN) for n in sizes], one, own)


@model("projective trees, partition")
def projective() -> Case:
    return trees(lambda s, n: DependencyCRF(s, n).log_partition, 3, 8)


@model("projective trees, marginals")
def marginals() -> Case:
    def score(scores: Tensor, sizes: Tensor) -> Tensor:
        found = DependencyCRF(scores, sizes).marginals
        return (found * found).sum((1, 2))

    made = trees(score, 3, 8)
    made.infers = False
    return made


@model("non-projective trees, partition")
def nonprojective() -> Case:
    return trees(lambda s, n: MatrixTree(s, n).log_partition, 3, 12)


@model("constituent trees, partition")
def constituents() -> Case:
    def score(scores: Tensor, sizes: Tensor) -> Tensor:
        size = scores.size(1)
        steps = torch.arange(size)
        mask = (steps[:, None] < steps) & (steps <= sizes[:, None, None])
        return ConstituencyCRF(scores, mask[:, 0].sum(-1)).log_partition

    return trees(score, 3, 8)
