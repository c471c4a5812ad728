"""Greedy arc-standard parser with BiLSTM features: Kiperwasser and Goldberg 2016
(arXiv:1603.04351), trained on configurations that its own actions reach (Goldberg and Nivre 2012).

Rebuilds the syntax tree of a Python function from its nodes in source order. The head of a node is
its parent. The next action depends on scores that are read. A loop over examples in batch() would
run each action alone. In ab.map, one step of all parses in a minibatch runs together.

    python examples/greedy_parser.py
"""

from __future__ import annotations

import random
import sys

import torch
import torch.nn.functional as F
from data import Example
from reading import preorder, run
from torch import Tensor, nn

SHIFT, LEFT, RIGHT = range(3)
EXPLORE = 0.3  # share of training steps that follow the model's action, not the oracle's


class Configuration:
    """Stack and buffer, as positions of words. heads[i] is the head of word i."""

    def __init__(self, heads: list[int]) -> None:
        self.gold = heads
        self.heads = [-1] * len(heads)
        self.stack: list[int] = []
        self.front = 0
        self.waiting = [heads.count(i) for i in range(len(heads))]  # true dependents without an arc

    def is_final(self) -> bool:
        return self.front == len(self.gold) and len(self.stack) == 1

    def possible(self) -> list[int]:
        arcs = [LEFT, RIGHT] if len(self.stack) > 1 else []
        return [SHIFT, *arcs] if self.front < len(self.gold) else arcs

    def best(self) -> int:
        """Returns the oracle's action, which keeps as many arcs of the true tree as possible."""
        if len(self.stack) > 1:
            below, top = self.stack[-2:]
            if self.gold[below] == top:
                return LEFT
            if self.gold[top] == below and self.waiting[top] == 0:
                return RIGHT
        return SHIFT if SHIFT in self.possible() else RIGHT

    def apply(self, action: int) -> None:
        if action == SHIFT:
            self.stack.append(self.front)
            self.front += 1
            return
        top, below = self.stack.pop(), self.stack.pop()
        head, dependent = (top, below) if action == LEFT else (below, top)
        self.heads[dependent] = head
        if self.gold[dependent] == head:
            self.waiting[head] -= 1
        self.stack.append(head)


class GreedyParser(nn.Module):
    """Scores actions from the two words on top of the stack and the next word."""

    def __init__(self, vocabulary: int, classes: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.encoder = nn.LSTM(hidden, hidden // 2, bidirectional=True)
        self.none = nn.Parameter(torch.zeros(hidden))
        self.score = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        self.actions = torch.arange(3)

    def encode(self, example: Example) -> tuple[Tensor, list[int]]:
        order, heads = preorder(example)
        words = self.embedding(torch.cat([example.symbols[node] for node in order]))
        return self.encoder(words)[0], heads

    def scores(self, words: Tensor, at: Configuration) -> Tensor:
        """Returns the scores of the three actions, of shape [3]."""
        looked_at = [words[i] for i in at.stack[-2:]]
        looked_at = [self.none] * (2 - len(looked_at)) + looked_at
        looked_at.append(words[at.front] if at.front < len(at.gold) else self.none)
        return self.score(torch.cat(looked_at))

    @staticmethod
    def choose(scores: Tensor, at: Configuration) -> int:
        """Returns the best possible action. Reads the scores if several actions are possible."""
        possible = at.possible()
        if len(possible) == 1:
            return possible[0]
        values = scores.tolist()
        return max(possible, key=values.__getitem__)

    def forward(self, example: Example) -> Tensor:
        """Returns the mean loss of the oracle's actions, of shape [].

        Some actions that lead to the configurations are the oracle's, and others are the model's.
        """
        words, heads = self.encode(example)
        at, losses = Configuration(heads), []
        draw = random.Random(len(heads))
        while not at.is_final():
            scores = self.scores(words, at)
            best = at.best()
            losses.append(F.cross_entropy(scores, self.actions[best]))
            at.apply(self.choose(scores, at) if draw.random() < EXPLORE else best)
        return torch.stack(losses).mean()

    def predict(self, example: Example) -> list[int]:
        """Returns the head of each word."""
        words, heads = self.encode(example)
        at = Configuration(heads)
        while not at.is_final():
            at.apply(self.choose(self.scores(words, at), at))
        return at.heads

    def accuracy(self, example: Example, predicted: list[int]) -> tuple[int, int]:
        """Returns the numbers of words with the right head and of all words, without the root."""
        heads = preorder(example)[1]
        return sum(h == p for h, p in zip(heads, predicted, strict=True) if h >= 0), len(heads) - 1


if __name__ == "__main__":
    sys.exit(run(GreedyParser, __doc__ or ""))
