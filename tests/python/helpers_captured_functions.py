"""Custom autograd.Functions without a vmap rule, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Reversed(Function):
    """Returns a view of its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.factor * g, None


class Sign(Function):
    """A straight-through estimator: saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert ctx.needs_input_grad == (True,)
        assert not torch.is_grad_enabled()
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert x.requires_grad
        return g * (x.abs() < 1)


class Exp(Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0] * 3
