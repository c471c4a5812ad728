"""A greedy parser with stack LSTMs (Dyer et al. 2015, arXiv:1505.08075). It chooses each action
itself, and is trained on the configurations that its own actions reach (Goldberg and Nivre
2012)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.data import VOCABULARY, Ids, id_tensors, length, word_ids
from benchmarks.workload import POOL, Sources, Workload, seed_everything

SHIFT, LEFT, RIGHT = range(3)
EMBEDDING = 128
ACTION_EMBEDDING = 32

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Sentence:
    """Words, and the head of each word (-1 for the root)."""

    words: list[Tensor]
    heads: list[int]
    ids: list[int]


class Configuration:
    """Stack and buffer of one sentence in an arc-standard parser, as positions of words."""

    def __init__(self, heads: list[int]) -> None:
        self.heads = heads
        self.stack: list[int] = []
        self.next = 0
        self.waiting = [0] * len(heads)  # number of dependents without an arc
        for head in heads:
            if head >= 0:
                self.waiting[head] += 1

    def is_final(self) -> bool:
        return self.next == len(self.heads) and len(self.stack) == 1

    def only(self) -> int | None:
        """Returns the only possible action, or None if there are several."""
        return SHIFT if len(self.stack) < 2 else None

    def may_shift(self) -> bool:
        return self.next < len(self.heads)

    def wanted(self) -> int:
        """Returns the action that loses the fewest true arcs."""
        if len(self.stack) < 2:
            return SHIFT
        below, top = self.stack[-2:]
        if self.heads[below] == top:
            return LEFT
        if self.heads[top] == below and self.waiting[top] == 0:
            return RIGHT
        return SHIFT if self.may_shift() else RIGHT

    def apply(self, action: int) -> None:
        if action == SHIFT:
            self.stack.append(self.next)
            self.next += 1
            return
        top, below = self.stack.pop(), self.stack.pop()
        head, dependent = (top, below) if action == LEFT else (below, top)
        if self.heads[dependent] == head:
            self.waiting[head] -= 1
        self.stack.append(head)


class GreedyParserModel(nn.Module):
    """Follows its own best actions. The loss is computed for the oracle's actions."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, EMBEDDING)
        self.actions = nn.Embedding(3, ACTION_EMBEDDING)
        self.buffer_cell = nn.LSTMCell(EMBEDDING, hidden)
        self.stack_cell = nn.LSTMCell(EMBEDDING, hidden)
        self.action_cell = nn.LSTMCell(ACTION_EMBEDDING, hidden)
        self.no_stack = nn.Parameter(torch.randn(1, hidden) / hidden**0.5)
        self.no_buffer = nn.Parameter(torch.randn(1, hidden) / hidden**0.5)
        self.no_action = nn.Parameter(torch.randn(1, hidden) / hidden**0.5)
        self.compose = nn.Linear(2 * EMBEDDING + ACTION_EMBEDDING, EMBEDDING)
        self.summary = nn.Linear(3 * hidden, hidden)
        self.score = nn.Linear(hidden, 3)
        self.ids = id_tensors(3)

    def forward(self, sentence: Sentence) -> Tensor:
        """Returns the sum of the losses of all actions of one sentence."""
        words = [self.words(word) for word in sentence.words]
        buffer = [self.no_buffer]  # states; the last one is for the next word
        state: State | None = None
        for word in reversed(words):
            state = self.buffer_cell(word, state)
            buffer.append(state[0])

        at = Configuration(sentence.heads)
        stack: list[tuple[Tensor, State]] = []  # each item: a vector, and the LSTM's state after it
        history: State | None = None
        losses = []
        while not at.is_final():
            top = stack[-1][1][0] if stack else self.no_stack
            past = self.no_action if history is None else history[0]
            features = self.summary(torch.cat([top, buffer[-1], past], dim=-1)).relu()
            scores = self.score(features)
            losses.append(F.cross_entropy(scores, self.ids[at.wanted()]))
            action = at.only()
            if action is None:
                allowed = scores if at.may_shift() else scores[:, LEFT:]
                action = int(allowed.argmax()) + (SHIFT if at.may_shift() else LEFT)
            embedded = self.actions(self.ids[action])
            history = self.action_cell(embedded, history)
            if action == SHIFT:
                buffer.pop()
                vector = words[at.next]
            else:
                right, left = stack.pop()[0], stack.pop()[0]
                pair = [right, left] if action == LEFT else [left, right]
                vector = self.compose(torch.cat([*pair, embedded], dim=-1)).tanh()
            at.apply(action)
            below = stack[-1][1] if stack else None
            stack.append((vector, self.stack_cell(vector, below)))
        return torch.stack(losses).sum()


