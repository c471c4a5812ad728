"""A parser that picks its next action itself: stack LSTMs (Dyer et al. 2015, arXiv:1505.08075),
greedy, and trained where its own mistakes lead it (Goldberg and Nivre 2012)."""

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
from benchmarks.data import VOCABULARY, id_tensors, length, word_ids
from benchmarks.workload import POOL, Sources, Workload, seed_everything

SHIFT, LEFT, RIGHT = range(3)
EMBEDDING = 128
ACTION_EMBEDDING = 32

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Sentence:
    """Words, and the head of each; -1 is the root's."""

    words: list[Tensor]
    heads: list[int]
    ids: list[int]


class Configuration:
    """Stack and buffer of one sentence, as positions of words; arc-standard."""

    def __init__(self, heads: list[int]) -> None:
        self.heads = heads
        self.stack: list[int] = []
        self.next = 0
        self.waiting = [0] * len(heads)  # dependents that have no arc yet
        for head in heads:
            if head >= 0:
                self.waiting[head] += 1

    def is_final(self) -> bool:
        return self.next == len(self.heads) and len(self.stack) == 1

    def only(self) -> int | None:
        """The one action that is possible, if there is but one."""
        return SHIFT if len(self.stack) < 2 else None

    def may_shift(self) -> bool:
        return self.next < len(self.heads)

    def wanted(self) -> int:
        """The action that does the least harm."""
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
    """Follows its own best action; the loss is that of the wanted ones on the way."""

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
        """The sum of the losses of all actions of one sentence."""
        words = [self.words(word) for word in sentence.words]
        buffer = [self.no_buffer]  # states, that of the next word last
        state: State | None = None
        for word in reversed(words):
            state = self.buffer_cell(word, state)
            buffer.append(state[0])

        at = Configuration(sentence.heads)
        stack: list[tuple[Tensor, State]] = []  # vectors, and the LSTM's state above each
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
    """A projective tree: the head of a span lies anywhere in it, and so on to both sides."""
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
        """What can be prepared depends on the actions."""
        return minibatch

    # --- by hand: all sentences in lockstep, an action each ---

    def hand(self, plan: Sequence[Sentence]) -> Tensor:
        model = self.model
        counts = np.array([len(s.words) for s in plan])
        packed = collate.pack(counts)
        backwards = np.concatenate([s.ids[::-1] for s in plan])
        words = model.words(collate.tensor(backwards[packed.order]))
        buffer = collate.run_lstm(model.buffer_cell, words, packed.batch_sizes)
        fronts = torch.cat([model.no_buffer, buffer])
        row = np.empty(len(packed.order), dtype=np.int64)
        row[packed.order] = np.arange(len(packed.order))
        ends = np.cumsum(counts)  # the last of the backward words is the sentence's first
        word_row = [row[end - n : end][::-1].tolist() for end, n in zip(ends, counts, strict=True)]

        hidden = model.no_stack.shape[1]
        bias = model.stack_cell.bias_ih + model.stack_cell.bias_hh
        ats = [Configuration(s.heads) for s in plan]
        live = sorted(range(len(plan)), key=lambda k: -counts[k])  # those that still act
        stacks: list[list[int]] = [[] for _ in plan]  # rows of memory; 0 is none
        vectors = words.new_zeros(1, EMBEDDING)
        states = words.new_zeros(1, 2 * hidden)
        no_top = F.pad(model.no_stack, (0, hidden))
        past = model.no_action.expand(len(live), -1)
        history_c = words.new_zeros(len(live), hidden)
        first = True
        losses, owners = [], []
        while live:
            tops = collate.tensor([stacks[k][-1] if stacks[k] else 0 for k in live])
            front = collate.tensor(
                [1 + word_row[k][ats[k].next] if ats[k].may_shift() else 0 for k in live]
            )
            top = torch.cat([no_top, states[1:]]).index_select(0, tops)[:, :hidden]
            features = torch.cat([top, fronts.index_select(0, front), past], dim=-1)
            scores = model.score(model.summary(features).relu())
            wanted = collate.tensor([ats[k].wanted() for k in live])
            losses.append(F.cross_entropy(scores, wanted, reduction="none"))
            owners += live
            floor = scores.new_zeros(scores.shape)
            for i, k in enumerate(live):
                if not ats[k].may_shift():
                    floor[i, SHIFT] = -float("inf")
            best = (scores.detach() + floor).argmax(-1).tolist()
            forced = [ats[k].only() for k in live]
            actions = [b if f is None else f for b, f in zip(best, forced, strict=True)]

            embedded = model.actions(collate.tensor(actions))
            if first:
                past, history_c = model.action_cell(embedded)
                first = False
            else:
                past, history_c = model.action_cell(embedded, (past, history_c))

            # Shifts first, then arcs: rows of this step.
            order = sorted(range(len(live)), key=lambda i: actions[i] != SHIFT)
            shifts = sum(action == SHIFT for action in actions)
            shifted, pairs, below = [], [], []
            for i in order:
                k = live[i]
                if actions[i] == SHIFT:
                    shifted.append(word_row[k][ats[k].next])
                else:
                    right, left = stacks[k].pop(), stacks[k].pop()
                    pairs += (right, left) if actions[i] == LEFT else (left, right)
                ats[k].apply(actions[i])
                below.append(stacks[k][-1] if stacks[k] else 0)
            pushed = [words.index_select(0, collate.tensor(shifted))] if shifted else []
            if pairs:
                arcs = embedded.index_select(0, collate.tensor(order[shifts:]))
                joined = vectors.index_select(0, collate.tensor(pairs)).view(-1, 2 * EMBEDDING)
                pushed.append(model.compose(torch.cat([joined, arcs], dim=-1)).tanh())
            vector = torch.cat(pushed) if len(pushed) > 1 else pushed[0]
            h, c = states.index_select(0, collate.tensor(below)).chunk(2, dim=-1)
            gates = torch.addmm(bias, vector, model.stack_cell.weight_ih.t())
            i, f, g, o = torch.addmm(gates, h, model.stack_cell.weight_hh.t()).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()

            going_on = [i for i, k in enumerate(live) if not ats[k].is_final()]
            size = len(vectors)
            for place, i in enumerate(order):
                stacks[live[i]].append(size + place)
            live, before = [live[i] for i in going_on], live
            if not live:
                break
            kept = [0]
            for k in live:
                rows = stacks[k]
                stacks[k] = list(range(len(kept), len(kept) + len(rows)))
                kept += rows
            keep = collate.tensor(kept)
            vectors = torch.cat([vectors, vector]).index_select(0, keep)
            states = torch.cat([states, torch.cat([h, c], dim=-1)]).index_select(0, keep)
            if len(live) < len(before):
                staying = collate.tensor(going_on)
                past = past.index_select(0, staying)
                history_c = history_c.index_select(0, staying)
        return collate.sum_by(collate.tensor(owners), torch.cat(losses), len(plan))
