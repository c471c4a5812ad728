"""Numbers that differ between the examples of a block (`x / n`): one batch for all numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def in_new_thread(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in a thread that has not found any numbers that vary."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(test, *args, **kwargs).result()

    return run


def layer(dtype: torch.dtype = torch.double) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, dtype=dtype)


def examples(dtype: torch.dtype = torch.double) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(n, WIDTH, dtype=dtype) for n in NUMBERS]


FUNCTIONS: dict[str, Function] = {
    "x * n": lambda x, n: x * n,
    "n * x": lambda x, n: n * x,
    "x / n": lambda x, n: x / n,
    "x + n": lambda x, n: x + n,
    "x - n": lambda x, n: x - n,
    "n / x": lambda x, n: n / x,
    "x * float": lambda x, n: x * (n / 3),
    "x / float": lambda x, n: x / (n / 3),
    "alpha": lambda x, n: torch.add(x, n, alpha=2),
    "remainder": lambda x, n: x % (n / 10),
    "in place": lambda x, n: (x + 1).div_(n),
    "in place, a comparison": lambda x, n: x * (x * n).lt_(n / 3),
    "where": lambda x, n: torch.where(x > 0, x, n / 7),
    "where, left": lambda x, n: torch.where(x > 0, n / 7, x),
    "mean by hand": lambda x, n: x.sum(0) / x.size(0) ** 0.5 + x.sum(0) / n,
    "temperature": lambda x, n: (x / n).softmax(-1),
    "lt": lambda x, n: x * (x * 9 < n),
    "gt": lambda x, n: x * (x > n / 30),
    "eq": lambda x, n: x * (x.argmax(1, keepdim=True) == n % 5),
    "integers": lambda x, n: x * (x.argmax(1, keepdim=True) * n + n),
    "integers divided": lambda x, n: x * (x.argmax(1, keepdim=True) / n),
    "no dimensions": lambda x, n: x.sum() * n,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@in_new_thread
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


@in_new_thread
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
@in_new_thread
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


@in_new_thread
def test_guesses_stop() -> None:
    """A new number of an op whose numbers vary is passed as a tensor at first."""
    linear = layer()
    for block in range(3):
        with ab.batch(adaptive=False):
            kept = [linear(x) * (block + n / 31) for x, n in zip(examples(), NUMBERS, strict=True)]
        assert kept
    for _ in range(4):
        before = uses(SWITCH)
        with ab.batch(adaptive=False):
            kept = [linear(x) * 0.625 for x in examples()]
    assert uses(SWITCH) == before


@in_new_thread
@pytest.mark.needs("common_subexpressions")
def test_functions_of_parameters_are_still_computed_once() -> None:
    """Calls with the same number are recognised, although the number is a tensor."""
    linear = layer()
    for _ in range(3):
        with ab.batch(adaptive=False) as scope:
            found = [
                x @ (linear.weight * n).tanh() + x @ (linear.weight * n).tanh()
                for x, n in zip(examples(), NUMBERS, strict=True)
            ]
    expected = [
        x @ (linear.weight * n).tanh() * 2 for x, n in zip(examples(), NUMBERS, strict=True)
    ]
    torch.testing.assert_close(found, expected)
    assert scope.report().passes.get("common_subexpressions", 0) >= 2 * len(NUMBERS)


@in_new_thread
def test_numbers_that_did_not_occur_before_join_the_batch() -> None:
    linear = layer()
    for block in range(3):
        numbers = [block + n / 31 for n in NUMBERS]
        with ab.batch(adaptive=False) as scope:
            found = [linear(x[:1]) * n for x, n in zip(examples(), numbers, strict=True)]
        expected = [linear(x[:1]) * n for x, n in zip(examples(), numbers, strict=True)]
        torch.testing.assert_close(found, expected)
    assert scope.report().batches < 6


@in_new_thread
def test_a_number_that_all_examples_share_stays_a_number() -> None:
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


@in_new_thread
def test_numbers_of_successive_steps_stay_numbers() -> None:
    """All examples have the same number at one step, so their nodes share a batch anyway."""
    linear = layer()
    for _ in range(3):
        before = uses(SWITCH)
        with ab.batch(adaptive=False) as scope:
            states = [linear(x[:1]) for x in examples()]
            for step in range(12):
                states = [(state * (1.5 + step / 17)).sin() for state in states]
    assert uses(SWITCH) == before
    assert scope.report().batches < 30


@in_new_thread
def test_calls_that_were_captured_with_the_number_before() -> None:
    linear, xs = layer(), [x[:1] for x in examples()]

    def scaled() -> ab.Report:
        with ab.batch(adaptive=False) as scope:
            kept = [linear(x) * n for x, n in zip(xs, NUMBERS, strict=True)]
        assert kept
        return scope.report()

    with torch.no_grad():
        for x, n in zip(xs, NUMBERS, strict=True):  # too few examples to find that numbers vary
            with ab.batch(adaptive=False):
                linear(x) * n
    assert scaled().batches > len(NUMBERS)
    with torch.no_grad():
        assert scaled().batches > len(NUMBERS)
        assert scaled().batches < 6


@in_new_thread
def test_numbers_of_many_examples_stay_numbers() -> None:
    linear = layer()
    before = uses(SWITCH)
    for _ in range(3):
        with ab.batch(adaptive=False):
            found = [linear(x) * (i % 6 + 2) for _ in range(4) for i, x in enumerate(examples())]
    assert len(found) == 4 * len(NUMBERS)
    assert uses(SWITCH) == before


@in_new_thread
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


@in_new_thread
def test_a_map_and_verify() -> None:
    linear = layer()

    def function(x: Tensor, n: int) -> Tensor:
        return linear(x).sum(0) / n

    for _ in range(3):
        with ab.batch(adaptive=False, verify=True):
            found = ab.map(function, examples(), NUMBERS)
    expected = [function(x, n) for x, n in zip(examples(), NUMBERS, strict=True)]
    torch.testing.assert_close(found, expected)


@in_new_thread
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


OVERLOADS: dict[str, Function] = {
    "both sides of where": lambda x, n: torch.where(torch.where(x > 0, x, n / 7) > 0, n / 3, x),
    "mul.Scalar and mul.Tensor": lambda x, n: torch.ops.aten.mul.Scalar(x + 1, n / 3) * (n / 7),
    "sub.Scalar and sub.Tensor": lambda x, n: torch.ops.aten.sub.Scalar(x, n / 3) - n / 7,
}


@pytest.mark.parametrize("name", OVERLOADS)
@in_new_thread
def test_several_overloads_of_an_op(name: str) -> None:
    function, linear = OVERLOADS[name], layer()
    for _ in range(3):
        with ab.batch(adaptive=False) as scope:
            found = [function(linear(x), n) for x, n in zip(examples(), NUMBERS, strict=True)]
        expected = [function(linear(x), n) for x, n in zip(examples(), NUMBERS, strict=True)]
        torch.testing.assert_close(found, expected)
    assert scope.report().batches < 12
