"""Custom autograd.Functions with a vmap rule are batched."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_capture import is_pending
from helpers_functions import Function, Scaled, rows
from helpers_rules import DOUBLE, assert_same, rand
from torch import Tensor, nn


class OwnRule(torch.autograd.Function):
    """Has a vmap staticmethod."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.t() * 2, x.t() @ g * 3

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> Any:
        assert in_dims == (0, None)
        return OwnRule.apply(x.flatten(0, 1), w).unflatten(0, x.shape[:2]), 0


class Two(Function):
    """Returns two results. Backward may get the gradient of only one of them."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Any:
        return x * y, x + y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, h: Tensor | None) -> Any:
        x, y = ctx.saved_tensors
        return None if g is None else g * y * 2, None if h is None else h * x


class Marks(Function):
    """Returns a result that is not differentiable. The second argument has no gradient."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Any:
        return x * y, (x > 0).long()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        return g * ctx.saved_tensors[1] * 5, None


class Once(Scaled):
    """A subclass whose backward can't be differentiated."""

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return Scaled.backward(ctx, g)


class BackwardReads(Scaled):
    """Its backward reads values, which is not possible in vmap."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return g * (2 if x.sum().item() > 0 else 3), None


class ForwardReads(Scaled):
    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.sin() * (factor if x.sum().item() > 0 else 3)


CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "generated": lambda h, w: Scaled.apply(h, 2.0),
    "own_rule": lambda h, w: OwnRule.apply(h, w),
    "two": lambda h, w: Two.apply(h, h.tanh())[0],
    "both_of_two": lambda h, w: sum(Two.apply(h, h.tanh())),
    "marks": lambda h, w: Marks.apply(h, h.cos())[0],
    "subclass": lambda h, w: Once.apply(h, 0.5),
    "chained": lambda h, w: Scaled.apply(OwnRule.apply(Scaled.apply(h, 1.0), w).tanh(), 0.5),
    "backward_reads": lambda h, w: BackwardReads.apply(h, 1.0),
    "forward_reads": lambda h, w: ForwardReads.apply(h, 1.0),
}
TWICE = ["subclass", "generated", "own_rule", "both_of_two", "marks", "chained"]


def run(
    case: Callable[[Tensor, Tensor], Any], enabled: bool, twice: bool = False, some: bool = False
) -> tuple[list[Tensor | None], ab.Report]:
    """Returns results and gradients of 8 instances. With `some`, half of the losses are used."""
    torch.manual_seed(0)
    w, layer = rand(4, 4).requires_grad_(), nn.Linear(4, 4, dtype=DOUBLE)
    xs = [rand(3, 4).requires_grad_() for _ in range(8)]
    with ab.batch(enabled=enabled) as scope:
        results = [case(layer(x), w) for x in xs]
        losses = [r.square().sum() for r in results]
    report = scope.report()
    loss = sum(losses[::2] if some else losses)
    leaves = [*xs, w, *layer.parameters()]
    grads = torch.autograd.grad(loss, leaves, create_graph=twice, allow_unused=True)
    values: list[Tensor | None] = [*results, *grads]
    if twice:
        total = sum(g.square().sum() for g in grads if g is not None)
        values += torch.autograd.grad(total, leaves, allow_unused=True)
    return values, report


def check(case: Callable[[Tensor, Tensor], Any], **how: bool) -> ab.Report:
    values, report = run(case, True, **how)
    expected, _ = run(case, False, **how)
    for k, (value, other) in enumerate(zip(values, expected, strict=True)):
        assert_same(f"tensor {k}", value, other)
    assert len(report.flushes) == 1, str(report)
    return report


@pytest.mark.parametrize("some", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_function_with_a_rule_is_batched(name: str, some: bool) -> None:
    report = check(CASES[name], some=some)
    rule = "loop" if name == "forward_reads" else "functorch"
    assert rows(report)
    for row in rows(report):
        assert (row.instances, row.batches, row.rule) == (8, 1, rule), str(report)


@pytest.mark.parametrize("name", TWICE)
def test_gradients_of_gradients(name: str) -> None:
    check(CASES[name], twice=True)


def test_once_differentiable_stays_so() -> None:
    for enabled in (False, True):
        x = rand(3).requires_grad_()
        with ab.batch(enabled=enabled):
            y = [Once.apply(x * 1, 1.0).square().sum() for _ in range(2)]
        (grad,) = torch.autograd.grad(y[0] + y[1], x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def test_what_differs_is_batched_apart() -> None:
    """Tests different classes, non-tensor arguments, and tensors that require grad."""
    x = [rand(3).requires_grad_() for _ in range(6)]

    def program(enabled: bool) -> tuple[list[Tensor], ab.Report]:
        with ab.batch(enabled=enabled) as scope:
            h = [t * 1 for t in x]
            out = [Scaled.apply(h[0], 1.0), Scaled.apply(h[1], 1), Scaled.apply(h[2], 1.0)]
            out += [
                Once.apply(h[3], 1.0),
                Scaled.apply(h[4].detach(), 1.0),
                Scaled.apply(h[5], -1.0),
            ]
        return out, scope.report()

    values, report = program(True)
    for value, expected in zip(values, program(False)[0], strict=True):
        assert_same("value", value, expected)
        assert value.requires_grad == expected.requires_grad
    assert sorted(row.instances for row in rows(report)) == [1, 1, 1, 1, 2]


def test_a_tuple_is_returned_as_one_and_views_of_results_wait() -> None:
    x = rand(2, 3).requires_grad_()
    with ab.batch() as scope:
        results = [Two.apply(x * k, x)[0].t()[1] for k in range(4)]
        pair = Two.apply(x * 5, x)
        assert isinstance(pair, tuple)
        assert all(is_pending(t) for t in [*results, *pair])
        assert pair[0].shape == (2, 3)
    assert rows(scope.report())[0].batches == 1


def test_tensors_that_are_there_are_batched_too() -> None:
    x = [rand(3).requires_grad_() for _ in range(4)]
    with ab.batch() as scope:
        y = [Scaled.apply(t, 2.0) for t in x]
        with torch.no_grad():  # the ops of forward are captured, and not the call
            plain = Scaled.apply(x[0], 2.0)
    assert not plain.requires_grad
    assert_same("plain", plain, x[0].detach().sin() * 2)
    assert [row.instances for row in rows(scope.report())] == [4]
    sum(t.sum() for t in y).backward()
    assert_same("gradient", x[1].grad, x[1].detach() * (x[1].sin() * 2).detach() * 2)


def test_a_class_of_a_function_that_is_gone() -> None:
    """The class is freed when no graph can call it."""

    def double(x: Tensor) -> tuple[Tensor, Any]:
        class Doubled(Function):
            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
                pass

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Tensor:
                return g * 7

        return Doubled.apply(x), weakref.ref(Doubled)

    x = [rand(3).requires_grad_() for _ in range(3)]
    with ab.batch():
        pairs = [double(t * 1) for t in x]
        gc.collect()
    gc.collect()
    (grad,) = torch.autograd.grad(pairs[0][0].sum(), x[0], create_graph=True)
    assert grad.tolist() == [7, 7, 7]
    references = [r for _, r in pairs]
    del pairs, grad
    gc.collect()
    assert [r() for r in references] == [None, None, None]


def test_a_write_to_what_is_saved_is_eagers_error() -> None:
    for enabled in (False, True):
        x = rand(3).requires_grad_()
        with ab.batch(enabled=enabled):
            h = x * 1
            y = Scaled.apply(h, 1.0)
        with torch.no_grad():
            h.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_an_error_is_the_users_and_nothing_breaks() -> None:
    class Fails(Scaled):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Tensor:
            raise KeyError("mine")

    x = rand(3).requires_grad_()
    with ab.batch():
        h = x * 1
        with pytest.raises(KeyError, match="mine"):
            Fails.apply(h, 1.0)
        y = Scaled.apply(h, 1.0)
    assert_same("value", y, x.sin())
    assert_same("eager", Scaled.apply(x, 1.0), x.sin())


def test_a_cell_and_a_map() -> None:
    layer = nn.Linear(3, 3, dtype=DOUBLE)

    def step(x: Tensor) -> Tensor:
        y: Tensor = Scaled.apply(layer(x), 2.0)
        return y.tanh()

    xs = [rand(1, 3) for _ in range(4)]
    expected = [step(x) for x in xs]
    cell = ab.cell(step)
    with ab.batch():
        in_cells = [cell(x) for x in xs]
    mapped = ab.map(step, xs)
    for k in range(4):
        assert_same("cell", in_cells[k], expected[k])
        assert_same("map", mapped[k], expected[k])


def test_a_function_captured_before_the_block() -> None:
    """Modules often assign `apply` to a name at import."""
    scaled = Scaled.apply
    with ab.batch() as scope:
        results = [scaled(rand(3).requires_grad_() * 1, 1.0) for _ in range(4)]
    assert rows(scope.report())[0].batches == 1
    assert all(r.requires_grad for r in results)


def test_variables_it_closes_over_have_the_values_of_the_call() -> None:
    factor = 1.0

    def doubled(x: Tensor) -> Tensor:
        return x * (2 * factor)

    class Scales(Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return doubled(x)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.factor = factor

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * ctx.factor * 5

    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        x = rand(3).requires_grad_()
        with ab.batch(enabled=enabled) as scope:
            results = []
            for n in range(4):
                factor = float(n // 2)
                results.append(Scales.apply(x * n))
            factor = 100.0
        torch.stack(results).sum().backward()
        found.append([*results, x.grad])
        assert factor == 100.0
    for value, expected in zip(found[1], found[0], strict=True):
        assert_same("value", value, expected)
    assert sum(row.batches for row in rows(scope.report())) == 2  # one for each factor


def test_an_error_of_backward_on_trial_is_not_left_to_python() -> None:
    """A trial finds out what eager saves. In the trial this backward raises an error in Python."""
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        x, factor = rand(3, 4).requires_grad_(), rand(4, 4)
        alias = factor.data
        with ab.batch(enabled=enabled):
            results = [OwnRule.apply(x * k, factor) for k in (1.0, 2.0)]
        alias.mul_(2)
        loss = torch.stack(results).square().sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append([g, *torch.autograd.grad(g.square().sum(), x)])
    for value, expected in zip(found[1], found[0], strict=True):
        assert_same("gradient", value, expected)
