"""Numbers that differ between the examples of a block (`x / n`): one batch for all numbers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch_autobatch as ab
from helpers_switches import uses
from torch import Tensor, nn

pytestmark = pytest.mark.needs("varying_numbers")

SWITCH = "varying_numbers"
WIDTH = 5
NUMBERS = tuple(range(2, 26))

Function = Callable[[Tensor, int], Tensor]


def layer(dtype: torch.dtype = torch.double) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, dtype=dtype)


def examples(dtype: torch.dtype = torch.double) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(1 + n % 4, WIDTH, dtype=dtype) for n in NUMBERS]


FUNCTIONS: dict[str, Function] = {
    "x * n": lambda x, n: x * n,
    "n * x": lambda x, n: n * x,
    "x / n": lambda x, n: x / n,
    "x + n": lambda x, n: x + n,
    "x - n": lambda x, n: x - n,
    "n - x": lambda x, n: n - x,
    "n / x": lambda x, n: n / x,
    "x * float": lambda x, n: x * (n / 3),
    "x / float": lambda x, n: x / (n / 3),
    "alpha": lambda x, n: torch.add(x, n, alpha=2),
    "floor_divide": lambda x, n: x + (x.detach() * 9) // n,
    "remainder": lambda x, n: x % (n / 10),
    "in place": lambda x, n: (x + 1).div_(n),
    "in place, a comparison": lambda x, n: x * (x * n).lt_(n / 3),
    "where": lambda x, n: torch.where(x > 0, x, n / 7),
    "where, left": lambda x, n: torch.where(x > 0, n / 7, x),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n / 7),
    "masked_fill_": lambda x, n: (x + 1).masked_fill_(x > 0, n / 7),
    "mean by hand": lambda x, n: x.sum(0) / x.size(0) ** 0.5 + x.sum(0) / n,
    "temperature": lambda x, n: (x / n).softmax(-1),
    "lt": lambda x, n: x * (x * 9 < n),
    "gt": lambda x, n: x * (x > n / 30),
    "eq": lambda x, n: x * (x.argmax(1, keepdim=True) == n % 5),
    "integers": lambda x, n: x * (x.argmax(1, keepdim=True) * n + n),
    "integers by a float": lambda x, n: x * (x.argmax(1, keepdim=True) * (n / 3)),
    "integers divided": lambda x, n: x * (x.argmax(1, keepdim=True) / n),
    "no dimensions": lambda x, n: x.sum() * n,
    "booleans": lambda x, n: x * ((x > 0) * n),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_later_blocks_have_one_batch_for_all_numbers(name: str) -> None:
    function, linear = FUNCTIONS[name], layer()

    def run(enabled: bool) -> tuple[list[Tensor], list[Tensor], int]:
        with ab.batch(enabled=enabled, adaptive=False) as scope:
            found = [function(linear(x), n) for x, n in zip(examples(), NUMBERS, strict=True)]
        loss = torch.stack([value.square().sum() for value in found]).sum()
        return found, list(torch.autograd.grad(loss, linear.parameters())), scope.report().batches

    expected = run(False)[:2]
    for _ in range(2):
        *found, batches = run(True)
        torch.testing.assert_close(found, list(expected))
    assert batches < 16


def test_results_have_the_dtype_of_eager_mode() -> None:
    linear = layer(torch.float32)
    functions: list[Function] = [
        lambda x, n: x * n,
        lambda x, n: x.argmax(1) * n,
        lambda x, n: x.argmax(1) * (n / 3),
        lambda x, n: x.argmax(1) / n,
        lambda x, n: x.argmax(1).int() * n,
        lambda x, n: (x > 0) * n,
        lambda x, n: (x > 0).sum() * (n / 3),
        lambda x, n: x.double() * n,
        lambda x, n: x.argmax(1).int()[0] * n,
    ]
    for function in functions:
        for enabled in (True, True, False):
            with ab.batch(enabled=enabled, adaptive=False):
                values = [
                    function(linear(x), n)
                    for x, n in zip(examples(torch.float32), NUMBERS, strict=True)
                ]
            if enabled:
                found = values
        torch.testing.assert_close(found, values, rtol=1e-5, atol=1e-6)
        assert [each.dtype for each in found] == [each.dtype for each in values]


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_lower_precision_computes_with_the_whole_number(dtype: torch.dtype) -> None:
    linear = layer(dtype)
    before = uses(SWITCH)
    for enabled in (True, True, False):
        with ab.batch(enabled=enabled, adaptive=False):
            values = [linear(x) * (n / 7) for x, n in zip(examples(dtype), NUMBERS, strict=True)]
        if enabled:
            found = values
    torch.testing.assert_close(found, values)
    assert uses(SWITCH) == before


def test_numbers_that_did_not_occur_before_join_the_batch() -> None:
    linear = layer()
    for block in range(3):
        numbers = [block + n / 31 for n in NUMBERS]
        with ab.batch(adaptive=False) as scope:
            found = [linear(x[:1]) * n for x, n in zip(examples(), numbers, strict=True)]
        expected = [linear(x[:1]) * n for x, n in zip(examples(), numbers, strict=True)]
        torch.testing.assert_close(found, expected)
    assert scope.report().batches < 6


def in_new_thread(function: Callable[[], None]) -> None:
    """Calls a function in a thread for which no numbers are known to vary."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