def random_heads(draw: Random, words: int) -> list[int]:
    """Returns a random projective tree. Each span has a random head, recursively."""
    heads = [-1] * words
    spans = [(0, words, -1)]
    while spans:
        first, end, above = spans.pop()
        if first == end:
            continue
        head = draw.randrange(first, end)
        heads[head] = above
        spans += [(first, head, head), (head + 1, end, head)]
    return heads


# --- by hand ---


@dataclass
class Moves:
    """The entries that the actions of one step use. Shifts come first, then arcs."""

    order: list[int]  # for each row of this step: the sentence's position in `live`
    shifted: list[int]  # rows of words
    pairs: list[int]  # rows of memory, two for each arc
    below: list[int]  # for each row of this step: row of memory of the item below it


class Lockstep:
    """Parses all sentences with hand-written batches, one action of each sentence at a time.

    The stacks' vectors and states are rows of ``memory``. Row 0 is for an empty stack.
    """

    def __init__(self, model: GreedyParserModel, plan: Sequence[Sentence]) -> None:
        self.model = model
        counts = np.array([len(s.words) for s in plan])
        self.read_words(plan, counts)
        self.hidden = model.no_stack.shape[1]
        self.bias = model.stack_cell.bias_ih + model.stack_cell.bias_hh
        self.ats = [Configuration(s.heads) for s in plan]
        self.live = sorted(range(len(plan)), key=lambda k: -counts[k])  # those with actions left
        self.stacks: list[list[int]] = [[] for _ in plan]  # rows of memory; 0 means no item
        self.vectors = self.words.new_zeros(1, EMBEDDING)
        self.states = self.words.new_zeros(1, 2 * self.hidden)
        self.no_top = F.pad(model.no_stack, (0, self.hidden))
        self.past = model.no_action.expand(len(self.live), -1)
        self.history_c = self.words.new_zeros(len(self.live), self.hidden)
        self.first = True

    def read_words(self, plan: Sequence[Sentence], counts: Ids) -> None:
        """Embeds the words, and runs the buffers' LSTM over them."""
        model = self.model
        packed = collate.pack(counts)
        backwards = np.concatenate([s.ids[::-1] for s in plan])
        self.words = model.words(collate.tensor(backwards[packed.order]))
        buffer = collate.run_lstm(model.buffer_cell, self.words, packed.batch_sizes)
        self.fronts = torch.cat([model.no_buffer, buffer])
        row = np.empty(len(packed.order), dtype=np.int64)
        row[packed.order] = np.arange(len(packed.order))
        ends = np.cumsum(counts)  # the last word in reverse order is the first word of the sentence
        self.word_row = [
            row[end - n : end][::-1].tolist() for end, n in zip(ends, counts, strict=True)
        ]

    def scores(self) -> Tensor:
        """Returns the scores of all actions, [live, 3]."""
        model, ats, stacks, word_row = self.model, self.ats, self.stacks, self.word_row
        tops = collate.tensor([stacks[k][-1] if stacks[k] else 0 for k in self.live])
        front = collate.tensor(
            [1 + word_row[k][ats[k].next] if ats[k].may_shift() else 0 for k in self.live]
        )
        memory = torch.cat([self.no_top, self.states[1:]])
        top = memory.index_select(0, tops)[:, : self.hidden]
        features = torch.cat([top, self.fronts.index_select(0, front), self.past], dim=-1)
        return model.score(model.summary(features).relu())

    def wanted(self) -> Tensor:
        """Returns the actions that lose the fewest true arcs, [live]."""
        return collate.tensor([self.ats[k].wanted() for k in self.live])

    def choose(self, scores: Tensor) -> list[int]:
        """Returns the best possible action for each live sentence."""
        ats, live = self.ats, self.live
        floor = scores.new_zeros(scores.shape)
        for i, k in enumerate(live):
            if not ats[k].may_shift():
                floor[i, SHIFT] = -float("inf")
        best = (scores.detach() + floor).argmax(-1).tolist()
        forced = [ats[k].only() for k in live]
        return [b if f is None else f for b, f in zip(best, forced, strict=True)]

    def remember(self, actions: list[int]) -> Tensor:
        """Runs a step of the LSTM over actions. Returns the embedded actions."""
        embedded = self.model.actions(collate.tensor(actions))
        if self.first:
            self.past, self.history_c = self.model.action_cell(embedded)
            self.first = False
        else:
            self.past, self.history_c = self.model.action_cell(
                embedded, (self.past, self.history_c)
            )
        return embedded

    def move(self, actions: list[int]) -> Moves:
        """Applies the actions to the configurations. Pops the items that actions use."""
        ats, live, stacks = self.ats, self.live, self.stacks
        order = sorted(range(len(live)), key=lambda i: actions[i] != SHIFT)
        moves = Moves(order, [], [], [])
        for i in order:
            k = live[i]
            if actions[i] == SHIFT:
                moves.shifted.append(self.word_row[k][ats[k].next])
            else:
                right, left = stacks[k].pop(), stacks[k].pop()
                moves.pairs += (right, left) if actions[i] == LEFT else (left, right)
            ats[k].apply(actions[i])
            moves.below.append(stacks[k][-1] if stacks[k] else 0)
        return moves

    def compose(self, moves: Moves, embedded: Tensor) -> Tensor:
        """Returns the vectors to push on the stacks: shifted words and composed pairs."""
        shifted, pairs = moves.shifted, moves.pairs
        pushed = [self.words.index_select(0, collate.tensor(shifted))] if shifted else []
        if pairs:
            arcs = embedded.index_select(0, collate.tensor(moves.order[len(shifted) :]))
            joined = self.vectors.index_select(0, collate.tensor(pairs)).view(-1, 2 * EMBEDDING)
            pushed.append(self.model.compose(torch.cat([joined, arcs], dim=-1)).tanh())
        return torch.cat(pushed) if len(pushed) > 1 else pushed[0]

    def stack_states(self, moves: Moves, vector: Tensor) -> State:
        """Returns the states of the stacks' LSTM after the new vectors."""
        cell = self.model.stack_cell
        h, c = self.states.index_select(0, collate.tensor(moves.below)).chunk(2, dim=-1)
        gates = torch.addmm(self.bias, vector, cell.weight_ih.t())
        i, f, g, o = torch.addmm(gates, h, cell.weight_hh.t()).chunk(4, dim=-1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def push(self, moves: Moves, vector: Tensor, state: State) -> None:
        """Pushes the new rows on the stacks. Keeps the rows of sentences that have actions left."""
        live, stacks = self.live, self.stacks
        going_on = [i for i, k in enumerate(live) if not self.ats[k].is_final()]
        size = len(self.vectors)
        for place, i in enumerate(moves.order):
            stacks[live[i]].append(size + place)
        self.live = [live[i] for i in going_on]
        if not self.live:
            return
        kept = [0]
        for k in self.live:
            rows = stacks[k]
            stacks[k] = list(range(len(kept), len(kept) + len(rows)))
            kept += rows
        keep = collate.tensor(kept)
        self.vectors = torch.cat([self.vectors, vector]).index_select(0, keep)
        states = torch.cat([self.states, torch.cat(state, dim=-1)])
        self.states = states.index_select(0, keep)
        if len(self.live) < len(live):
            staying = collate.tensor(going_on)
            self.past = self.past.index_select(0, staying)
            self.history_c = self.history_c.index_select(0, staying)


class GreedyParser(Workload):
    name = "greedy-parser"
    title = "greedy parser"
    sizes = (256,)
    targets: ClassVar[Mapping[int, float]] = {256: 0.5}
    reads = True

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.model = GreedyParserModel(hidden)
        words = id_tensors(VOCABULARY)
        self.examples = []
        for _ in range(POOL):
            ids = word_ids(draw, length(draw, 20.9, 10.0, 2, 74))
            heads = random_heads(draw, len(ids))
            self.examples.append(Sentence([words[i] for i in ids], heads, ids))

    def collate(self, minibatch: Sequence[Sentence]) -> Sequence[Sentence]:
        """Prepares nothing, because all work depends on the actions."""
        return minibatch

    def hand(self, plan: Sequence[Sentence]) -> Tensor:
        """Parses all sentences in lockstep, one action per step."""
        parsers = Lockstep(self.model, plan)
        losses, owners = [], []
        while parsers.live:
            scores = parsers.scores()
            losses.append(F.cross_entropy(scores, parsers.wanted(), reduction="none"))
            owners += parsers.live
            actions = parsers.choose(scores)
            embedded = parsers.remember(actions)
            moves = parsers.move(actions)
            vector = parsers.compose(moves, embedded)
            state = parsers.stack_states(moves, vector)
            parsers.push(moves, vector, state)
        return collate.sum_by(collate.tensor(owners), torch.cat(losses), len(plan))
