"""Bag of words: predicts a sentence's class from the sum of its words' embeddings.

Neubig, Goldberg and Dyer 2017, section 5.1, use it as the case with the least computation. Word by
word, each addition is an op. With a sentence at a time, the sum is one op.
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


@dataclass(frozen=True, slots=True)
class Text:
    """A sentence, as a tensor for each word and as one tensor of all words."""

    words: list[Tensor]
    sentence: Tensor
    target: Tensor
    word_ids: Ids
    target_id: int


class WordByWord(nn.Module):
    """Adds an embedding for each word."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.classifier = nn.Linear(hidden, CLASSES)

    def total(self, text: Text) -> Tensor:
        """Returns the sum of the words' embeddings, [1, H]."""
        first, *rest = text.words
        total: Tensor = self.embedding(first)
        for word in rest:
            total = total + self.embedding(word)
        return total

    def forward(self, text: Text) -> Tensor:
        """Returns the loss of one sentence."""
        return F.cross_entropy(self.classifier(self.total(text)), text.target)


class SentenceAtOnce(WordByWord):
    """Computes the same with a single lookup for the sentence."""

    def total(self, text: Text) -> Tensor:
        embedded: Tensor = self.embedding(text.sentence)
        return embedded.sum(0, keepdim=True)


@dataclass(frozen=True)
class Plan:
    words: Tensor
    starts: Tensor
    targets: Tensor


class BagOfWords(Workload):
    name = "bag-of-words"
    title = "bag of words, a word at a time"
    sizes = (256,)
    targets: ClassVar[Mapping[int, float]] = {256: 0.3}
    network = WordByWord

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.model = self.network(hidden)
        words, classes = id_tensors(VOCABULARY), id_tensors(CLASSES)
        self.examples = []
        for _ in range(POOL):
            ids = word_ids(draw, length(draw, 19.1, 9.3, 2, 52))
            target = draw.randrange(CLASSES)
            self.examples.append(
                Text(
                    [words[i] for i in ids],
                    torch.tensor(ids),
                    classes[target],
                    np.array(ids),
                    target,
                )
            )

    def collate(self, minibatch: Sequence[Text]) -> Plan:
        sizes = np.array([len(text.word_ids) for text in minibatch])
        return Plan(
            collate.tensor(np.concatenate([text.word_ids for text in minibatch])),
            collate.tensor(np.cumsum(sizes) - sizes),
            collate.tensor([text.target_id for text in minibatch]),
        )

    def hand(self, plan: Plan) -> Tensor:
        model = self.model
        totals = F.embedding_bag(plan.words, model.embedding.weight, plan.starts, mode="sum")
        return F.cross_entropy(model.classifier(totals), plan.targets, reduction="none")


class BagOfSentences(BagOfWords):
    name = "bag-of-sentences"
    title = "bag of words, a sentence at a time"
    targets: ClassVar[Mapping[int, float]] = {}
    network = SentenceAtOnce