def test_a_number_that_all_examples_share_stays_a_number() -> None:
    in_new_thread(share_a_number)


def share_a_number() -> None:
    linear = layer()
    for _ in range(3):
        before = uses(SWITCH)
        with ab.batch(adaptive=False):
            found = [
                linear(x) * 0.625 + linear(x).sin() * n
                for x, n in zip(examples(), NUMBERS, strict=True)
            ]
    torch.testing.assert_close(
        found,
        [linear(x) * 0.625 + linear(x).sin() * n for x, n in zip(examples(), NUMBERS, strict=True)],
    )
    assert uses(SWITCH) - before == len(NUMBERS)


@pytest.mark.parametrize("others_vary", [False, True])
def test_numbers_of_successive_steps_stay_numbers(others_vary: bool) -> None:
    """All examples have the same number at one step, so their nodes share a batch anyway."""

    def run() -> None:
        for block in range(3 if others_vary else 0):
            with ab.batch(adaptive=False):
                kept = [layer()(x[:1]) * (block + i / 31) for i, x in enumerate(examples())]
            assert kept
        take_steps()

    in_new_thread(run)


def take_steps() -> None:
    linear = layer()
    for _ in range(3):
        before = uses(SWITCH)
        with ab.batch(adaptive=False) as scope:
            states = [linear(x[:1]) for x in examples()]
            for step in range(12):
                states = [(state * (1.5 + step / 17)).sin() for state in states]
    assert uses(SWITCH) == before
    assert scope.report().batches < 30


def test_a_dynamic_cell() -> None:
    linear = layer()

    def mean(x: Tensor) -> Tensor:
        return (linear(x).tanh().sum(0) / x.size(0)) * (x.size(0) + 1)

    cell = ab.cell(mean, dynamic=True)
    xs = [torch.randn(n, WIDTH, dtype=torch.double) for n in NUMBERS]
    for _ in range(4):
        with ab.batch(adaptive=False) as scope:
            found = [cell(x) for x in xs]
    torch.testing.assert_close(found, [mean(x) for x in xs])
    assert scope.report().batches < 12


def test_a_map_and_verify() -> None:
    linear = layer()

    def function(x: Tensor, n: int) -> Tensor:
        return linear(x).sum(0) / n

    for _ in range(3):
        with ab.batch(adaptive=False, verify=True):
            found = ab.map(function, examples(), NUMBERS)
    expected = [function(x, n) for x, n in zip(examples(), NUMBERS, strict=True)]
    torch.testing.assert_close(found, expected)


def test_huge_numbers() -> None:
    """A number that float32 cannot hold is infinite in eager mode."""
    linear = layer(torch.float32)
    for enabled in (True, True, False):
        with ab.batch(enabled=enabled, adaptive=False):
            values = [
                linear(x) * 10.0 ** (n + 30)
                for x, n in zip(examples(torch.float32), NUMBERS, strict=True)
            ]
        if enabled:
            found = values
    torch.testing.assert_close(found, values)
