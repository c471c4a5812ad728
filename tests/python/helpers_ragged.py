"""Cases of ops over instances of different lengths, and the number of their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_autobatch as ab
from helpers_rules import check, rand

WIDTH = 4
LENGTHS = [3, 1, 3, 7, 2, 3]  # four distinct lengths, including a single row
SAME = [3] * 6

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """``function(*parameters, *make(length))`` for each instance."""

    function: Function
    make: Callable[[int], Any] = lambda n: rand(n, WIDTH)
    parameters: Sequence[tuple[int, ...]] = ()
    empty: bool = True  # whether eager accepts an instance without rows, and it joins the batch
    # Whether an instance of one row joins the batch. ([1, k, W] looks like a minibatch of one.)
    one: bool = True


def batches(case: Case, lengths: Sequence[int]) -> ab.Report:
    torch.manual_seed(1)
    parameters = [rand(*sizes) for sizes in case.parameters]
    return check(case.function, *[case.make(n) for n in lengths], parameters=parameters)


def check_lengths(case: Case) -> None:
    """Checks that four lengths need as many batches as one. Instances with one row or none join."""
    equal, mixed = batches(case, SAME), batches(case, LENGTHS)
    assert not mixed.at_once, mixed
    assert mixed.launches == equal.launches + (not case.one), mixed
    two = batches(case, [1 if case.one else 2, 7])
    assert two.launches == batches(case, [7]).launches, two
    # New lengths need no trial run of an op.
    assert batches(case, [5, 9, 4, 11, 5, 6]).inferred == 0
    if case.empty:
        with_none = batches(case, [3, 0, 1 if case.one else 2, 7, 0, 3])
        assert with_none.launches == equal.launches, with_none
