"""An arc-standard transition parser with stack LSTMs, trained on oracle actions: Dyer et al. 2015
(arXiv:1505.08075)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import collate
from benchmarks.data import VOCABULARY, Ids, id_tensors, length, word_ids
from benchmarks.workload import POOL, Sources, Workload, seed_everything

RELATIONS = 12
ACTIONS = 1 + 2 * RELATIONS  # shift, and left and right arcs for each relation
SHIFT = 0
EMBEDDING = 128
ACTION_EMBEDDING = 32

State = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Derivation:
    """A sentence and the actions that build its tree."""

    words: list[Tensor]
    actions: list[Tensor]
    action_ids: list[int]
    word_ids: Ids = field(repr=False)


class StackLSTMParser(nn.Module):
    """Scores each action of a derivation. E: size of embeddings, H: hidden size of the LSTMs."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, EMBEDDING)
        self.actions = nn.Embedding(ACTIONS, ACTION_EMBEDDING)
        self.buffer_cell = nn.LSTMCell(EMBEDDING, hidden)
        self.stack_cell = nn.LSTMCell(EMBEDDING, hidden)
        self.action_cell = nn.LSTMCell(ACTION_EMBEDDING, hidden)
        self.no_stack = nn.Parameter(torch.randn(1, hidden) / hidden**0.5)
        self.no_buffer = nn.Parameter(torch.randn(1, hidden) / hidden**0.5)
        self.no_action = nn.Parameter(torch.randn(1, hidden) / hidden**0.5)
        self.compose = nn.Linear(2 * EMBEDDING + ACTION_EMBEDDING, EMBEDDING)
        self.summary = nn.Linear(3 * hidden, hidden)
        self.score = nn.Linear(hidden, ACTIONS)

    def action_loss(self, top: Tensor, front: Tensor, past: Tensor, action: Tensor) -> Tensor:
        """Returns the loss of one action, from the states [1, H] of stack, buffer and history."""
        features = self.summary(torch.cat([top, front, past], dim=-1)).relu()
        return F.cross_entropy(self.score(features), action)

    def composition(self, head: Tensor, dependent: Tensor, action: Tensor) -> Tensor:
        """Returns the vector [1, E] of a head with one more dependent."""
        return self.compose(torch.cat([head, dependent, action], dim=-1)).tanh()

    def forward(self, sentence: Derivation) -> Tensor:
        """Returns the sum of the losses of all actions of one sentence."""
        words = [self.words(word) for word in sentence.words]
        buffer = [self.no_buffer]  # states; the last one is for the next word
        state: State | None = None
        for word in reversed(words):
            state = self.buffer_cell(word, state)
            buffer.append(state[0])
        words.reverse()

        stack: list[tuple[Tensor, State]] = []  # each item: a vector, and the LSTM's state after it
        history: State | None = None
        losses = []
        for action, action_id in zip(sentence.actions, sentence.action_ids, strict=True):
            top = stack[-1][1][0] if stack else self.no_stack
            past = self.no_action if history is None else history[0]
            losses.append(self.action_loss(top, buffer[-1], past, action))
            embedded = self.actions(action)
            history = self.action_cell(embedded, history)
            if action_id == SHIFT:
                buffer.pop()
                vector = words.pop()
            else:
                right, left = stack.pop()[0], stack.pop()[0]
                head, dependent = (right, left) if action_id % 2 else (left, right)
                vector = self.composition(head, dependent, embedded)
            below = stack[-1][1] if stack else None
            stack.append((vector, self.stack_cell(vector, below)))
        return torch.stack(losses).sum()


def derivation(draw: Random, words: int) -> list[int]:
    """Returns random actions that leave one item: shift (0), left arc (odd), right arc (even)."""
    actions: list[int] = []
    depth, waiting = 0, words
    while waiting or depth > 1:
        if depth < 2 or (waiting and draw.random() < 0.55):
            actions.append(SHIFT)
            depth, waiting = depth + 1, waiting - 1
        else:
            actions.append(1 + draw.randrange(2 * RELATIONS))
            depth -= 1
    return actions


# ---------------------------------------------------------------- by hand


@dataclass(frozen=True)
class Step:
    """One action of each sentence that has actions left. Shifts come first, then arcs.

    ``keep`` contains the rows that later steps read, in the concatenation of memory and this step's
    rows.
    """

    shifts: int
    arcs: int
    below: Tensor  # [shifts + arcs]: rows of memory: state under the new item; 0: no item
    pairs: Tensor  # [2 * arcs]: rows of memory of head and dependent
    keep: Tensor


