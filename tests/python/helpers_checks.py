"""Code with checks of values. Pytest rewrites the asserts of test files, but not of this file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch_autobatch as ab
from torch import Tensor


class InvalidError(Exception):
    """An exception class of the tests."""


def positive(x: Tensor, what: str = "x") -> Tensor:
    if not (x > 0).all():
        raise InvalidError(f"{what} is not positive: {x.tolist()}")
    return x


def asserted(x: Tensor) -> Tensor:
    assert (x > 0).all(), f"asserted: {x.tolist()}"
    return x


def no_nan(x: Tensor) -> Tensor:
    if torch.isnan(x).any() or not torch.isfinite(x).all():
        message = "not finite"
        raise InvalidError(message)
    return x


def by_item(x: Tensor) -> Tensor:
    if bool((x <= 0).any()) or not (x > 0).all().item():
        raise InvalidError("by item")
    return x


def all_positive(x: Tensor, what: str) -> bool:
    return bool((x > 0).all())


def any_negative(x: Tensor) -> bool:
    return not all_positive(x, what="x")


def by_function(x: Tensor) -> Tensor:
    if any_negative(x):
        raise InvalidError("by function")
    return x


def by_a_function_written_in_c(x: Tensor) -> Tensor:
    """``any`` calls ``any_negative`` twice, and returns a different value than the first call."""
    if not any(map(any_negative, [x, -x])):
        raise InvalidError("by a function written in C")
    return x


def in_order(x: Tensor) -> Tensor:
    ok = (x > 0).all()
    if ok:
        return x
    raise InvalidError("this is not the `if`'s branch")


def caught(x: Tensor) -> Tensor:
    try:
        return positive(x)
    except InvalidError:
        return torch.zeros_like(x)


def suppressed(x: Tensor) -> Tensor:
    with contextlib.suppress(InvalidError):
        positive(x)
    return x


def under_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        positive(x)
    return x


@torch.no_grad()
def decorated(x: Tensor) -> Tensor:
    return positive(x)


def with_finally(x: Tensor, done: list[int]) -> Tensor:
    try:
        return positive(x)
    finally:
        done.append(1)


def all_kinds(h: Tensor, done: list[int]) -> None:
    """No code here catches an error, so each check is deferred."""
    under_no_grad(h)
    decorated(h)
    with torch.enable_grad():
        with_finally(h, done)
    with ab.batch(), torch.no_grad():
        positive(h)


def read_in_try(x: Tensor, y: Tensor) -> float:
    """The check fails before the `try`, and its error is raised inside it."""
    positive(x)
    try:
        return y.sum().item()
    except InvalidError:
        return -1.0


def refused(wrong: Tensor) -> None:
    if wrong:
        raise InvalidError("refused")


def overwritten(x: Tensor) -> Tensor:
    ok = (x > 0).all()
    if not ok:
        raise InvalidError("before the write")
    ok.fill_(False)
    return ok


CHECKS: list[Callable[[Tensor], Tensor]] = [positive, asserted, no_nan, by_item, by_function]


def checked_early(x: Tensor) -> Tensor:
    """Returns the failed test itself, as the constraints of torch.distributions do."""
    ordered = (x[..., 1:] > x[..., :-1]).all(-1)
    if not ordered.all():
        return ordered
    return (x > 0).all(-1)


def passed_on(x: Tensor) -> Tensor:
    return checked_early(x)


def by_early_return(x: Tensor) -> Tensor:
    valid = passed_on(x)
    if not valid.all():
        raise InvalidError(f"invalid: {x.tolist()}")
    return x


def by_early_return_of_any(x: Tensor) -> Tensor:
    wrong = wrong_early(x)
    if torch.any(wrong):
        raise InvalidError("wrong")
    return x


def wrong_early(x: Tensor) -> Tensor:
    wrong = x < 0
    if wrong.any():
        return wrong
    return x > 100


def with_the_result(x: Tensor) -> Tensor:
    """The message contains the value that the function returned, which differs from eager mode."""
    valid = checked_early(x)
    if not valid.all():
        raise InvalidError(f"valid: {valid.tolist()}")
    return x


def used_in_between(x: Tensor) -> Tensor:
    valid = checked_early(x)
    x = x * valid.to(x.dtype).mean()
    if not valid.all():
        raise InvalidError("used in between")
    return x
