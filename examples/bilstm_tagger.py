"""BiLSTM tagger: Neubig, Goldberg and Dyer 2017, section 5.2 (arXiv:1705.07860).

One LSTM runs in each direction. A layer of 32 units follows, and then the tags. The model is
written for one sentence, word by word.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from data import Example
from torch import Tensor, nn


class BiLSTMTagger(nn.Module):
    """Tags every word of a sentence. E: size of an embedding, H: hidden size of one direction."""

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        embedding: int = 128,
        hidden: int = 256,
        tagger_hidden: int = 32,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.left_to_right = nn.LSTMCell(embedding, hidden)
        self.right_to_left = nn.LSTMCell(embedding, hidden)
        self.tagger = nn.Sequential(
            nn.Linear(2 * hidden, tagger_hidden), nn.Tanh(), nn.Linear(tagger_hidden, classes)
        )

    @staticmethod
    def run(cell: nn.LSTMCell, inputs: Iterable[Tensor]) -> list[Tensor]:
        """Returns the hidden states [1, H] after each input [1, E]."""
        state: tuple[Tensor, Tensor] | None = None
        hidden = []
        for x in inputs:
            state = cell(x, state)
            hidden.append(state[0])
        return hidden

    def scores(self, sentence: Example) -> list[Tensor]:
        """Returns the tag scores of each word, of shape [1, classes]."""
        words = [self.embedding(word) for word in sentence.symbols]
        forward = self.run(self.left_to_right, words)
        backward = self.run(self.right_to_left, reversed(words))
        return [
            self.tagger(torch.cat([left, right], dim=-1))
            for left, right in zip(forward, reversed(backward), strict=True)
        ]

    def forward(self, sentence: Example) -> Tensor:
        """Returns the sum of the losses at the words of one sentence, of shape []."""
        losses = [
            F.cross_entropy(scores, target)
            for scores, target in zip(self.scores(sentence), sentence.targets, strict=True)
        ]
        return torch.stack(losses).sum()
