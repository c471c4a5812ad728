"""Ops of linear algebra that fail for some values, in programs that catch the error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor

SHIFTS = (1.0, 2.0, 0.5)


def matrices() -> list[Tensor]:
    weight = torch.ones(3, 3, dtype=torch.float64, requires_grad=True)
    return [-s * torch.eye(3, dtype=torch.float64) * weight for s in SHIFTS]


def with_jitter(k: Tensor) -> tuple[Tensor, float]:
    jitter = 0.0
    for _ in range(6):
        try:
            shifted = k + jitter * torch.eye(3, dtype=k.dtype)
            return torch.linalg.cholesky(shifted).sum(), jitter
        except torch.linalg.LinAlgError:
            jitter = max(10 * jitter, 1.0)
    raise AssertionError


def in_a_callee(k: Tensor) -> Tensor:
    return torch.linalg.inv(k).sum()


def with_a_default(k: Tensor) -> tuple[Tensor, float]:
    with contextlib.suppress(RuntimeError):
        return in_a_callee(k * 0), 1.0
    return k.sum(), 0.0


@pytest.mark.parametrize("function", [with_jitter, with_a_default])
def test_the_error_is_raised_where_the_program_catches_it(
    function: Callable[[Tensor], tuple[Tensor, float]],
) -> None:
    expected = [function(k) for k in matrices()]
    with ab.batch(adaptive=False):
        in_block = [function(k) for k in matrices()]
    in_map = ab.map(function, matrices())
    for found in (in_block, in_map):
        assert [value for _, value in found] == [value for _, value in expected]
        for (one, _), (other, _) in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_ops_whose_error_is_not_caught_wait() -> None:
    with ab.batch(adaptive=False) as scope:
        kept = [torch.linalg.cholesky(k @ k.mT) for k in matrices()]
    assert len(scope.report().flushes) == 1, kept


def test_a_handler_around_the_block_does_not_count() -> None:
    try:
        with ab.batch(adaptive=False) as scope:
            kept = [torch.linalg.cholesky(k @ k.mT) for k in matrices()]
    except torch.linalg.LinAlgError:
        pytest.fail("no matrix is singular")
    assert len(scope.report().flushes) == 1, kept


@pytest.mark.parametrize(
    "op", [torch.linalg.pinv, torch.pinverse, torch.linalg.cond, torch.linalg.matrix_rank]
)
def test_ops_that_call_a_decomposition(op: Callable[[Tensor], Tensor]) -> None:
    def one(k: Tensor) -> bool:
        try:
            op(k * float("nan"))
        except RuntimeError:
            return True
        return False

    with ab.batch(adaptive=False):
        found = [one(k) for k in matrices()]
    assert found == [one(k) for k in matrices()]
