"""Lattice LSTM: Zhang and Yang 2018 (arXiv:1805.02023). An LSTM over characters. A word that is in
a lexicon is a separate path from its first to its last character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.data import VOCABULARY, Ids, id_tensors, length, word_ids
from benchmarks.workload import POOL, Sources, Workload, seed_everything

CHARACTERS = 2000
TAGS = 9
EMBEDDING = 64
LONGEST = 4  # maximum characters of a word; the minimum is two


@dataclass(frozen=True, slots=True)
class Lattice:
    """A sentence: characters, tags, and the words that end at each character."""

    characters: list[Tensor]
    tags: list[Tensor]
    words: list[list[tuple[int, Tensor]]]  # words that end at a character: start, id
    character_ids: Ids
    tag_ids: Ids
    arcs: Ids  # [3, words]: start, end, id, sorted by end


class LatticeTagger(nn.Module):
    """Equations 10 to 15: a character's memory cell is a mean of its cell and words' cells."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.characters = nn.Embedding(CHARACTERS, EMBEDDING)
        self.words = nn.Embedding(VOCABULARY, EMBEDDING)
        self.input = nn.Linear(EMBEDDING, 3 * hidden)
        self.recurrent = nn.Linear(hidden, 3 * hidden, bias=False)
        self.word_input = nn.Linear(EMBEDDING, 3 * hidden)
        self.word_recurrent = nn.Linear(hidden, 3 * hidden, bias=False)
        self.link_input = nn.Linear(EMBEDDING, hidden)
        self.link_cell = nn.Linear(hidden, hidden, bias=False)
        self.tagger = nn.Linear(hidden, TAGS)

    def word_cell(self, word: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the memory cell [1, H] of a word that starts at the character with this state."""
        h, c = state
        gates = self.word_input(self.words(word)) + self.word_recurrent(h)
        i, f, g = gates.chunk(3, dim=-1)
        return f.sigmoid() * c + i.sigmoid() * g.tanh()

    def forward(self, lattice: Lattice) -> Tensor:
        """Returns the sum of the losses at the characters of one sentence."""
        states: list[tuple[Tensor, Tensor]] = []
        losses = []
        zeros = torch.zeros(1, self.hidden)
        h, c = zeros, zeros
        for character, tag, words in zip(
            lattice.characters, lattice.tags, lattice.words, strict=True
        ):
            x = self.characters(character)
            i, o, g = (self.input(x) + self.recurrent(h)).chunk(3, dim=-1)
            i, g = i.sigmoid(), g.tanh()
            if words:
                cells = torch.cat([self.word_cell(word, states[start]) for start, word in words])
                links = (self.link_input(x) + self.link_cell(cells)).sigmoid()
                weights = torch.cat([i, links]).softmax(0)
                c = (weights * torch.cat([g, cells])).sum(0, keepdim=True)
            else:
                c = (1 - i) * c + i * g
            h = o.sigmoid() * c.tanh()
            states.append((h, c))
            losses.append(F.cross_entropy(self.tagger(h), tag))
        return torch.stack(losses).sum()


def lexicon_matches(draw: Random, characters: int) -> list[tuple[int, int]]:
    """Returns starts and ends of words: a word per two characters (in the data: 44, 23)."""
    return [
        (end - size + 1, end)
        for end in range(1, characters)
        for size in range(2, LONGEST + 1)
        if size <= end + 1 and draw.random() < (0, 0, 0.32, 0.15, 0.07)[size]
    ]


# ---------------------------------------------------------------- by hand


@dataclass(frozen=True)
class Step:
    """One character of each sentence that is long enough, first those where a word ends."""

    size: int
    words: int
    with_words: int  # number of characters at which a word ends
    sources: Tensor  # [words]: rows of the states of the last LONGEST - 1 steps, latest first
    owners: Tensor  # [words]: row of the character at which each word ends
    previous: Tensor  # [size]: rows of the previous step


@dataclass(frozen=True)
class Plan:
    characters: Tensor
    tags: Tensor
    words: Tensor
    steps: list[Step]
    sentences: Tensor
    size: int


class LatticeLSTM(Workload):
    name = "lattice-lstm"
    title = "lattice LSTM"
    sizes = (200,)

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.model = LatticeTagger(hidden)
        tensors = id_tensors(CHARACTERS), id_tensors(TAGS), id_tensors(VOCABULARY)
        self.examples = [self.lattice(draw, *tensors) for _ in range(POOL)]

    @staticmethod
    def lattice(
        draw: Random, characters: Sequence[Tensor], tags: Sequence[Tensor], words: Sequence[Tensor]
    ) -> Lattice:
        ids = word_ids(draw, length(draw, 44.0, 28.0, 3, 211), CHARACTERS)
        tag_ids = [draw.randrange(TAGS) for _ in ids]
        matches = lexicon_matches(draw, len(ids))
        found = word_ids(draw, len(matches))
        at: list[list[tuple[int, Tensor]]] = [[] for _ in ids]
        for (start, end), word in zip(matches, found, strict=True):
            at[end].append((start, words[word]))
        arcs = np.array([(s, e, w) for (s, e), w in zip(matches, found, strict=True)])
        return Lattice(
            [characters[i] for i in ids],
            [tags[t] for t in tag_ids],
            at,
            np.array(ids),
            np.array(tag_ids),
            arcs.reshape(-1, 3).astype(np.int64).T.copy(),
        )

    def collate(self, minibatch: Sequence[Lattice]) -> Plan:
        lengths = np.array([len(lattice.characters) for lattice in minibatch])
        offsets = np.cumsum(lengths) - lengths
        sentence = np.repeat(np.arange(len(minibatch)), lengths)
        time = collate.positions(lengths)
        arcs = [lattice.arcs for lattice in minibatch]
        start, end, word = np.concatenate(arcs, axis=1)
        owner = np.repeat(np.arange(len(minibatch)), [a.shape[1] for a in arcs])
        has_word = np.zeros(len(time), dtype=bool)
        has_word[offsets[owner] + end] = True

        order = np.lexsort((~has_word, time))
        sizes = np.bincount(time)
        starts = np.cumsum(sizes) - sizes
        row = np.empty(len(order), dtype=np.int64)  # row of a character within its step
        row[order] = np.arange(len(order)) - np.repeat(starts, sizes)
        # A word may start from the states of the last steps. The latest step is first.
        padded = np.concatenate([np.zeros(LONGEST, dtype=np.int64), sizes])
        before = np.zeros((LONGEST, len(sizes)), dtype=np.int64)  # [back, step]: earlier rows
        for back in range(2, LONGEST):
            before[back] = before[back - 1] + padded[LONGEST - back + 1 :][: len(sizes)]
        word_order = np.lexsort((row[offsets[owner] + end], end))
        start, end, owner = start[word_order], end[word_order], owner[word_order]
        from_row = before[end - start, end] + row[offsets[owner] + start]
        previous = np.where(time > 0, row[np.arange(len(time)) - (time > 0)], 0)[order]

        words_at = np.bincount(end, minlength=len(sizes))
        with_words = np.bincount(time[has_word], minlength=len(sizes))
        steps = [
            Step(*counts, *tensors)
            for counts, tensors in zip(
                zip(sizes.tolist(), words_at.tolist(), with_words.tolist(), strict=True),
                zip(
                    collate.tensor(from_row).split(words_at.tolist()),
                    collate.tensor(row[offsets[owner] + end]).split(words_at.tolist()),
                    collate.tensor(previous).split(sizes.tolist()),
                    strict=True,
                ),
                strict=True,
            )
        ]

        def joined(name: str) -> Ids:
            return np.concatenate([getattr(lattice, name) for lattice in minibatch])

        return Plan(
            collate.tensor(joined("character_ids")[order]),
            collate.tensor(joined("tag_ids")[order]),
            collate.tensor(word[word_order]),
            steps,
            collate.tensor(sentence[order]),
            len(minibatch),
        )

    def hand(self, plan: Plan) -> Tensor:
        model = self.model
        x = model.characters(plan.characters)
        sizes = [step.size for step in plan.steps]
        words = model.word_input(model.words(plan.words)).split([s.words for s in plan.steps])
        states: list[Tensor] = []  # for each step: h and c concatenated, [n, 2H]
        for step, gates, link, word in zip(
            plan.steps,
            model.input(x).split(sizes),
            model.link_input(x).split(sizes),
            words,
            strict=True,
        ):
            c_before: Tensor | None = None
            if states:
                h, c_before = states[-1].index_select(0, step.previous).chunk(2, dim=-1)
                gates = torch.addmm(gates, h, model.recurrent.weight.t())
            hidden = model.hidden
            i, o = gates[:, : 2 * hidden].sigmoid().chunk(2, dim=-1)
            g = gates[:, 2 * hidden :].tanh()
            c = i * g if c_before is None else c_before + i * (g - c_before)
            if step.words:
                k = step.with_words
                joined = self.join(step, word, link, states, i[:k], g[:k])
                c = torch.cat([joined, c[k:]]) if k < step.size else joined
            states.append(torch.cat([o * c.tanh(), c], dim=-1))
        scores = model.tagger(torch.cat(states)[:, : model.hidden])
        losses = F.cross_entropy(scores, plan.tags, reduction="none")
        return collate.sum_by(plan.sentences, losses, plan.size)

    def join(
        self, step: Step, word: Tensor, link: Tensor, states: list[Tensor], i: Tensor, g: Tensor
    ) -> Tensor:
        """Returns the cells of characters at which words end, by a softmax over all paths."""
        model, hidden = self.model, self.model.hidden
        recent = torch.cat(states[:-LONGEST:-1])
        h, c = recent.index_select(0, step.sources).chunk(2, dim=-1)
        gates = torch.addmm(word, h, model.word_recurrent.weight.t())
        w_i, w_f = gates[:, : 2 * hidden].sigmoid().chunk(2, dim=-1)
        cells = w_f * c + w_i * gates[:, 2 * hidden :].tanh()
        links = torch.addmm(link.index_select(0, step.owners), cells, model.link_cell.weight.t())
        weights = links.sigmoid().exp()  # between 1 and e, so no maximum is subtracted
        own = i.exp()
        total = own.index_add(0, step.owners, weights)
        return (own * g).index_add(0, step.owners, weights * cells) / total
