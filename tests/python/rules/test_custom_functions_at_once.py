"""Custom autograd.Functions that can't be deferred run eagerly, and the report gives the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_capture import is_pending
from helpers_functions import Function, Scaled, rows
from helpers_rules import DOUBLE, assert_same, rand
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert not is_pending(x)
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
    """Returns a number, too."""

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
    """Keeps a tensor in ctx, which vmap does not see."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.x = inputs[0]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.x * 5, None


class OfValues(Scaled):
    """Keeps in ctx what follows from values."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = float(inputs[0].sum())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.scale, None


class Picky(Scaled):
    """Raises an error of the values that shapes are tried on."""

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
    """Returns a view, which a later op would not write through."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -5 * g


AT_ONCE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "plain": (lambda x: Plain.apply(x), "without a vmap rule"),
    "draws": (lambda x: Draws.apply(x, 1.0), "draws random numbers"),
    "dirty": (lambda x: Dirty.apply(x), "writes to its arguments"),
    "numbers": (lambda x: Numbers.apply(x, 2.0)[0], "something other than tensors"),
    "attribute": (
        lambda x: Attribute.apply(x, 2.0),
        "stores a tensor in ctx without save_for_backward",
    ),
    "of_values": (
        lambda x: OfValues.apply(x, 2.0),
        "stores data in ctx that depends on tensor values",
    ),
    "picky": (
        lambda x: Picky.apply(x, 2.0),
        "raises an error when it is called with tensors of zeros or ones",
    ),
    "list": (lambda x: Listed.apply(x, [2.0]), "called with a list"),
}


@pytest.mark.parametrize("name", AT_ONCE)
def test_others_run_at_once_and_the_report_says_why(name: str) -> None:
    case, reason = AT_ONCE[name]

    def program(enabled: bool) -> tuple[list[Tensor | None], ab.Report]:
        torch.manual_seed(0)
        x = [rand(3).requires_grad_() for _ in range(4)]
        with ab.batch(enabled=enabled) as scope:
            results = [case(t * 2) for t in x]
        sum(r.sum() for r in results).backward()
        return [*results, *(t.grad for t in x)], scope.report()

    values, report = program(True)
    for value, expected in zip(values, program(False)[0], strict=True):
        assert_same(name, value, expected)
    said = [a for a in report.at_once if a.op.endswith(".apply") and reason in a.reason]
    assert said, str(report)
    assert "test_custom_functions_at_once.py" in said[0].site
    assert not rows(report)


def test_a_function_that_closes_over_a_tensor_runs_at_once() -> None:
    """It could change before the block ends."""
    scale = torch.ones(3, dtype=DOUBLE)

    class Scales(Scaled):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Tensor:
            return x * scale

    x = rand(3).requires_grad_()
    with ab.batch() as scope:
        y = Scales.apply(x * 1, 1.0)
        scale.mul_(5)
    assert_same("value", y, x)
    assert "closes over a tensor" in scope.report().at_once[0].reason


def test_a_function_that_closes_over_what_can_change_runs_at_once() -> None:
    options = {"factor": 1.0}

    class Scales(Scaled):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Tensor:
            return x * options["factor"]

    x = rand(3).requires_grad_()
    with ab.batch() as scope:
        y = Scales.apply(x * 1, 1.0)
        options["factor"] = 5.0
    assert_same("value", y, x)
    assert "closes over a dict" in scope.report().at_once[0].reason


@pytest.mark.parametrize("return_exceptions", [False, True])
def test_in_a_map_each_instance_gets_its_own_result(return_exceptions: bool) -> None:
    """Each waits for its argument before the call is run, and they go on in another order."""
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
def test_the_report_says_that_checkpointed_code_is_not_captured(reentrant: bool) -> None:
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
    hooked = "ops under hooks on saved tensors (checkpointing)"
    op = "CheckpointFunction.apply" if reentrant else hooked
    assert op in [a.op for a in report.at_once], str(report)
