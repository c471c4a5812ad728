"""BiLSTM taggers, word by word: Neubig, Goldberg and Dyer 2017, section 5.2 (arXiv:1705.07860)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.data import Sentence, tagged_sentences
from benchmarks.workload import POOL, Sources, Workload, seed_everything

# isort: split
from bilstm_tagger import BiLSTMTagger  # benchmarks.data put examples/ on the path

EMBEDDING = 128
LETTER_EMBEDDING = 20
LETTER_HIDDEN = EMBEDDING // 2  # hidden size of one direction


class GatesCell(nn.Module):
    """An LSTM cell whose gates are separate ops. It has the parameters of ``nn.LSTMCell``."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        cell = nn.LSTMCell(inputs, hidden)
        self.weight_ih, self.weight_hh = cell.weight_ih, cell.weight_hh
        self.bias_ih, self.bias_hh = cell.bias_ih, cell.bias_hh

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Returns the hidden state and the memory cell after input ``x``, both [1, H]."""
        gates = F.linear(x, self.weight_ih, self.bias_ih)
        if state is None:
            state = (
                x.new_zeros(1, self.weight_hh.shape[1]),
                x.new_zeros(1, self.weight_hh.shape[1]),
            )
        h, c = state
        gates = gates + F.linear(h, self.weight_hh, self.bias_hh)
        i, f, g, o = gates.chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class GatesBiLSTM(BiLSTMTagger):
    """The tagger of the example, with ``GatesCell``."""

    def __init__(self, vocabulary: int, classes: int, embedding: int, hidden: int) -> None:
        super().__init__(vocabulary, classes, embedding, hidden)
        self.left_to_right = GatesCell(embedding, hidden)
        self.right_to_left = GatesCell(embedding, hidden)


class CharacterBiLSTM(BiLSTMTagger):
    """The tagger of the example, which reads rare words letter by letter."""

    def __init__(self, vocabulary: int, classes: int, letters: int, hidden: int) -> None:
        super().__init__(vocabulary, classes, EMBEDDING, hidden)
        self.letters = nn.Embedding(letters, LETTER_EMBEDDING)
        self.spell_forward = nn.LSTMCell(LETTER_EMBEDDING, LETTER_HIDDEN)
        self.spell_backward = nn.LSTMCell(LETTER_EMBEDDING, LETTER_HIDDEN)

    def word(self, symbol: Tensor, letters: list[Tensor]) -> Tensor:
        """Returns the vector of a word, [1, E]."""
        if not letters:
            vector: Tensor = self.embedding(symbol)
            return vector
        inputs = [self.letters(letter) for letter in letters]
        ends = self.run(self.spell_forward, inputs), self.run(self.spell_backward, reversed(inputs))
        return torch.cat([ends[0][-1], ends[1][-1]], dim=-1)

    def scores(self, sentence: Sentence) -> list[Tensor]:
        words = list(map(self.word, sentence.symbols, sentence.letters))
        forward = self.run(self.left_to_right, words)
        backward = self.run(self.right_to_left, reversed(words))
        return [
            self.tagger(torch.cat([left, right], dim=-1))
            for left, right in zip(forward, reversed(backward), strict=True)
        ]


# ---------------------------------------------------------------- by hand


@dataclass(frozen=True)
class Plan:
    words: Tensor  # ids, step by step
    targets: Tensor
    sentences: Tensor  # the sentence of each row
    batch_sizes: list[int]
    size: int
    letters: Tensor | None = None  # ids of the letters of spelled words, step by step
    letter_batch_sizes: list[int] = field(default_factory=list)
    letter_ends: Tensor | None = None  # rows of the last letters
    sources: Tensor | None = None  # rows of the concatenation of embedded and spelled words


class Tagger(Workload):
    name = "tagger"
    title = "BiLSTM tagger, nn.LSTMCell"
    sizes = (256,)
    targets: ClassVar[Mapping[int, float]] = {256: 0.7}

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        data = tagged_sentences(sources.tags, POOL, draw)
        self.examples = data.examples
        self.model = self.network(data.vocabulary, data.tags, data.letters, hidden)

    def network(self, vocabulary: int, tags: int, letters: int, hidden: int) -> BiLSTMTagger:
        return BiLSTMTagger(vocabulary, tags, EMBEDDING, hidden)

    def collate(self, minibatch: Sequence[Sentence]) -> Plan:
        lengths = np.array([len(sentence.word_ids) for sentence in minibatch])
        packed = collate.pack(lengths)
        return Plan(
            collate.tensor(np.concatenate([s.word_ids for s in minibatch])[packed.order]),
            collate.tensor(np.concatenate([s.tag_ids for s in minibatch])[packed.order]),
            collate.tensor(packed.sequence),
            packed.batch_sizes,
            len(minibatch),
        )

    def inputs(self, plan: Plan) -> Tensor:
        """Returns the words' vectors, step by step."""
        vectors: Tensor = self.model.embedding(plan.words)
        return vectors

    def hand(self, plan: Plan) -> Tensor:
        model, x = self.model, self.inputs(plan)
        left = collate.run_lstm(model.left_to_right, x, plan.batch_sizes)
        right = collate.run_lstm(model.right_to_left, x, plan.batch_sizes, reverse=True)
        scores = model.tagger(torch.cat([left, right], dim=-1))
        losses = F.cross_entropy(scores, plan.targets, reduction="none")
        return collate.sum_by(plan.sentences, losses, plan.size)


