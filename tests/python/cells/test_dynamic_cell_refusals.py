"""Dynamic cells: calls that a program can't repeat are not replayed, and raise no error."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_autobatch as ab
from helpers_dynamic_cells import Counted, Function
from torch import Tensor, nn

DOUBLE = torch.double
WEIGHT = nn.Parameter(torch.ones(4, dtype=DOUBLE))
LAYER = nn.Linear(4, 4, dtype=DOUBLE)


def ones(n: int) -> Tensor:
    return torch.ones(n, 4, dtype=DOUBLE) * 3


def compare(function: Function, calls: list[tuple[Any, ...]], blocks: int = 2) -> None:
    """Compares results and the gradients of LAYER and WEIGHT."""
    parameters = [*LAYER.parameters(), WEIGHT]

    def gradients(found: list[Tensor]) -> Any:
        loss = torch.stack([value.square().sum() for value in found]).sum()
        return torch.autograd.grad(loss, parameters, allow_unused=True)

    cell = ab.cell(function, dynamic=True)
    for _ in range(blocks):
        with ab.batch(adaptive=False):
            found = [cell(*args) for args in calls]
        expected = [function(*args) for args in calls]
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(found), gradients(expected))


# ---------------------------------------------------------------- errors that the function catches


def largest(x: Tensor, kind: Tensor) -> Tensor:
    try:
        count = int(kind[kind > 1].max()) + 1
    except RuntimeError:
        count = 1
    return x * WEIGHT * count


def in_pairs(x: Tensor, kind: Tensor) -> Tensor:
    try:
        return (x * WEIGHT).view(2, -1, 4)
    except RuntimeError:
        return (x * WEIGHT)[None]


def ratio(x: Tensor, kind: Tensor) -> Tensor:
    try:
        count = 12 // int((kind > 1).sum())
    except ZeroDivisionError:
        count = 0
    return x * WEIGHT * (count + 1)


def mean(x: Tensor, kind: Tensor) -> Tensor:
    count = 0
    with contextlib.suppress(ValueError):
        count = int(kind[kind > 1].double().mean())
    return x * WEIGHT * (count + 1)


@pytest.mark.parametrize("function", [largest, in_pairs, ratio, mean])
@pytest.mark.parametrize("order", [1, -1])
def test_an_error_that_is_caught_is_caught_in_each_call(function: Function, order: int) -> None:
    kinds = [[0, 1, 0], [0, 0, 1], [5, 1, 0], [0, 2, 3], [0, 0, 0]]
    sizes = [3, 5, 4, 6, 7]
    calls = [(ones(n), torch.tensor(kind)) for n, kind in zip(sizes, kinds, strict=True)]
    compare(function, calls[::order])


# ---------------------------------------------------------------- writes without autograd

WRITES: dict[str, Callable[[Tensor], Any]] = {
    "clamp_": lambda h: h.clamp_(-0.5, 0.5),
    "mul_": lambda h: h.mul_(2.0),
    "masked_fill_": lambda h: h.masked_fill_(h > 0, 0.25),
    "index_add_": lambda h: h.index_add_(0, torch.tensor([0]), torch.ones(1, 4, dtype=DOUBLE)),
    "/=": lambda h: h.__itruediv__(2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_without_autograd_keeps_the_gradient(name: str) -> None:
    def function(x: Tensor) -> Tensor:
        h = LAYER(x) * 1
        with torch.no_grad():
            WRITES[name](h)
        return h * 3 + x * WEIGHT

    compare(function, [(ones(n),) for n in (3, 5, 4, 6)])


# ---------------------------------------------------------------- spellings

SPELLINGS: dict[str, Callable[[Tensor], Any]] = {
    "chunk": lambda h: torch.chunk(input=h, chunks=2)[0],
    "chunk, dim first": lambda h: torch.chunk(h, dim=1, chunks=2)[0],
    "split": lambda h: torch.split(h, split_size_or_sections=2, dim=1)[0],
    "squeeze": lambda h: torch.squeeze(input=h),
    "unbind": lambda h: torch.unbind(input=h)[0],
    "index_put_": lambda h: h.clone().index_put_(
        indices=(torch.tensor([0]),), values=torch.ones(1, 4, dtype=DOUBLE)
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("has_effect", [False, True])
def test_arguments_by_keyword(name: str, has_effect: bool) -> None:
    calls = torch.zeros(())

    def function(x: Tensor) -> Tensor:
        if has_effect:
            calls.add_(1)
        result: Tensor = SPELLINGS[name](LAYER(x) * WEIGHT)
        return result * 2

    compare(function, [(ones(n),) for n in (3, 5, 4, 6)])


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("length", [1, 3, 7])
@pytest.mark.parametrize("use", ["take", "columns", "put", "fill"])
def test_a_mask_of_another_length_is_an_error_still(use: str, length: int) -> None:
    def function(x: Tensor, mask: Tensor) -> Tensor:
        h = LAYER(x) * WEIGHT
        if use == "take":
            return h[mask]
        if use == "columns":
            return h.mT.contiguous()[:, mask]
        h = h.clone() if use == "put" else h.sum(1)
        h[mask] = x[0, 0] * torch.ones(int(mask.sum()), 4, dtype=DOUBLE) if use == "put" else 0.0
        return h

    cell = ab.cell(function, dynamic=True)
    with ab.batch(adaptive=False):
        for n in (5, 6, 5, 6):
            cell(ones(n), torch.ones(n, dtype=torch.bool))
    with pytest.raises(IndexError), ab.batch(adaptive=False):
        cell(ones(5), torch.ones(length, dtype=torch.bool))


def test_arrays_of_numpy_are_read_in_each_call() -> None:
    index = np.array([0, 1])

    def function(x: Tensor, kind: Tensor) -> Tensor:
        return LAYER(x)[: int(kind[index].sum()) + 1] * WEIGHT

    calls = [(ones(n), torch.arange(n) % 3) for n in (5, 6, 7, 8)]
    for start in range(3):
        index[:] = [start, start + 1]
        compare(function, calls)


def test_zero_and_minus_zero_are_different_numbers() -> None:
    def function(x: Tensor, t: Tensor) -> Tensor:
        return x * WEIGHT * math.copysign(1.0, t.tolist()[0])

    numbers = [0.0, 0.0, -0.0, 0.0, -0.0]
    compare(function, [(ones(3 + k), torch.tensor([n])) for k, n in enumerate(numbers)])


def test_a_number_in_an_attribute_is_stored_in_each_call() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.largest, self.seen = 0, 0

        def forward(self, x: Tensor, kind: Tensor) -> Tensor:
            self.largest = int(kind.max()) + 1
            self.seen = self.seen + int((kind > 4).sum())
            return x * WEIGHT * self.largest

    counts = [3, 3, 3, 3, 2, 7, 7, 5, 3]
    plain, cell = Counting(), ab.cell(Counting(), dynamic=True)
    with ab.batch(adaptive=False):
        for k, count in enumerate(counts):
            args = ones(3 + k % 4), torch.tensor([0, count])
            torch.testing.assert_close(cell(*args), plain(*args))
            assert (cell.largest, cell.seen) == (plain.largest, plain.seen)


def test_a_masked_write_of_one_element_converts_its_dtype() -> None:
    def function(x: Tensor) -> Tensor:
        out = torch.zeros(3)  # float
        out[torch.tensor([False, True, False])] = (LAYER(x) * WEIGHT)[0, :1]
        return out

    with ab.batch(adaptive=False):
        found = [function(ones(n)) for n in (3, 4)]
    torch.testing.assert_close(found, [function(ones(n)) for n in (3, 4)])


def test_calls_with_other_numbers_each_time_are_soon_not_traced() -> None:
    counted = Counted(lambda x, n: (x * n).tanh().sum())
    cell = ab.cell(counted, dynamic=True)
    x = torch.randn(3, 4, requires_grad=True)
    for block in range(5):
        with ab.batch(adaptive=False) as scope:
            found = [cell(x, block + i / 32) for i in range(32)]
    torch.testing.assert_close(found, [(x * (4 + i / 32)).tanh().sum() for i in range(32)])
    assert any("no earlier call" in each.reason for each in scope.report().at_once)


def test_a_pending_tensor_among_the_constants_is_not_printed() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    kept: list[Tensor] = []

    def function(x: Tensor) -> Tensor:
        kept.append(x.exp())
        return (x @ weight + kept[len(kept) // 2].sum()).tanh()

    cell = ab.cell(function, dynamic=True)
    with ab.batch(adaptive=False) as scope:
        found = [cell(torch.randn(n, 4) @ weight) for n in (2, 3, 4, 5, 6)]
    assert len(found) == 5
    assert len(scope.report().flushes) == 1
