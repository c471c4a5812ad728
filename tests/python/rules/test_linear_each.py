"""`linear` with a matrix per instance, and the gradient of `mse_loss` as an op. Gradient descent
within an instance consists of these ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import check, rand
from torch import Tensor

# The longest instance has more than twice the rows of any other.
SIZES = [5, 3, 8, 3, 1, 40, 6]

Function = Callable[..., Tensor]


def own(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x.tanh(), w.sin(), b.cos())


def without_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x.tanh(), w.sin()) * b


def own_matrix(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Calls `linear` with a matrix per instance. The bias is shared."""
    return F.linear(x, w.sin(), b)


def turned(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, (w.sin() * 2).t().contiguous().t(), b.exp())


def with_more_dimensions(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x.expand(2, *x.shape).tanh(), w.sin(), b.cos())


FUNCTIONS = [own, without_bias, own_matrix, turned, with_more_dimensions]


def rule_of(report: ab.Report, op: str) -> list[tuple[str, int, int]]:
    return [(r.rule, r.batches, r.instances) for r in report.signatures if r.op == f"aten::{op}"]


@pytest.mark.parametrize("sizes", [SIZES, [4] * 5, [7]])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 16), (16, 1), (5, 7), (33, 48)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_batch(function: Function, inputs: int, outputs: int, sizes: list[int]) -> None:
    torch.manual_seed(1)
    instances = [(rand(n, inputs), rand(outputs, inputs), rand(outputs)) for n in sizes]
    report = check(function, *instances)
    assert rule_of(report, "linear") == [("native", 1, len(sizes))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    report = check(
        own,
        *[(rand(n, 8, dtype=dtype), rand(3, 8, dtype=dtype), rand(3, dtype=dtype)) for n in SIZES],
    )
    assert rule_of(report, "linear") == [("native", 1, len(SIZES))]


@pytest.mark.parametrize("has_bias", [True, False])
def test_one_matrix_that_is_computed(has_bias: bool) -> None:
    """All instances have one computed matrix, as in weight normalization."""
    torch.manual_seed(1)
    v, g, b = (rand(*sizes).requires_grad_() for sizes in [(6, 4), (6, 1), (6,)])
    xs = [rand(n, 4).requires_grad_() for n in SIZES]
    found = []
    for enabled in (False, True):
        with ab.batch(enabled=enabled) as scope:
            w = v * (g / v.norm(dim=1, keepdim=True))
            bias = b.exp() if has_bias else None
            results = [F.linear(x, w, bias).sin().sum() for x in xs]
        found.append(torch.autograd.grad(torch.stack(results).sum(), [v, g, *xs, *[b] * has_bias]))
    for mine, eagers in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, eagers)
    assert rule_of(scope.report(), "linear") == [("native", 1, len(SIZES))]


def test_second_derivatives() -> None:
    torch.manual_seed(1)
    instances = [(rand(n, 4), rand(3, 4), rand(3)) for n in SIZES]
    found = []
    for enabled in (False, True):
        leaves = [[t.clone().requires_grad_() for t in instance] for instance in instances]
        flat = [t for instance in leaves for t in instance]
        with ab.batch(enabled=enabled):
            results = [own(*instance).square().sum() for instance in leaves]
        gradients = torch.autograd.grad(torch.stack(results).sum(), flat, create_graph=True)
        total = torch.stack([g.square().sum() for g in gradients]).sum()
        found.append(torch.autograd.grad(total, flat))
    for mine, eagers in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, eagers)


def test_no_rows() -> None:
    check(own, *[(rand(n, 4), rand(3, 4), rand(3)) for n in (0, 2, 0)])


# --- the gradient of mse_loss ---


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradient_of_squared_errors(reduction: str) -> None:
    """Also tests the gradient of the gradient with respect to all three operands."""
    torch.manual_seed(1)
    w = rand(4).requires_grad_()
    xs = [rand(n, 4).requires_grad_() for n in SIZES]

    def step(x: Tensor) -> Tensor:
        loss = F.mse_loss(x * w, x.sin(), reduction=reduction)
        to_w, to_x = torch.autograd.grad(loss.square(), [w, x], create_graph=True)
        return to_w.square().sum() + to_x.cos().sum()

    found = []
    for enabled in (False, True):
        with ab.batch(enabled=enabled) as scope:
            results = [step(x) for x in xs]
        found.append(torch.autograd.grad(torch.stack(results).sum(), [w, *xs]))
    for mine, eagers in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, eagers)
    report = scope.report()
    assert report.gradients == len(SIZES)
    # Both operands of the loss need a gradient.
    assert rule_of(report, "mse_loss_backward") == [("native", 1, 2 * len(SIZES))]