class GatesTagger(Tagger):
    name = "tagger-gates"
    title = "BiLSTM tagger, gates by hand"
    targets: ClassVar[Mapping[int, float]] = {256: 0.6}

    def network(self, vocabulary: int, tags: int, letters: int, hidden: int) -> BiLSTMTagger:
        return GatesBiLSTM(vocabulary, tags, EMBEDDING, hidden)


class CharacterTagger(Tagger):
    name = "tagger-characters"
    title = "BiLSTM tagger, with characters"
    targets: ClassVar[Mapping[int, float]] = {256: 0.55}

    def network(self, vocabulary: int, tags: int, letters: int, hidden: int) -> BiLSTMTagger:
        return CharacterBiLSTM(vocabulary, tags, letters, hidden)

    def collate(self, minibatch: Sequence[Sentence]) -> Plan:
        plan = super().collate(minibatch)
        spelled = [ids for sentence in minibatch for ids in sentence.letter_ids]
        if not spelled:
            return plan
        letters = collate.pack(np.array([len(ids) for ids in spelled]))
        order = collate.pack(np.array([len(s.word_ids) for s in minibatch])).order
        has_letters = np.concatenate([sentence.spelled for sentence in minibatch])
        row = np.empty(len(has_letters), dtype=np.int64)
        in_order = has_letters[order]
        known = order[~in_order]
        row[known] = np.arange(len(known))
        row[has_letters] = len(known) + letters.rank
        words = np.concatenate([sentence.word_ids for sentence in minibatch])
        return Plan(
            collate.tensor(words[known]),
            plan.targets,
            plan.sentences,
            plan.batch_sizes,
            plan.size,
            collate.tensor(np.concatenate(spelled)[letters.order]),
            letters.batch_sizes,
            collate.tensor(letters.ends),
            collate.tensor(row[order]),
        )

    def inputs(self, plan: Plan) -> Tensor:
        embedded = super().inputs(plan)
        if plan.letters is None:
            return embedded
        model, sizes = self.model, plan.letter_batch_sizes
        x = model.letters(plan.letters)
        forward = collate.run_lstm(model.spell_forward, x, sizes).index_select(0, plan.letter_ends)
        backward = collate.run_lstm(model.spell_backward, x, sizes, reverse=True)[: sizes[0]]
        spelled = torch.cat([forward, backward], dim=-1)
        return torch.cat([embedded, spelled]).index_select(0, plan.sources)
