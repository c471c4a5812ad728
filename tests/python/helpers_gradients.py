"""Runs a function that calls ``torch.autograd.grad`` eagerly, in a block and in a map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor
from torch.utils import _pytree

DOUBLE = torch.float64


def tensor(*sizes: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * sum(sizes))
    return torch.randn(*sizes, dtype=DOUBLE, generator=generator)


def outcome(results: Any, parameters: list[Tensor]) -> list[Any]:
    """Returns all values, and the gradients of their sum."""
    for p in parameters:
        p.grad = None
    flat = _pytree.tree_leaves(results)
    roots = [x for x in flat if isinstance(x, Tensor) and x.requires_grad]
    if roots:
        torch.autograd.backward([x.square().sum() for x in roots])
    history = [isinstance(x, Tensor) and x.requires_grad for x in flat]
    return (
        [x.detach() if isinstance(x, Tensor) else x for x in flat]
        + history
        + [None if p.grad is None else p.grad.clone() for p in parameters]
    )


def same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        if isinstance(b, Tensor):
            assert isinstance(a, Tensor)
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
        else:
            assert a == b


def agree(
    function: Callable[[Any], Any],
    instances: list[Any],
    parameters: list[Tensor],
    captured: int | None = None,
) -> ab.Report:
    """Compares a block and a map with eager. `captured`: calls of grad per instance."""
    expected = outcome([function(x) for x in instances], parameters)
    with ab.batch() as scope:
        found = [function(x) for x in instances]
    report = scope.report()
    same(outcome(found, parameters), expected)
    with ab.batch() as mapped:
        found = ab.map(function, instances)
    same(outcome(found, parameters), expected)
    if captured is not None:
        for r in (report, mapped.report()):
            assert r.gradients == captured * len(instances)
            assert len(r.flushes) == 1
    return report


def rows(n: int = 5, *sizes: int) -> list[Tensor]:
    return [tensor(*(sizes or (2, 3)), seed=i) for i in range(n)]
