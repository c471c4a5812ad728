"""Code that the tests of dynamic cells share: functions that count runs, and a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor, nn

WIDTH = 6
SIZES = (3, 7, 5, 2, 9, 4, 1, 8)

Function = Callable[..., Any]


def rows(dtype: torch.dtype = torch.double) -> list[Tensor]:
    return [torch.randn(n, WIDTH, dtype=dtype) for n in SIZES]


class Counted:
    """A function that counts its runs."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.function(*args, **kwargs)


def compare(function: Function, calls: list[tuple[Any, ...]], **options: Any) -> tuple[int, str]:
    """Compares the calls with eager mode. Returns the number of runs in the block, and a reason."""
    counted = Counted(function)
    cell = ab.cell(counted, dynamic=True)
    with ab.batch(**options) as scope:
        found = [cell(*args) for args in calls]
    torch.testing.assert_close(found, [function(*args) for args in calls])
    plain = [row.reason for row in scope.report().at_once if row.reason.startswith("captured op")]
    return counted.runs, plain[0] if plain else ""


def alone(xs: list[Tensor]) -> list[tuple[Tensor]]:
    return [(x,) for x in xs]


def attention(x: Tensor) -> Tensor:
    n, width = x.shape
    heads = x.view(n, 2, width // 2).transpose(0, 1)
    scores = heads @ heads.transpose(1, 2) / math.sqrt(width // 2)
    mask = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
    weights = scores.masked_fill(mask, -1e9).softmax(-1)
    positions = torch.arange(n, dtype=x.dtype)[:, None] / 10
    return (weights @ heads).transpose(0, 1).reshape(n, -1) + positions


def run(model: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    with ab.batch():
        return [model(x) for x in xs]
