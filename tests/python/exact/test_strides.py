"""Ops whose Meta kernel or formula gives different strides than eager's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import Blocks, rand, same, weight
from torch import Tensor

LARGE_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "logsigmoid": lambda x, s: F.logsigmoid(x),
    "floor_divide": lambda x, s: x // 2,
    "floor_divide by a tensor": lambda x, s: x // s,
    "div, floor": lambda x, s: torch.div(x, s, rounding_mode="floor"),
    "copysign": lambda x, s: torch.copysign(x, s),
    "copysign of itself": lambda x, s: torch.copysign(x, x),
}


@pytest.mark.parametrize("size", [16, 1100])
@pytest.mark.parametrize("op", LARGE_OPS)
def test_strides_of_large_results(op: str, size: int) -> None:
    """If the CPU's result is not row-major, the Meta kernels of some ops give different strides."""

    def program(block: Blocks) -> Any:
        x, s = torch.rand(size, size).t().requires_grad_(), torch.tensor(2.0, requires_grad=True)
        with block():
            result = LARGE_OPS[op](x * 1, s * 1)
            strides = result.stride()
        return strides, result.stride(), result.detach()[:3, :3].clone()

    same(program)


@pytest.mark.parametrize("sizes", [(1, 5), (1, 1, 5), (3, 1, 5), (2, 1, 1, 5), (1, 2, 1, 5)])
def test_strides_of_expand(sizes: tuple[int, ...]) -> None:
    """The stride of a new dimension of size one spans all following dimensions."""

    def program(block: Blocks) -> Any:
        w = weight(1, 5)
        with block():
            x = w * 2
            return [
                t.stride()
                for t in (x.expand(sizes), x[:, ::2].expand(*sizes[:-1], 3), x[0].expand(sizes))
            ] + [x.sum().expand(sizes).stride(), w.expand(sizes).stride()]

    same(program)


def test_gradient_of_a_leaf_with_gaps_is_dense() -> None:
    """The leaf is every second column of a matrix. Its gradient has no gaps."""

    def program(block: Blocks) -> Any:
        x, w = rand(4, 6)[:, ::2].detach().requires_grad_(), weight(3)
        with block():
            y = (x * w).sum()
        return torch.autograd.grad(y, [x, w], retain_graph=True), y.backward(), x.grad, w

    same(program)


def test_storage_offset_of_a_view_of_an_outside_view() -> None:
    """The offset counts from the start of the memory, before and after the view is real."""

    def program(block: Blocks) -> Any:
        w = weight(4, 5)
        x = (w * 2)[1:, 2:]
        with block():
            views = [x[1:], x[:, 1], x.t()[1:2], x[3:], x[1:][1:]]
            pending = [v.storage_offset() for v in views]
        return pending, [v.storage_offset() for v in views], [v.detach().clone() for v in views]

    same(program)
