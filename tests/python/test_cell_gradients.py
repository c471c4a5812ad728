"""Cells that run as one node: gradients of values that several ops read, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_cells import Variant, check_body, compare_with_eager, rows
from torch import Tensor

H = 3
WEIGHT = torch.linspace(-1, 1, 4 * H * H).view(4 * H, H)


def gates(x: Tensor) -> tuple[Tensor, ...]:
    return torch.nn.functional.linear(x, WEIGHT).chunk(4, dim=-1)


def all_parts(x: Tensor) -> Tensor:
    i, f, o, g = gates(x)
    return i.sigmoid() * g.tanh() + f.exp() * o.relu()


def a_part_that_nothing_reads(x: Tensor) -> Tensor:
    i, _, o, g = gates(x)
    return i.sigmoid() * g.tanh() + o


def a_part_twice(x: Tensor) -> Tensor:
    i, f, o, g = gates(x)
    return i.sigmoid() * g.tanh() + f * f + o.tanh() * o.sigmoid()


def a_part_that_is_also_read_in_pieces(x: Tensor) -> Tensor:
    i, f, o, g = gates(x)
    return (i * f + o * g)[..., :2] * i[..., 1:].tanh()


def parts_and_the_whole(x: Tensor) -> Tensor:
    whole = torch.nn.functional.linear(x, WEIGHT)
    i, f, o, g = whole.chunk(4, dim=-1)
    return (i.tanh() * f + o.sigmoid() * g).sum() + whole.tanh().sum()


def rows_of_a_matrix(x: Tensor) -> Tensor:
    first, second = (x.view(H, 1) * x).unbind(0)[:2]
    return first.tanh() * second.sigmoid()


def broadcast_parts(x: Tensor) -> Tensor:
    i, f, o, g = gates(x)
    return (i.view(H, 1) * f.sigmoid()).sum(0) * o.tanh() + g


def a_sum_with_itself(x: Tensor) -> Tensor:
    y = x.tanh()
    return (y + y).sigmoid() + (y + 1)


def sums_of_sums(x: Tensor) -> Tensor:
    i, f, o, g = gates(x)
    return (i.tanh() + f.tanh()) + ((o - g.tanh()) + x)


FUNCTIONS = [
    all_parts,
    a_part_that_nothing_reads,
    a_part_twice,
    a_part_that_is_also_read_in_pieces,
    parts_and_the_whole,
    rows_of_a_matrix,
    broadcast_parts,
    a_sum_with_itself,
    sums_of_sums,
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_parts(function: Callable[[Tensor], Tensor]) -> None:
    check_body(function, [(x,) for x in rows(6, H)])


def test_parts_that_only_some_results_need() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        i, j, o, g = gates(x)
        total = i.sigmoid() + j
        return total * g.tanh(), total, o.tanh() * j

    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(8, H)]
        called = variant.cell(f)
        with variant.block():
            results = [called(x * 1) for x in leaves]
            loss = torch.stack([result[k % 3].sum() for k, result in enumerate(results)]).sum()
            loss = loss + results[0][1].sum()
            del results  # held, one that another is computed from would be an op of its own
        loss.backward()
        return loss, [x.grad for x in leaves]

    compare_with_eager(program)


def test_a_sums_gradient_that_goes_to_several_inputs() -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x + y) + (z + x.tanh())

    calls = list(zip(rows(5, H), rows(5, H), rows(5, H), strict=True))
    check_body(f, calls)


def test_backward_again() -> None:
    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(5, H)]
        called = variant.cell(sums_of_sums)
        with variant.block():
            loss = torch.stack([called(x * 1).sum() for x in leaves]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad for x in leaves]

    compare_with_eager(program)
