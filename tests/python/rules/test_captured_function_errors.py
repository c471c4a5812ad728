"""Errors of custom autograd.Functions whose forward is captured, and what they leave behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_captured_functions import Exp, Reversed, Sign
from helpers_rules import DOUBLE, assert_same_outcome, gradient_or_error, rand
from torch import Tensor
from torch.autograd import Function


def second_backward(x: Tensor) -> None:
    Exp.apply(x * 2).sum().backward()


class Wrong(Function):
    gradients: Any

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return Wrong.gradients(g)


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "too few": lambda g: g,
    "too many": lambda g: (g, None, g),
    "trailing None": lambda g: (g, None, None, None),
    "of a number": lambda g: (g, g),
    "shape": lambda g: (g.new_ones(7), None),
    "no tensor": lambda g: (3.0, None),
    "smaller": lambda g: (g.sum(), None),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_backward_may_not_return(name: str) -> None:
    Wrong.gradients = WRONG[name]

    def outcome(enabled: bool) -> Any:
        x = torch.ones(3, dtype=DOUBLE, requires_grad=True)
        with ab.batch(enabled=enabled):
            loss = sum(Wrong.apply(x * k, 1).sum() for k in (1, 2))
        return gradient_or_error(loss, x)

    assert_same_outcome(outcome)


@pytest.mark.parametrize("saves", [True, False])
def test_a_second_backward(saves: bool) -> None:
    def outcome(enabled: bool) -> str:
        x = rand(3).requires_grad_()
        with ab.batch(enabled=enabled):
            h = x + 1
            y = (Exp.apply(h) if saves else Reversed.apply(h, 2.0)).sum()
        y.backward()
        try:
            y.backward()
        except RuntimeError as error:
            return str(error)[:50]
        return "no error"

    assert outcome(True) == outcome(False)


@pytest.mark.parametrize("saved", [Sign, Exp, Reversed])
@pytest.mark.parametrize("written", ["argument", "result"])
def test_a_write_to_what_is_saved(saved: Any, written: str) -> None:
    def outcome(enabled: bool) -> Any:
        x = torch.full((3,), 0.5, dtype=DOUBLE, requires_grad=True)
        with ab.batch(enabled=enabled):
            h = x * 1
            y = saved.apply(h, 2.0) if saved is Reversed else saved.apply(h)
            loss = (y * 2).sum() if written == "argument" else y.sum()
            with torch.no_grad():
                (h if written == "argument" else y).add_(1)
        return gradient_or_error(loss, x)

    assert_same_outcome(outcome)


class Scaled(Function):
    """Returns a view of an argument that it does not save, and saves another argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0], None


class KeepsGraph(Scaled):
    """Keeps a graph in ctx, so that autograd itself records the call."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.graph = x.detach().requires_grad_() * 2
        ctx.save_for_backward(w)
        return x * w


@pytest.mark.parametrize("function", [Scaled, KeepsGraph])
@pytest.mark.parametrize("written", ["saved", "not saved"])
def test_a_write_after_the_block(function: Any, written: str) -> None:
    def outcome(enabled: bool) -> Any:
        x = torch.ones(2, 3, dtype=DOUBLE, requires_grad=True)
        w = torch.full((3,), 2.0, dtype=DOUBLE, requires_grad=True)
        with ab.batch(enabled=enabled):
            hs = [x * k for k in (1, 2)]
            loss = sum((function.apply(h, w) * 2).sum() for h in hs)
        with torch.no_grad():
            (w if written == "saved" else hs[0]).add_(1)
        return gradient_or_error(loss, x)

    eagers = assert_same_outcome(outcome)
    assert isinstance(eagers, Tensor) == (written == "not saved")


def test_errors_of_the_function_are_the_users() -> None:
    class Fails(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, where: str) -> Tensor:
            ctx.where = where
            if where == "forward":
                raise KeyError("forward")
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            raise KeyError("backward")

    x = rand(3).requires_grad_()
    with pytest.raises(KeyError, match="forward"), ab.batch():
        Fails.apply(x * 2, "forward")
    with ab.batch():
        losses = [Fails.apply(x * 2, "backward").sum() for _ in range(2)]
    with pytest.raises(KeyError, match="backward"):
        (losses[0] + losses[1]).backward()
    with ab.batch():  # nothing stays broken
        y = [Exp.apply(x * 2).sum() for _ in range(2)]
    (y[0] + y[1]).backward()
    assert x.grad is not None


def test_calls_are_freed() -> None:
    kept: list[weakref.ref[Any]] = []

    class Notes(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept.append(weakref.ref(ctx))
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.saved_tensors[0]

    x = rand(3).requires_grad_()
    with ab.batch():
        losses = [Notes.apply(x * 2).sum() for _ in range(3)]
        unused = Notes.apply(x * 3)
    del unused
    assert all(ref() is not None for ref in kept[:3])
    sum(losses).backward()
    del losses
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4
