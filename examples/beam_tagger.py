"""Beam search over a BiLSTM tagger, trained with early updates (Collins and Roark 2004).

Training stops at the word where the beam loses the true tags. The loss is the difference between
the scores of the best hypothesis and the true tags. The words are the nodes of a Python function in
source order. The tag of a word is the depth of its node. Each step reads the best continuations of
all hypotheses.

    python examples/beam_tagger.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from data import Example
from reading import preorder, run
from torch import Tensor, nn

TAGS = 8  # all greater depths share the last tag
BEAM = 4


@dataclass(frozen=True)
class Hypothesis:
    """The tags so far, their score [], and the state [1, H] of the history after these tags."""

    tags: tuple[int, ...]
    score: Tensor
    state: Tensor


class BeamTagger(nn.Module):
    """Scores a tag from its word in context and from all tags before it."""

    def __init__(self, vocabulary: int, classes: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.encoder = nn.LSTM(hidden, hidden // 2, bidirectional=True)
        self.tag = nn.Embedding(TAGS, hidden)
        self.history = nn.GRUCell(hidden, hidden)
        self.first = nn.Parameter(torch.zeros(1, hidden))
        self.score = nn.Sequential(
            nn.Linear(2 * hidden, hidden), nn.Tanh(), nn.Linear(hidden, TAGS)
        )
        self.ids = torch.arange(TAGS).unsqueeze(1).unbind()

    @staticmethod
    def tags(example: Example) -> list[int]:
        depths: list[int] = []
        for parent in preorder(example)[1]:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return [min(depth, TAGS - 1) for depth in depths]

    def step(self, beam: list[Hypothesis], word: Tensor) -> list[Hypothesis]:
        """Returns the best continuations. Reads values once: the indices of these continuations."""
        scores = torch.cat(
            [h.score + self.score(torch.cat([word, h.state], -1)).log_softmax(-1) for h in beam]
        )
        best = scores.detach().flatten().topk(min(BEAM, scores.numel())).indices.tolist()
        made = []
        for place in best:
            k, tag = divmod(place, TAGS)
            state = self.history(self.tag(self.ids[tag]), beam[k].state)
            made.append(Hypothesis((*beam[k].tags, tag), scores[k, tag], state))
        return made

    def words(self, example: Example) -> Tensor:
        order, _ = preorder(example)
        words = self.embedding(torch.cat([example.symbols[node] for node in order]))
        return self.encoder(words)[0]

    def forward(self, example: Example) -> Tensor:
        """Returns the loss, of shape [].

        The loss is the lead of the best hypothesis over the true one, at the word where the beam
        loses the true tags or at the end, plus the negative log-likelihood of the true tags.
        """
        words, tags = self.words(example), self.tags(example)
        start = Hypothesis((), words.new_zeros(()), self.first)
        beam, true = [start], start
        for i, tag in enumerate(tags):
            word = words[i : i + 1]
            scores = self.score(torch.cat([word, true.state], -1)).log_softmax(-1)
            state = self.history(self.tag(self.ids[tag]), true.state)
            true = Hypothesis((*true.tags, tag), true.score + scores[0, tag], state)
            beam = self.step(beam, word)
            if all(h.tags != true.tags for h in beam):
                break
        return (beam[0].score - true.score) - true.score

    def predict(self, example: Example) -> tuple[int, ...]:
        """Returns the best tags found."""
        words = self.words(example)
        beam = [Hypothesis((), words.new_zeros(()), self.first)]
        for i in range(len(words)):
            beam = self.step(beam, words[i : i + 1])
        return beam[0].tags

    def accuracy(self, example: Example, predicted: tuple[int, ...]) -> tuple[int, int]:
        """Returns the number of words with the right tag, and the number of words."""
        tags = self.tags(example)
        return sum(a == b for a, b in zip(tags, predicted, strict=True)), len(tags)


if __name__ == "__main__":
    sys.exit(run(BeamTagger, __doc__ or ""))
