"""h' of an LSTM cell depends on its c', although one node computes both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from exactly import Blocks, rand, same
from torch import Tensor, nn

LENGTHS = (1, 4, 2)


def sentences() -> list[Tensor]:
    return [rand(t, 1, 3).requires_grad_() for t in LENGTHS]


def encode(cell: nn.LSTMCell, sentence: Tensor) -> list[tuple[Tensor, Tensor]]:
    states, state = [], None
    for x in sentence:
        state = cell(x, state)
        states.append(state)
    return states


def gradient_of_cell_state(block: Blocks) -> Any:
    cell, xs = nn.LSTMCell(3, 2).double(), sentences()
    with block():
        states = [encode(cell, x) for x in xs]
        loss = sum(h.square().sum() for s in states for h, _ in s)
    cs = [c for s in states for _, c in s]
    hs = [h for s in states for h, _ in s]
    return torch.autograd.grad(loss, [*cs, *hs, *xs, *cell.parameters()])


def only_the_last_is_held(block: Blocks) -> Any:
    cell, xs = nn.LSTMCell(3, 2).double(), sentences()
    with block():
        last = [encode(cell, x)[-1] for x in xs]
        loss = sum((h * c.tanh()).sum() + h.sum() for h, c in last)
    for _, c in last:
        c.retain_grad()
    loss.backward()
    return [c.grad for _, c in last], [x.grad for x in xs], [p.grad for p in cell.parameters()]


def hooks_of_cell_state(block: Blocks) -> Any:
    cell, xs = nn.LSTMCell(3, 2).double(), sentences()
    seen: list[Tensor] = []
    with block():
        states = [encode(cell, x) for x in xs]
        loss = sum(s[-1][0].sum() for s in states)
    for s in states:
        s[-1][1].register_hook(lambda g: seen.append(g.clone()) or g * 2)
    loss.backward()
    return sorted(seen, key=lambda g: g.sum().item()), [p.grad for p in cell.parameters()]


def parts_of_cell_state(block: Blocks) -> Any:
    """Tests views of c', and h' that is read through a view."""
    cell, xs = nn.LSTMCell(3, 2).double(), sentences()
    with block():
        states = [encode(cell, x)[-1] for x in xs]
        halves = [(h[:, :1], c[:, 1:]) for h, c in states]
        del states
        loss = sum((h * c).sum() for h, c in halves)
    return torch.autograd.grad(loss, [c for _, c in halves] + xs + list(cell.parameters()))


def one_instance_differentiated(block: Blocks) -> Any:
    cell, xs = nn.LSTMCell(3, 2).double(), sentences()
    with block():
        states = [encode(cell, x)[-1] for x in xs]
        losses = [h.sum() for h, _ in states]
    inputs = [states[1][1], xs[1], xs[0], *cell.parameters()]
    return torch.autograd.grad(losses[1], inputs, allow_unused=True)


def second_derivative(block: Blocks) -> Any:
    cell, xs = nn.LSTMCell(3, 2).double(), sentences()
    with block():
        states = [encode(cell, x)[-1] for x in xs]
        loss = sum(h.square().sum() for h, _ in states)
    cs = [c for _, c in states]
    first = torch.autograd.grad(loss, [*cs, *xs], create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return first, [x.grad for x in xs], [p.grad for p in cell.parameters()]


def output_let_go(block: Blocks) -> Any:
    cell, xs = nn.LSTMCell(3, 2).double(), sentences()
    with block():
        cs = [encode(cell, x)[-1][1] for x in xs]
    sum(c.square().sum() for c in cs).backward()
    return cs, [p.grad for p in cell.parameters()]


@pytest.mark.parametrize(
    "program",
    [
        gradient_of_cell_state,
        only_the_last_is_held,
        hooks_of_cell_state,
        parts_of_cell_state,
        one_instance_differentiated,
        second_derivative,
        output_let_go,
    ],
)
def test_cell_state(program: Any) -> None:
    report = same(program)
    steps = [row for row in report.signatures if row.op == "aten::lstm_cell"]
    assert max(row.largest for row in steps) == len(LENGTHS)  # instances are batched
