"""The arguments of ``map``, and its report."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

linear = nn.Linear(4, 3)


def test_its_arguments_have_names() -> None:
    assert ab.map(fn=lambda x: x + 1, instances=[1, 2]) == [2, 3]


@pytest.mark.parametrize("enabled", [True, False])
def test_several_iterables_as_the_builtin(enabled: bool) -> None:
    assert ab.map(lambda x, y: x + y, [1, 2, 3], [10, 20], enabled=enabled) == [11, 22]


@pytest.mark.parametrize("enabled", [True, False])
def test_tuples_are_unpacked(enabled: bool) -> None:
    def score(x: Tensor, times: int) -> Tensor:
        h = linear(x)
        return h * times if h.sum() < 1e9 else h

    pairs = [(torch.randn(4), n) for n in range(3)]
    expected = [score(*pair) for pair in pairs]
    torch.testing.assert_close(ab.map(score, pairs, unpack=True, enabled=enabled), expected)


def test_an_error_names_unpack() -> None:
    with pytest.raises(TypeError) as error:
        ab.map(lambda x, y: x + y, [(1, 2)])  # type: ignore[call-arg]
    assert any("unpack=True" in note for note in error.value.__notes__)


async def awaits(x: Tensor) -> Tensor:
    return x


class Awaits:
    async def __call__(self, x: Tensor) -> Tensor:
        return x


def coroutine_of(x: Tensor) -> Any:
    return awaits(x)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((awaits, [1]), {}, "map\\(\\) can't run the async function 'awaits'"),
        ((partial(awaits), [1]), {}, "map\\(\\) can't run the async function 'awaits'"),
        ((Awaits(), [1]), {}, "map\\(\\) can't run the async function 'Awaits'"),
        ((coroutine_of, [1, 2]), {}, "map\\(\\) can't run 'coroutine_of': .* returned a coroutine"),
        ((divmod, [(1, 2)], [3]), {"unpack": True}, "takes one iterable of tuples, but got 2 "),
        (([1], abs), {}, "map\\(\\): expected a function as the first argument, got \\[1\\]"),
        ((abs, [1]), {"max_live": 2.5}, "map\\(max_live=2.5\\): expected a whole number"),
        ((abs, [1]), {"unpack": "no"}, "map\\(unpack='no'\\): expected True or False$"),
        ((abs, [1]), {"enabled": "no"}, "map\\(enabled='no'\\): expected True or False$"),
        ((abs, [1]), {"verify": "no"}, "batch\\(verify='no'\\): expected True or False$"),
    ],
)
def test_arguments_of_another_type(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ab.map(*arguments, **options)


def test_it_takes_the_options_of_batch() -> None:
    @ab.cell
    def head(x: Tensor) -> Tensor:
        return linear(x).tanh()

    def run(i: int) -> Tensor:
        return head(torch.full((4,), float(i)))

    expected = [run(i) for i in range(3)]
    for options in ({"granularity": "op"}, {"check_cells": True}, {"profile": True}):
        torch.testing.assert_close(ab.map(run, range(3), **options), expected)  # type: ignore[arg-type]
    assert ab.last_report().trace is not None


def test_the_last_report() -> None:
    x = torch.ones(4)
    ab.map(lambda i: linear(x), range(5))
    report = ab.last_report()
    assert (report.nodes, report.launches) == (5, 1)
    with ab.batch() as scope:
        kept = [linear(torch.ones(4)).tanh() for _ in range(2)]
    assert ab.last_report() == scope.report() != report
    assert len(kept) == 2
    with pytest.raises(ValueError, match="mine"):
        ab.map(fails, range(5))
    assert ab.last_report().ops > 0
    reports = []
    thread = threading.Thread(target=lambda: reports.append(ab.last_report()))
    thread.start()
    thread.join()
    assert reports == [ab.Report()]


def fails(i: int) -> None:
    if linear(torch.ones(4)).sum() < 1e9:
        raise ValueError("mine")
