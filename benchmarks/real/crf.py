"""pytorch-crf: the last layer of a BiLSTM tagger, compared with the package's mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchcrf import CRF

from benchmarks.real.case import Case, lengths, model, padded

WORDS, HIDDEN, TAGS = 50, 32, 6


class Tagger(nn.Module):
    """An embedding, an LSTM, emissions, and the package's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN // 2, bidirectional=True, batch_first=True)
        self.emit = nn.Linear(HIDDEN, TAGS)
        self.crf = CRF(TAGS, batch_first=True)

    def emissions(self, words: Tensor) -> Tensor:
        return self.emit(self.lstm(self.embedding(words))[0])

    def padded_emissions(self, words: Tensor, mask: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(words), mask.sum(1), batch_first=True, enforce_sorted=False
        )
        states, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.emit(states)


def examples() -> list[tuple[Tensor, Tensor]]:
    made = [torch.randint(WORDS, (n,)) for n in lengths(3, 18)]
    return [(words, words % TAGS) for words in made]


@model("BiLSTM-CRF")
def tagger() -> Case:
    network = Tagger()

    def one(example: Any) -> Tensor:
        words, tags = example
        return -network.crf(network.emissions(words[None]), tags[None])

    def own(minibatch: Sequence[Any]) -> Tensor:
        words, mask = padded([words for words, _ in minibatch])
        tags, _ = padded([tags for _, tags in minibatch])
        emissions = network.padded_emissions(words, mask)
        return -network.crf(emissions, tags, mask=mask, reduction="none")

    return Case(network, examples(), one, own)


@model("BiLSTM-CRF, Viterbi")
def viterbi() -> Case:
    network = Tagger()

    def total(path: list[int]) -> Tensor:
        return torch.tensor(sum(i * tag for i, tag in enumerate(path, 1)))

    def one(example: Any) -> Tensor:
        (path,) = network.crf.decode(network.emissions(example[0][None]))
        return total(path)

    def own(minibatch: Sequence[Any]) -> Tensor:
        words, mask = padded([words for words, _ in minibatch])
        paths = network.crf.decode(network.padded_emissions(words, mask), mask=mask)
        return torch.stack([total(path) for path in paths])

    return Case(network, examples(), one, own, trains=False)
