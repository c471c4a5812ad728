"""Code that the tests of capture share."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _C

DOUBLE = torch.float64


Batch = Callable[[], ab.batch]


def flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def assert_as_eager(program: Callable[[Batch], Any], tolerance: float = 1e-9) -> None:
    """Asserts that the program returns the same with and without batching."""
    outcomes = []
    for enabled in (False, True):
        torch.manual_seed(0)
        outcomes.append(flat(program(lambda enabled=enabled: ab.batch(enabled=enabled))))
    expected, results = outcomes
    assert len(results) == len(expected)
    for i, (result, other) in enumerate(zip(results, expected, strict=True)):
        if isinstance(other, Tensor):
            assert type(result) is type(other)
            torch.testing.assert_close(
                result.detach(), other.detach(), rtol=tolerance, atol=tolerance, check_stride=True
            )
        else:
            assert result == other, f"result {i}"


def weight(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(sizes or (3, 3), dtype=DOUBLE))


def inputs(count: int = 4) -> list[Tensor]:
    return [torch.randn(3, dtype=DOUBLE) for _ in range(count)]


def rand(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=DOUBLE)


def line() -> int:
    """Returns the caller's line number."""
    return sys._getframe(1).f_lineno


def is_pending(tensor: Tensor) -> bool:
    return _C.capture_key in str(torch._C._dispatch_keys(tensor))


def works(linear: nn.Linear) -> None:
    """Asserts that the previous block has no effect on the next one."""
    xs = [rand(n, 3) for n in (1, 4, 2)]
    with ab.batch() as scope:
        results = [linear(x).tanh() for x in xs]
    assert scope.report().batches == 2
    for x, result in zip(xs, results, strict=True):
        assert not is_pending(result)
        torch.testing.assert_close(result, linear(x).tanh())
