"""Custom autograd.Functions without a vmap rule: forward is captured, backward is batched."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_capture import is_pending
from helpers_captured_functions import Exp, Reversed, Sign
from helpers_rules import DOUBLE, assert_same, rand
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Clipped(Function):
    """Returns its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-0.1, 0.1)


class Sine(Function):
    """Saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * x.cos()


class Between(Function):
    """Saves a tensor that is not an argument or a result, and keeps a tensor as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos(), None)
        ctx.sine = x.sin()
        return ctx.sine * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        cosine, none = ctx.saved_tensors
        assert none is None
        return g * cosine * ctx.sine


class Product(Function):
    """Returns two results with a gradient, one without, and a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.save_for_backward(x, w)
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        return x @ w, x * 2, mask, len(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor, of_mask: Tensor, number: None) -> Any:
        x, w = ctx.saved_tensors
        assert not of_mask.any()
        assert number is None
        return g @ w.t() * 5 + h, x.t() @ g


class Unmaterialized(Product):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return Product.forward(ctx, x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None, *rest: Any) -> Any:  # type: ignore[override]
        _x, w = ctx.saved_tensors
        assert h is None
        assert rest == (None, None)
        assert g is not None
        return g @ w.t() * 5, None


class Transposed(Function):
    """Returns a new result that is not contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin().t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.t() * 3


class Turned(Function):
    """Returns a view of the argument that is not contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.t() * 3


class Reads(Function):
    """Reads values in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = 2.0 if x.sum().item() > 0 else 3.0
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.scale * (2 if g.sum() > 0 else 1)


class Root(Function):
    """Implicit differentiation: forward and backward create autograd graphs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.abs().sqrt() + 1
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            value = y.detach() * x.sin()
            (found,) = torch.autograd.grad(value, x, g)
        return found


class Once(Exp):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return Exp.backward(ctx, g)


class NewStyle(Function):
    @staticmethod
    def forward(x: Tensor, power: int) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.power * ctx.saved_tensors[0], None, None


class Summed(Function):
    """Returns a gradient that is larger than its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return g * scale, (g * x).float()


Case = Callable[[Tensor, Tensor], Any]
CASES: dict[str, Case] = {
    "view": lambda h, w: Reversed.apply(h, 0.5),
    "argument": lambda h, w: Clipped.apply(h) * 2,
    "saved argument": lambda h, w: Sign.apply(h),
    "saved result": lambda h, w: Exp.apply(h),
    "other tensors": lambda h, w: Between.apply(h),
    "several results": lambda h, w: sum(Product.apply(h, w)[:2]),
    "one of several": lambda h, w: Product.apply(h, w)[1] * Product.apply(h, w)[2],
    "not materialized": lambda h, w: Unmaterialized.apply(h, w)[0],
    "not contiguous": lambda h, w: Transposed.apply(h),
    "implicit": lambda h, w: Root.apply(h),
    "once": lambda h, w: Once.apply(h),
    "setup_context": lambda h, w: NewStyle.apply(h, 2),
    "summed": lambda h, w: Summed.apply(h, w[0]),
    "chain": lambda h, w: Reversed.apply(Exp.apply(Sign.apply(h) * h.tanh()), 2.0),
    "nested": lambda h, w: Clipped.apply(Clipped.apply(h).sin()),
}
TWICE = [c for c in CASES if c not in ("once", "implicit", "summed")]
SIZES = {"alike": [3] * 6, "different": [3, 1, 4, 2, 5, 2]}


def run(case: Case, enabled: bool, sizes: list[int], twice: bool = False) -> Any:
    torch.manual_seed(0)
    w, layer = rand(4, 4).requires_grad_(), nn.Linear(4, 4, dtype=DOUBLE)
    xs = [rand(n, 4).requires_grad_() for n in sizes]
    with ab.batch(enabled=enabled) as scope:
        results = [case(layer(x), w) for x in xs]
        assert not enabled or is_pending(results[0])
        losses = [r.square().sum() for r in results]
    leaves = [*xs, w, *layer.parameters()]
    grads = torch.autograd.grad(sum(losses), leaves, create_graph=twice, allow_unused=True)
    values: list[Tensor | None] = [*results, *grads]
    if twice:
        total = sum(g.square().sum() for g in grads if g is not None)
        values += torch.autograd.grad(total, leaves, allow_unused=True)
    return values, scope.report()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", CASES)
