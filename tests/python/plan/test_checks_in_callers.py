"""Checks of a tensor that a function returns early: `if not x.all(): return x`."""

# ruff: noqa: PT012  (a block that fails is of several statements)

from __future__ import annotations

from collections.abc import Callable, Iterator

import helpers_checks as cases
import pytest
import torch
import torch.distributions as D
import torch_autobatch as ab
from helpers_checks import InvalidError
from torch import Tensor
from torch_autobatch import _C

SIZES = (3, 1, 4, 2)


def rows(sign: float = 1.0) -> Iterator[Tensor]:
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    data = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    return (sign * data.repeat(n, 1) * weight for n in SIZES)


DEFERRED = [cases.by_early_return, cases.by_early_return_of_any]
READ = [cases.with_the_result, cases.used_in_between]


@pytest.mark.parametrize("check", DEFERRED)
def test_the_check_waits(check: Callable[[Tensor], Tensor]) -> None:
    with ab.batch(defer_checks=True) as scope:
        results = [check(x).sum() for x in rows()]
    assert len(scope.report().flushes) == 1
    assert scope.report().checks == 2 * len(SIZES)
    assert [r.item() for r in results] == [6 * n for n in SIZES]


@pytest.mark.parametrize("check", DEFERRED + READ)
def test_a_check_that_fails_raises_eagers_error(check: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(InvalidError) as eager:
        check(next(rows(-1)))
    kept: list[Tensor] = []
    with pytest.raises(InvalidError) as found, ab.batch(defer_checks=True):
        kept += [check(x) for x in rows(-1)]
    assert str(found.value) == str(eager.value)
    assert not _C.is_open()


@pytest.mark.parametrize("check", READ)
def test_a_check_whose_failure_depends_on_the_returned_value_is_read(
    check: Callable[[Tensor], Tensor],
) -> None:
    with ab.batch(defer_checks=True, adaptive=False) as scope:
        kept = [check(x) for x in rows()]
    assert sum(f.count for f in scope.report().flushes) > len(SIZES), kept


def covariance(x: Tensor) -> Tensor:
    return x.mT @ x + torch.eye(3, dtype=x.dtype)


def test_covariances_are_checked_at_the_flush() -> None:
    points = [torch.randn(n, 3, dtype=torch.float64) for n in SIZES]

    def density(x: Tensor, like: Tensor) -> Tensor:
        return D.MultivariateNormal(like.mean(0), covariance(like), validate_args=True).log_prob(x)

    expected = [density(p, x.detach()) for p, x in zip(points, rows(), strict=True)]
    with ab.batch(adaptive=False) as scope:
        found = [density(p, x) for p, x in zip(points, rows(), strict=True)]
    assert len(scope.report().flushes) == 1
    torch.testing.assert_close([f.detach() for f in found], expected)


def test_a_covariance_that_is_not_symmetric_raises_eagers_error() -> None:
    like = next(rows())
    skew = torch.arange(9.0, dtype=torch.float64).view(3, 3)

    def make() -> D.Distribution:
        return D.MultivariateNormal(like.mean(0), covariance(like) + skew, validate_args=True)

    with pytest.raises(ValueError, match="covariance_matrix") as eager:
        make()
    kept: list[D.Distribution] = []
    with pytest.raises(ValueError, match="covariance_matrix") as found, ab.batch(adaptive=False):
        like = next(rows())
        kept.append(make())
    assert str(found.value).split("but found")[0] == str(eager.value).split("but found")[0]
    assert not _C.is_open()
