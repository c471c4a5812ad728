"""egnn-pytorch: equivariant networks on molecules of different sizes, compared with masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from egnn_pytorch import EGNN_Network
from torch import Tensor

from benchmarks.real.case import Case, lengths, model, padded

KINDS, HIDDEN = 10, 16


def case(**options: Any) -> Case:
    network = EGNN_Network(num_tokens=KINDS, dim=HIDDEN, depth=2, **options)

    def score(atoms: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        features, moved = network(atoms, places, mask=mask)
        found = features.mean(-1) + (moved - places).square().sum(-1)
        return (found * mask).sum(-1) / mask.sum(-1)

    def one(molecule: Any) -> Tensor:
        atoms, places = molecule
        return score(atoms[None], places[None], torch.ones_like(atoms[None], dtype=torch.bool))[0]

    def own(minibatch: Sequence[Any]) -> Tensor:
        atoms, mask = padded([atoms for atoms, _ in minibatch])
        return score(atoms, padded([places for _, places in minibatch])[0], mask)

    examples = [(torch.randint(KINDS, (n,)), torch.randn(n, 3)) for n in lengths(6, 15)]
    return Case(network, examples, one, own, cells=[network])


@model("EGNN, all pairs")
def pairs() -> Case:
    return case()


@model("EGNN, nearest neighbours")
def neighbours() -> Case:
    made = case(num_nearest_neighbors=4)
    made.own = None  # in its batches, padding counts as neighbours
    return made