def test_forward_is_captured(name: str, sizes: list[int]) -> None:
    values, report = run(CASES[name], True, sizes)
    expected, _ = run(CASES[name], False, sizes)
    for k, (value, other) in enumerate(zip(values, expected, strict=True)):
        assert_same(f"tensor {k}", value, other)
    assert len(report.flushes) == 1, str(report)
    rows = [s for s in report.signatures if s.op.endswith(".apply")]
    assert rows
    for row in rows:
        assert row.instances == 6 * row.batches, str(report)


@pytest.mark.parametrize("name", TWICE)
def test_gradients_of_gradients(name: str) -> None:
    values, _ = run(CASES[name], True, SIZES["different"], twice=True)
    expected, _ = run(CASES[name], False, SIZES["different"], twice=True)
    for k, (value, other) in enumerate(zip(values, expected, strict=True)):
        assert_same(f"tensor {k}", value, other)


def test_once_differentiable_stays_so() -> None:
    for enabled in (False, True):
        x = rand(3).requires_grad_()
        with ab.batch(enabled=enabled):
            y = [Once.apply(x * 1).square().sum() for _ in range(2)]
        (grad,) = torch.autograd.grad(y[0] + y[1], x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_backward_runs_in_batches() -> None:
    """The members' backward calls get tensors that are pending."""
    seen = []

    class Seen(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            found = g * ctx.saved_tensors[0]
            seen.append(is_pending(found))
            return found

    x = rand(3).requires_grad_()
    with ab.batch():
        losses = torch.stack([Seen.apply(x * k).sum() for k in range(4)])
    losses.sum().backward()
    assert seen == [True] * 4
    with ab.batch():
        loss = Seen.apply(x * 2).sum()
    loss.backward()
    assert seen == [True] * 4 + [False]  # nothing to batch


def test_in_a_map_with_reads() -> None:
    layer = nn.Linear(4, 4, dtype=DOUBLE)

    def program(x: Tensor) -> Tensor:
        return Reads.apply(Reversed.apply(Reads.apply(layer(x)).tanh(), 1.0))

    examples = [rand(rows, 4) for rows in (2, 3, 4, 2, 3, 5)]
    results, expected = ab.map(program, examples), [program(x) for x in examples]
    for values in (results, expected):
        layer.zero_grad()
        torch.cat(values).sum().backward()
        values.append(layer.weight.grad.clone())
    for k, (value, other) in enumerate(zip(results, expected, strict=True)):
        assert_same(f"tensor {k}", value, other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["view", "argument", "saved result", "several results"])
def test_without_gradients(name: str, mode: Any) -> None:
    def program(enabled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer, w = nn.Linear(4, 4, dtype=DOUBLE), rand(4, 4)
        with mode(), ab.batch(enabled=enabled):
            return [CASES[name](layer(rand(3, 4)), w) for _ in range(4)]

    for value, other in zip(program(True), program(False), strict=True):
        assert_same("value", value, other)
        assert not value.requires_grad


# --- memory that the result shares with an argument ---


def after_a_write_to_the_argument(x: Tensor) -> list[Tensor]:
    h = x * 2
    y = Reversed.apply(h, 0.5)
    h.mul_(3)
    return [y * 1, h]


def after_a_write_to_the_result(x: Tensor) -> list[Tensor]:
    y = Reversed.apply(x * 2, 0.5)
    y.mul_(3)
    return [y]


def after_a_write_under_no_grad(x: Tensor) -> list[Tensor]:
    h = x * 2
    y = Reversed.apply(h, 0.5)
    with torch.no_grad():
        y.mul_(3)
    return [y, h * 1]


def of_a_leaf(x: Tensor) -> list[Tensor]:
    return [Reversed.apply(x, 0.5) + x * 2]


def of_a_view(x: Tensor) -> list[Tensor]:
    h = x * 2
    y = Reversed.apply(h[1:], 0.5)
    return [y + h[0], y.is_leaf, y._is_view(), y._base is not None]  # type: ignore[list-item]


@pytest.mark.parametrize(
    "program",
    [
        after_a_write_to_the_argument,
        after_a_write_to_the_result,
        after_a_write_under_no_grad,
        of_a_leaf,
        of_a_view,
        lambda x: [Turned.apply(x * 2) + 1],
    ],
)
def test_shared_memory(program: Callable[[Tensor], list[Any]]) -> None:
    def outcome(enabled: bool) -> list[Any]:
        x = torch.arange(6, dtype=DOUBLE).view(3, 2).requires_grad_()
        try:
            with ab.batch(enabled=enabled):
                values = program(x)
            total = sum(v.sum() for v in values if isinstance(v, Tensor))
            return [*values, *torch.autograd.grad(total, x)]
        except RuntimeError as error:
            return [re.sub(r"Output 0 of \S+", "", str(error))[:80]]

    for value, other in zip(outcome(True), outcome(False), strict=True):
        if isinstance(other, Tensor):
            assert_same("value", value, other)
        else:
            assert value == other


@pytest.mark.parametrize("max_pending", [None, 4])
@pytest.mark.parametrize("reads", [True, False])
def test_backward_runs_once_with_create_graph(reads: bool, max_pending: int | None) -> None:
    """Two held results depend on a call whose backward is not linear in the gradient."""

    def outcome(enabled: bool) -> Tensor:
        w = (torch.arange(9, dtype=DOUBLE).view(3, 3) / 9).requires_grad_()
        losses = []
        with ab.batch(enabled=enabled, adaptive=False, max_pending=max_pending):
            for i in range(3):
                h = (torch.full((2 + i, 3), 0.5, dtype=DOUBLE) @ w).tanh()
                h = h + Clipped.apply(h * 1)
                total = h.sum()
                if reads:
                    total.item()
                losses += [total, (h * 0.07).sum()]
        (gradient,) = torch.autograd.grad(sum(losses), w, create_graph=True)
        return gradient.detach()

    assert_same("gradient", outcome(True), outcome(False))


@pytest.mark.parametrize("keeps", [True, False])
def test_saved_arguments_that_become_real_before_backward(keeps: bool) -> None:
    """A read in the block divides the record between the argument and the call."""

    def outcome(enabled: bool) -> list[Any]:
        w = (torch.arange(9, dtype=DOUBLE).view(3, 3) / 9).requires_grad_()
        losses, kept = [], []
        with ab.batch(enabled=enabled, adaptive=False):
            for i in range(4):
                h = (torch.ones(2 + i, 3, dtype=DOUBLE) @ w).tanh().clone()
                h.mul_(0.5)
                h.sum().item()
                y = Sine.apply(h)
                if keeps:
                    y.retain_grad()
                    kept.append(y)
                losses.append(y.sum())
        for loss in losses:
            loss.backward()
        return [w.grad, *(y.grad for y in kept)]

    for value, other in zip(outcome(True), outcome(False), strict=True):
        assert_same("gradient", value, other)


class Assigned(Function):
    """Writes to a real tensor, and returns this tensor (as torchdiffeq does)."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, value: Tensor) -> Tensor:
        target.data[0] = value
        return target

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, g[0]


def test_functions_that_compute_their_results_run_eagerly() -> None:
    """Capturing such a call would only add to the cost of its flush."""

    def outcome(enabled: bool) -> tuple[list[Any], ab.batch]:
        w = (torch.arange(9, dtype=DOUBLE).view(3, 3) / 9).requires_grad_()
        losses = []
        with ab.batch(enabled=enabled, adaptive=False) as scope:
            for i in range(8):
                h = (torch.full((3,), float(i), dtype=DOUBLE) @ w).tanh()
                losses.append((Assigned.apply(torch.zeros(2, 3, dtype=DOUBLE), h) * 2).sum())
        sum(losses).backward()
        return [*losses, w.grad], scope

    expected, _ = outcome(False)
    ours, scope = outcome(True)
    for value, other in zip(ours, expected, strict=True):
        assert_same("value", value, other)
    reasons = " ".join(str(call) for call in scope.report().at_once)
    assert "computes its results immediately" in reasons
