"""Custom autograd.Functions that vmap can't batch: their forward is captured op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_functions import Function, Scaled, rows
from helpers_rules import DOUBLE, assert_same, rand
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 5


class Draws(Scaled):
    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x + torch.rand(3, dtype=DOUBLE)


class Dirty(Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 5


class Numbers(Scaled):
    """Also returns a number."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Any:  # type: ignore[override]
        return x * factor, int(x.numel())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:  # type: ignore[override]
        return g * ctx.factor * 5, None


class Attribute(Scaled):
    """Keeps a tensor in ctx, where vmap does not find it."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.x = inputs[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.x * 5, None


class OfValues(Scaled):
    """Keeps a number in ctx that depends on values."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = float(inputs[0].sum())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.scale, None


class Picky(Scaled):
    """Raises an error for the values on which a trial determines shapes."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        if x.flatten()[0] == x.flatten()[1]:
            raise ValueError("all the same")
        return x.sin() * factor


class Listed(Scaled):
    @staticmethod
    def forward(x: Tensor, factors: list[float]) -> Tensor:  # type: ignore[override]
        return x * factors[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 5, None


class Reversed(Function):
    """Returns a view. In a batch, a later write to it would not reach the argument."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -5 * g


CAPTURED: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda x: Plain.apply(x),
    "draws": lambda x: Draws.apply(x, 1.0),
    "numbers": lambda x: Numbers.apply(x, 2.0)[0],
    "attribute": lambda x: Attribute.apply(x, 2.0),
    "of_values": lambda x: OfValues.apply(x, 2.0),
    "picky": lambda x: Picky.apply(x, 2.0),
    "list": lambda x: Listed.apply(x, [2.0]),
}


def run(case: Callable[[Tensor], Any], enabled: bool) -> tuple[list[Tensor | None], ab.Report]:
    torch.manual_seed(0)
    x = [rand(3).requires_grad_() for _ in range(4)]
    with ab.batch(enabled=enabled) as scope:
        results = [case(t * 2) for t in x]
    sum(r.sum() for r in results).backward()
    return [*results, *(t.grad for t in x)], scope.report()


@pytest.mark.parametrize("name", CAPTURED)
def test_others_are_captured(name: str) -> None:
    run(CAPTURED[name], True)  # for some, only the calls of a first block show this
    values, report = run(CAPTURED[name], True)
    for value, expected in zip(values, run(CAPTURED[name], False)[0], strict=True):
        assert_same(name, value, expected)
    (row,) = rows(report)
    assert (row.instances, row.rule) == (4, "native"), str(report)
    assert not [a for a in report.at_once if a.op.endswith(".apply")]


def test_a_function_that_writes_to_its_arguments_runs_at_once() -> None:
    values, report = run(lambda x: Dirty.apply(x), True)
    for value, expected in zip(values, run(lambda x: Dirty.apply(x), False)[0], strict=True):
        assert_same("dirty", value, expected)
    said = [a for a in report.at_once if a.op == "Dirty.apply"]
    assert "writes to its arguments" in said[0].reason
    assert "test_functions_without_vmap.py" in said[0].site
    assert not rows(report)


def test_a_function_that_closes_over_a_tensor() -> None:
    """The tensor changes before the block ends."""
    scale = torch.ones(3, dtype=DOUBLE)

    class Scales(Scaled):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Tensor:
            return x * scale

    x = rand(3).requires_grad_()
    with ab.batch():
        y = Scales.apply(x * 1, 1.0)
        scale.mul_(5)
    assert_same("value", y, x)


def test_a_function_that_closes_over_what_can_change() -> None:
    options = {"factor": 1.0}

    class Scales(Scaled):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Tensor:
            return x * options["factor"]

    x = rand(3).requires_grad_()
    with ab.batch():
        y = Scales.apply(x * 1, 1.0)
        options["factor"] = 5.0
    assert_same("value", y, x)


@pytest.mark.parametrize("return_exceptions", [False, True])
def test_in_a_map_each_instance_gets_its_own_result(return_exceptions: bool) -> None:
    """Instances wait for their arguments before the call, and resume in another order."""
    layer = nn.Linear(4, 4, dtype=DOUBLE)

    def program(x: Tensor) -> Tensor:
        return Reversed.apply(Reversed.apply(layer(x)).tanh())

    examples = [rand(rows, 4) for rows in (2, 3, 4, 2, 3, 5)]
    for _ in range(2):
        results = ab.map(program, examples, return_exceptions=return_exceptions)
        expected = [program(x) for x in examples]
        for name, result, value in zip("012345", results, expected, strict=True):
            assert_same(name, result, value)
        for values in (results, expected):
            layer.zero_grad()
            torch.cat(values).sum().backward()
            values.append(layer.weight.grad.clone())
        assert_same("gradient", results[-1], expected[-1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_code(reentrant: bool) -> None:
    layer = nn.Linear(3, 3, dtype=DOUBLE)

    def program(enabled: bool) -> tuple[list[Tensor | None], ab.Report]:
        torch.manual_seed(0)
        layer.zero_grad()
        x = [rand(2, 3).requires_grad_() for _ in range(3)]
        with ab.batch(enabled=enabled) as scope:
            y = [checkpoint(lambda h: layer(h).tanh(), t * 2, use_reentrant=reentrant) for t in x]
        sum(t.sum() for t in y).backward()
        weight = layer.weight.grad
        return [
            *y,
            *(t.grad for t in x),
            None if weight is None else weight.clone(),
        ], scope.report()

    values, report = program(True)
    for value, expected in zip(values, program(False)[0], strict=True):
        assert_same("value", value, expected)
    if reentrant:
        assert [(row.op, row.instances) for row in rows(report)] == [
            ("CheckpointFunction.apply", 3)
        ]
    else:
        hooked = "ops under hooks on saved tensors (checkpointing)"
        assert hooked in [a.op for a in report.at_once], str(report)