@dataclass(frozen=True)
class Plan:
    words: Tensor  # [words]: packed, from the last to the first word of a sentence
    word_batch_sizes: list[int]
    shifted: Tensor  # rows of the packed words, in the order of the shifts
    arc_actions: Tensor  # ids, in the order of the arcs
    actions: Tensor  # [actions], packed
    action_batch_sizes: list[int]
    action_sentences: Tensor
    steps: list[Step]
    tops: Tensor  # for each packed action: row of the stack's states; 0: empty stack
    fronts: Tensor  # rows of the buffer's states; 0: empty buffer
    pasts: Tensor  # rows of the history's states; 0: no action yet
    size: int


class _Simulation:
    """Runs the actions of a minibatch on stacks of numbers."""

    def __init__(self, minibatch: Sequence[Derivation], order: list[int]) -> None:
        self.minibatch, self.order = minibatch, order
        self.stacks: list[list[int]] = [[] for _ in minibatch]  # numbers of items
        self.shifted: list[list[int]] = [[] for _ in minibatch]
        self.items = 1  # number 0 means no item
        self.tops: list[int] = []  # in the packed order of the actions
        self.fronts: list[tuple[int, int]] = []  # sentence, words shifted
        self.words: list[tuple[int, int]] = []
        self.arcs: list[int] = []
        self.raw: list[tuple[list[int], list[int], list[int]]] = []
        self.shift_counts: list[int] = []

    def step(self, time: int, active: int, active_next: int) -> None:
        stacks, below, pairs, fresh = self.stacks, [], [], []
        arcs = []
        shifted = 0
        for sentence in self.order[:active]:
            stack = stacks[sentence]
            done = self.shifted[sentence]
            self.tops.append(stack[-1] if stack else 0)
            self.fronts.append((sentence, len(done)))
            if self.minibatch[sentence].action_ids[time] == SHIFT:
                self.words.append((sentence, len(done)))
                done.append(time)
                below.append(stack[-1] if stack else 0)
                stack.append(self.items + shifted)
                shifted += 1
            else:
                arcs.append(sentence)
        for sentence in arcs:
            stack = stacks[sentence]
            action = self.minibatch[sentence].action_ids[time]
            right, left = stack.pop(), stack.pop()
            pairs += (right, left) if action % 2 else (left, right)
            below.append(stack[-1] if stack else 0)
            stack.append(self.items + shifted + len(fresh))
            fresh.append(sentence)
            self.arcs.append(action)
        self.items += shifted + len(fresh)
        self.shift_counts.append(shifted)
        live = [item for sentence in self.order[:active_next] for item in stacks[sentence]]
        self.raw.append((below, pairs, live))

    def steps(self) -> list[Step]:
        """Returns the steps, in which rows of memory replace the numbers of items."""
        row = [0] * self.items
        first, steps, size = 1, [], 1
        for shifts, (below, pairs, live) in zip(self.shift_counts, self.raw, strict=True):
            arcs = len(pairs) // 2
            b = [row[item] for item in below]
            p = [row[item] for item in pairs]
            for i in range(shifts + arcs):
                row[first + i] = size + i
            first += shifts + arcs
            keep = [0] + [row[item] for item in live]
            for place, item in enumerate(live, start=1):
                row[item] = place
            size = len(keep)
            steps.append(Step(shifts, arcs, *map(collate.tensor, (b, p, keep))))
        return steps


