"""First calls of a block: weights seen for the first time, in varying orders."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import exactly
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[], Sequence[Tensor]]


def rows(k: int) -> Tensor:
    return torch.sin(torch.arange(4.0) + k).view(1, 4)


def check(loss: Loss, parameters: Sequence[Tensor]) -> None:
    def program(batch: exactly.Blocks) -> list[Tensor | None]:
        for p in parameters:
            p.grad = None
        with batch():
            losses = list(loss())
        torch.stack([x.sum() for x in losses]).sum().backward()
        return [x.detach() for x in losses] + [p.grad for p in parameters]

    exactly.same(program)


def test_layers_in_all_orders() -> None:
    layers = [nn.Linear(4, 4) for _ in range(4)]
    parameters = [p for layer in layers for p in layer.parameters()]
    for order in itertools.permutations(range(4)):
        check(lambda order=order: [layers[i](rows(k)) for k, i in enumerate(order * 2)], parameters)


def test_a_weight_that_is_two_of_one_call() -> None:
    """Tied and separate weights have different keys, whatever numbers the weights get."""
    a, b, c = (nn.Parameter(torch.randn(16, 4)) for _ in range(3))
    bias = nn.Parameter(torch.randn(16))

    def cell(w_ih: Tensor, w_hh: Tensor) -> list[Tensor]:
        return [
            torch.lstm_cell(rows(k), (rows(k + 1), rows(k + 2)), w_ih, w_hh, bias, bias)[0]
            for k in range(3)
        ]

    pairs = [(a, b), (a, a), (b, a), (b, b), (a, c), (c, c), (c, b)]
    for first, second in itertools.product(pairs, repeat=2):
        check(lambda f=first, s=second: cell(*f) + cell(*s), [a, b, c, bias])


@pytest.mark.parametrize("frozen", range(3))
def test_weights_of_which_some_are_frozen(frozen: int) -> None:
    """Frozen weights are numbered separately. Two objects may have the same memory."""
    layers = [nn.Linear(4, 4) for _ in range(3)]
    layers[frozen].requires_grad_(False)
    same = layers[frozen].weight.view(4, 4)
    parameters = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    for order in itertools.permutations(range(3)):
        check(
            lambda order=order: [
                *(layers[i](rows(i)) for i in order),
                *(F.linear(rows(k), same) for k in range(2)),
                *(layers[i](rows(i + 3)) for i in order),
            ],
            parameters,
        )


def test_a_parameter_is_an_operand_first() -> None:
    """A parameter is first an operand and then a weight, or first a weight and then an operand."""
    w, v = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))
    uses: list[Callable[[Tensor], Tensor]] = [
        lambda p: p * 2,
        lambda p: F.linear(rows(1), p),
        lambda p: F.linear(p, p),
        lambda p: rows(2) @ p.t(),
        lambda p: F.embedding(torch.tensor([1, 2]), p),
    ]
    for first, second in itertools.product(uses, repeat=2):
        check(lambda f=first, s=second: [f(w), s(v), f(v), s(w), f(w), s(v)], [w, v])


def test_another_parameter_of_the_same_number() -> None:
    """Opens several blocks, each with different parameters."""
    for k in range(4):
        layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
        modules = [layer, other] if k % 2 else [other, layer]
        check(
            lambda modules=modules: [module(rows(i)) for i, module in enumerate(modules * 2)],
            [*layer.parameters(), *other.parameters()],
        )


def test_data_exchanged_within_a_block() -> None:
    layer = nn.Linear(4, 4)
    datas = [torch.randn(4, 4) for _ in range(3)]

    def loss() -> list[Tensor]:
        losses = []
        for k, data in enumerate(datas * 2):
            layer.weight.data = data.clone()
            losses += [layer(rows(k)), layer(rows(k + 1))]
        return losses

    check(loss, list(layer.parameters()))
