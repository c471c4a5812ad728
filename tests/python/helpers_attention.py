"""Attention over instances of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_autobatch as ab
from helpers_rules import DOUBLE, check, rand, rules_of
from torch import Tensor

LENGTHS = [5, 9, 5, 1, 12, 5, 2]
SDPA = "aten::scaled_dot_product_attention"


def batches_of(report: ab.Report, op: str) -> int:
    return sum(s.batches for s in report.signatures if s.op == op)


def heads(
    length: int, count: int = 3, dtype: torch.dtype = DOUBLE, width: int = 8
) -> tuple[Tensor, ...]:
    return tuple(rand(2, 3, length, width, dtype=dtype) for _ in range(count))


def check_native(function: Callable[..., Any], *instances: Any) -> None:
    report = check(function, *instances)
    assert rules_of(report)[SDPA] == "native", report
    assert batches_of(report, SDPA) == 1, report
    assert not report.at_once, report
