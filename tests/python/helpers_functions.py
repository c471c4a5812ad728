"""Custom autograd.Functions for tests, and their report."""

from __future__ import annotations

from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor


class Function(torch.autograd.Function):
    """Uses functorch's rule. Subclasses return wrong gradients on purpose."""

    generate_vmap_rule = True


class Scaled(Function):
    """Saves an input and a result, and takes a number."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.sin() * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, y = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return g * x * y * ctx.factor, None


def rows(report: ab.Report) -> list[Any]:
    return [s for s in report.signatures if s.op.endswith(".apply")]
