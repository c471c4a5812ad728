"""Runs a function over instances in a loop and under ``ab.map``, and compares all results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch.utils import _pytree

Function = Callable[[Any], Any]


def leaves(results: Any) -> list[Any]:
    """Yields the items of nested lists, tuples and dicts."""
    return _pytree.tree_leaves(results)


def gradients(results: Any, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the gradients of the sum of all results that have a history."""
    for p in parameters:
        p.grad = None
    roots = [x for x in leaves(results) if isinstance(x, Tensor) and x.requires_grad]
    if roots:
        torch.autograd.backward([r.sum() for r in roots])
    return [p.grad for p in parameters]


def same(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Asserts that two results are equal up to rounding."""
    assert _pytree.tree_structure(found) == _pytree.tree_structure(expected)
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        if isinstance(b, Tensor):
            assert isinstance(a, Tensor)
            assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        elif isinstance(b, float):
            assert abs(a - b) <= tolerance * max(1.0, abs(b)) or (a != a and b != b)
        else:
            assert a == b


def agree(
    function: Function,
    instances: Iterable[Any],
    parameters: Iterable[Tensor] | nn.Module = (),
    **options: Any,
) -> Any:
    """Asserts that values and gradients match the loop's. Returns the report."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    instances, parameters = list(instances), list(parameters)
    expected = ab.map(function, instances, enabled=False)
    wanted = gradients(expected, parameters)
    with ab.batch() as scope:
        found = ab.map(function, instances, **options)
    same(found, expected)
    same(gradients(found, parameters), wanted)
    alone = ab.map(function, instances, **options)  # with a separate scope
    same(alone, expected)
    same(gradients(alone, parameters), wanted)
    return scope.report()


def flushes(report: Any) -> int:
    """Returns the number of flushes."""
    return sum(flush.count for flush in report.flushes)


def largest(report: Any, op: str) -> int:
    """Returns the size of the largest batch of an op."""
    return max((s.largest for s in report.signatures if s.op == op), default=0)
