"""Mixture of experts with hard routing: each word determines the one expert that processes it.

The layer is from Suarez and Zhu 2018, here in a network for sentences. Routing by word is from
Roller et al. 2021 (arXiv:2106.04426). So the expert is known without reading a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.data import CLASSES, VOCABULARY, Ids, id_tensors, length, word_ids
from benchmarks.workload import POOL, Sources, Workload, seed_everything

EXPERTS = 64


@dataclass(frozen=True, slots=True)
class Routed:
    """A sentence, and the expert of each word."""

    words: list[Tensor]
    experts: list[int]
    target: Tensor
    word_ids: Ids
    expert_ids: Ids
    target_id: int


class MixtureOfExperts(nn.Module):
    """Classifies a sentence from the sum of the experts' outputs for its words."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.experts = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(EXPERTS))
        self.classifier = nn.Linear(hidden, CLASSES)

    def route(self, word: Tensor, expert: int) -> Tensor:
        """Returns the output of a word's expert, [1, H]."""
        x: Tensor = self.embedding(word)
        return x + self.experts[expert](x).relu()

    def forward(self, sentence: Routed) -> Tensor:
        """Returns the loss of one sentence."""
        outputs = list(map(self.route, sentence.words, sentence.experts))
        return F.cross_entropy(self.classifier(torch.cat(outputs).mean(0, True)), sentence.target)


@dataclass(frozen=True)
class Plan:
    words: Tensor  # [words], sorted by expert
    sentences: Tensor  # [words]
    used: list[int]  # experts that have words, in order
    counts: list[int]  # number of words of each of these experts
    lengths: Tensor  # [sentences, 1]
    targets: Tensor


class Experts(Workload):
    name = "mixture-of-experts"
    title = "mixture of 64 experts"
    sizes = (256,)
    targets: ClassVar[Mapping[int, float]] = {256: 0.8}

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.model = MixtureOfExperts(hidden)
        words, classes = id_tensors(VOCABULARY), id_tensors(CLASSES)
        route = [draw.randrange(EXPERTS) for _ in range(VOCABULARY)]
        self.examples = []
        for _ in range(POOL):
            ids = word_ids(draw, length(draw, 19.1, 9.3, 2, 52))
            experts = [route[i] for i in ids]
            target = draw.randrange(CLASSES)
            self.examples.append(
                Routed(
                    [words[i] for i in ids],
                    experts,
                    classes[target],
                    np.array(ids),
                    np.array(experts),
                    target,
                )
            )

    def collate(self, minibatch: Sequence[Routed]) -> Plan:
        lengths = np.array([len(text.words) for text in minibatch])
        experts = np.concatenate([text.expert_ids for text in minibatch])
        order = np.argsort(experts, kind="stable")
        counts = np.bincount(experts, minlength=EXPERTS)
        used = np.flatnonzero(counts)
        return Plan(
            collate.tensor(np.concatenate([text.word_ids for text in minibatch])[order]),
            collate.tensor(np.repeat(np.arange(len(minibatch)), lengths)[order]),
            used.tolist(),
            counts[used].tolist(),
            collate.tensor(lengths).unsqueeze(1),
            collate.tensor([text.target_id for text in minibatch]),
        )

    def hand(self, plan: Plan) -> Tensor:
        model = self.model
        x = model.embedding(plan.words)
        outputs = [
            model.experts[e](rows) for e, rows in zip(plan.used, x.split(plan.counts), strict=True)
        ]
        x = x + torch.cat(outputs).relu()
        sums = x.new_zeros(len(plan.targets), x.shape[1]).index_add(0, plan.sentences, x)
        return F.cross_entropy(
            model.classifier(sums / plan.lengths), plan.targets, reduction="none"
        )