class TransitionParser(Workload):
    name = "transition-parser"
    title = "transition parser"
    sizes = (256,)
    targets: ClassVar[Mapping[int, float]] = {256: 0.55}

    def __init__(self, hidden: int, sources: Sources, seed: int) -> None:
        draw = seed_everything(seed)
        self.model = StackLSTMParser(hidden)
        words, actions = id_tensors(VOCABULARY), id_tensors(ACTIONS)
        self.examples = []
        for _ in range(POOL):
            ids = word_ids(draw, length(draw, 20.9, 10.0, 2, 74))
            done = derivation(draw, len(ids))
            self.examples.append(
                Derivation([words[i] for i in ids], [actions[a] for a in done], done, np.array(ids))
            )

    def collate(self, minibatch: Sequence[Derivation]) -> Plan:
        word_counts = np.array([len(s.words) for s in minibatch])
        words = collate.pack(word_counts)
        action_counts = 2 * word_counts - 1
        actions = collate.pack(action_counts)
        order = np.argsort(actions.rank).tolist()
        simulation = _Simulation(minibatch, order)
        sizes = actions.batch_sizes
        for time, (active, active_next) in enumerate(zip(sizes, [*sizes[1:], 0], strict=True)):
            simulation.step(time, active, active_next)

        # For each word, counted from the sentence's end: its row in packed order.
        row = np.empty(len(words.order), dtype=np.int64)
        row[words.order] = np.arange(len(words.order))
        starts = np.cumsum(word_counts) - word_counts
        last = starts + word_counts - 1

        def rows(places: list[tuple[int, int]]) -> Ids:
            """Returns the rows of the words at these places; -1 if no word is left."""
            sentence, taken = np.array(places).T
            found = row[np.maximum(last[sentence] - taken, starts[sentence])]
            return np.where(taken < word_counts[sentence], found, -1)

        past = np.empty(len(actions.order), dtype=np.int64)
        past[actions.order] = np.arange(len(actions.order))
        past = np.where(collate.positions(action_counts) > 0, np.roll(past, 1) + 1, 0)
        backwards = np.concatenate([s.word_ids[::-1] for s in minibatch])
        ids = np.concatenate([np.array(s.action_ids) for s in minibatch])
        return Plan(
            collate.tensor(backwards[words.order]),
            words.batch_sizes,
            collate.tensor(rows(simulation.words)),
            collate.tensor(simulation.arcs),
            collate.tensor(ids[actions.order]),
            actions.batch_sizes,
            collate.tensor(actions.sequence),
            simulation.steps(),
            collate.tensor(simulation.tops),
            collate.tensor(rows(simulation.fronts) + 1),
            collate.tensor(past[actions.order]),
            len(minibatch),
        )

    def hand(self, plan: Plan) -> Tensor:
        model = self.model
        words = model.words(plan.words)
        embedded = model.actions(plan.actions)
        buffer = collate.run_lstm(model.buffer_cell, words, plan.word_batch_sizes)
        history = collate.run_lstm(model.action_cell, embedded, plan.action_batch_sizes)
        stack = self.stack_states(plan, words)
        features = torch.cat(
            [
                torch.cat([model.no_stack, stack]).index_select(0, plan.tops),
                torch.cat([model.no_buffer, buffer]).index_select(0, plan.fronts),
                torch.cat([model.no_action, history]).index_select(0, plan.pasts),
            ],
            dim=-1,
        )
        scores = model.score(model.summary(features).relu())
        losses = F.cross_entropy(scores, plan.actions, reduction="none")
        return collate.sum_by(plan.action_sentences, losses, plan.size)

    def stack_states(self, plan: Plan, words: Tensor) -> Tensor:
        """Returns the hidden states of all items, in the order in which they were pushed."""
        model, cell = self.model, self.model.stack_cell
        hidden = cell.hidden_size
        bias = cell.bias_ih + cell.bias_hh
        # Values that do not depend on earlier steps are computed for all steps at once.
        shifted = words.index_select(0, plan.shifted)
        relations = model.compose.weight[:, 2 * EMBEDDING :]
        labels = F.linear(model.actions(plan.arc_actions), relations, model.compose.bias)
        compose = model.compose.weight[:, : 2 * EMBEDDING]
        shifts = [step.shifts for step in plan.steps]
        vectors = words.new_zeros(1, EMBEDDING)  # vectors of the items on stacks
        states = words.new_zeros(1, 2 * hidden)
        hs = []
        for step, pushed, pushed_gates, label in zip(
            plan.steps,
            shifted.split(shifts),
            F.linear(shifted, cell.weight_ih, bias).split(shifts),
            labels.split([step.arcs for step in plan.steps]),
            strict=True,
        ):
            gates = pushed_gates
            if step.arcs:
                pairs = vectors.index_select(0, step.pairs).view(-1, 2 * EMBEDDING)
                composed = torch.addmm(label, pairs, compose.t()).tanh()
                arc_gates = F.linear(composed, cell.weight_ih, bias)
                pushed = torch.cat([pushed, composed]) if step.shifts else composed
                gates = torch.cat([gates, arc_gates]) if step.shifts else arc_gates
            h, c = states.index_select(0, step.below).chunk(2, dim=-1)
            i, f, g, o = torch.addmm(gates, h, cell.weight_hh.t()).chunk(4, dim=-1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            hs.append(h)
            vectors = torch.cat([vectors, pushed]).index_select(0, step.keep)
            states = torch.cat([states, torch.cat([h, c], dim=-1)]).index_select(0, step.keep)
        return torch.cat(hs)
