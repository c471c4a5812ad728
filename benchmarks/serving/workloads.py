"""Workloads: code for one request, hand-padded code for several, and random requests.

Lengths are distributed as in WMT's news tests: log-normal, mean 24, at most 330.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WORDS = 2000


@dataclasses.dataclass(frozen=True)
class Workload:
    """`one` serves a request. `padded`, if it exists, serves several padded requests."""

    name: str
    one: Callable[[Any], Any]
    request: Callable[[random.Random], Any]
    size: Callable[[Any], int]  # length that determines a request's bucket
    padded: Callable[[Sequence[Any]], list[Any]] | None = None


def length(rng: random.Random) -> int:
    sigma = 0.7
    return max(1, min(330, round(rng.lognormvariate(math.log(24) - sigma**2 / 2, sigma))))


def sentence(rng: random.Random) -> Tensor:
    return torch.tensor([rng.randrange(WORDS) for _ in range(length(rng))])


def pad(sentences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the padded words, [requests, longest], and the lengths, [requests]."""
    lengths = torch.tensor([len(s) for s in sentences])
    return nn.utils.rnn.pad_sequence(list(sentences), batch_first=True), lengths


class Encoder(nn.Module):
    """Classifies a sentence with an LSTM, step by step."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, hidden)
        self.lstm = nn.LSTMCell(hidden, hidden)
        self.out = nn.Linear(hidden, 5)

    def states(self, sentence: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(sentence)
        h = c = x.new_zeros(1, x.shape[1])
        for word in x.split(1):
            h, c = self.lstm(word, (h, c))
        return h, c

    def forward(self, sentence: Tensor) -> Tensor:
        return self.out(self.states(sentence)[0])[0]

    def padded_states(self, sentences: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns h and c at the last word of each request, both [requests, hidden]."""
        tokens, lengths = pad(sentences)
        x = self.words(tokens)
        h = c = x.new_zeros(len(sentences), x.shape[2])
        for step in range(x.shape[1]):
            h_new, c_new = self.lstm(x[:, step], (h, c))
            runs = (step < lengths)[:, None]
            h, c = torch.where(runs, h_new, h), torch.where(runs, c_new, c)
        return h, c

    def padded(self, sentences: Sequence[Tensor]) -> list[Tensor]:
        return list(self.out(self.padded_states(sentences)[0]))


def lstm(hidden: int) -> Workload:
    model = Encoder(hidden).eval()
    return Workload("lstm", model, sentence, len, model.padded)


class Translator(nn.Module):
    """An encoder, and a decoder whose input is its previous word. As in Gao et al., the output has
    as many words as the source, because weights are random."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.encoder = Encoder(hidden)
        self.lstm = nn.LSTMCell(hidden, hidden)
        self.out = nn.Linear(hidden, WORDS)

    def forward(self, sentence: Tensor) -> list[Tensor]:
        h, c = self.encoder.states(sentence)
        word, chosen = sentence[-1:], []
        for _ in range(len(sentence)):
            h, c = self.lstm(self.encoder.words(word), (h, c))
            word = self.out(h).argmax(1)
            chosen.append(word)
        return chosen

    def padded(self, sentences: Sequence[Tensor]) -> list[Tensor]:
        h, c = self.encoder.padded_states(sentences)
        word, chosen = torch.stack([s[-1] for s in sentences]), []
        for _ in range(max(map(len, sentences))):
            h, c = self.lstm(self.encoder.words(word), (h, c))
            word = self.out(h).argmax(1)
            chosen.append(word)
        every = torch.stack(chosen, 1)
        return [row[: len(s)] for row, s in zip(every, sentences, strict=True)]


def translate(hidden: int) -> Workload:
    model = Translator(hidden).eval()
    return Workload("translate", model, sentence, len, model.padded)


class TreeLstm(nn.Module):
    """A binary Tree-LSTM. Padding is not possible, because trees have different structures."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, hidden)
        self.leaf = nn.Linear(hidden, 3 * hidden)
        self.inner = nn.Linear(2 * hidden, 5 * hidden)
        self.out = nn.Linear(hidden, 5)

    def node(self, tree: Any) -> tuple[Tensor, Tensor]:
        if isinstance(tree, int):
            i, o, u = self.leaf(self.words(torch.tensor(tree))).chunk(3)
            c = i.sigmoid() * u.tanh()
            return o.sigmoid() * c.tanh(), c
        (hl, cl), (hr, cr) = self.node(tree[0]), self.node(tree[1])
        i, o, u, fl, fr = self.inner(torch.cat([hl, hr])).chunk(5)
        c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        return o.sigmoid() * c.tanh(), c

    def forward(self, tree: Any) -> Tensor:
        return self.out(self.node(tree)[0])


def parse_tree(rng: random.Random, leaves: int) -> Any:
    if leaves == 1:
        return rng.randrange(WORDS)
    left = rng.randint(1, leaves - 1)
    return (parse_tree(rng, left), parse_tree(rng, leaves - left))


def num_leaves(tree: Any) -> int:
    return 1 if isinstance(tree, int) else num_leaves(tree[0]) + num_leaves(tree[1])


def tree_lstm(hidden: int) -> Workload:
    """Makes random trees with the lengths of treebank sentences: mean 19, at most 60."""
    model = TreeLstm(hidden).eval()

    def request(rng: random.Random) -> Any:
        return parse_tree(rng, max(2, min(60, round(rng.gauss(19, 9)))))

    return Workload("tree_lstm", model, request, num_leaves)


class Generator(nn.Module):
    """Greedy generation of any length. Each step reads the next word."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.out = nn.Linear(hidden, WORDS)

    def forward(self, request: tuple[int, int]) -> list[int]:
        word, most = request
        h, chosen = self.words.weight.new_zeros(1, self.cell.hidden_size), []
        for _ in range(most):
            h = self.cell(self.words(torch.tensor([word])), h)
            word = int(self.out(h).argmax())
            chosen.append(word)
        return chosen

    def padded(self, requests: Sequence[tuple[int, int]]) -> list[list[int]]:
        word = torch.tensor([first for first, _ in requests])
        h, chosen = self.words.weight.new_zeros(len(requests), self.cell.hidden_size), []
        for _ in range(max(most for _, most in requests)):
            h = self.cell(self.words(word), h)
            word = self.out(h).argmax(1)
            chosen.append(word)
        every = torch.stack(chosen, 1).tolist()
        return [row[:most] for row, (_, most) in zip(every, requests, strict=True)]


def generate(hidden: int) -> Workload:
    model = Generator(hidden).eval()

    def request(rng: random.Random) -> tuple[int, int]:
        return rng.randrange(WORDS), length(rng)

    return Workload("generate", model, request, lambda r: r[1], model.padded)


WORKLOADS: dict[str, Callable[[int], Workload]] = {
    "lstm": lstm,
    "translate": translate,
    "tree_lstm": tree_lstm,
    "generate": generate,
}
