"""Row "Contexts": Functions, compiled functions, transforms, modes and subclasses in the block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import (
    DOUBLE,
    Blocks,
    differentiate,
    inputs,
    rand,
    same,
    weight,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# --- custom autograd.Function ---


class Cube(torch.autograd.Function):
    """Saves its input and a number. Its gradient is wrong on purpose, to show that it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x**3 * factor

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return g * x * 10 * ctx.factor, None


class WithSetup(torch.autograd.Function):
    """Uses setup_context, and has two results, one of which is not differentiable."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Any:
        return x @ w, (x > 0).long()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        return g @ w.t() * 2, x.t() @ g * 3


class InPlace(torch.autograd.Function):
    """Writes to its input, and declares this."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 7


class Straight(torch.autograd.Function):
    """A straight-through estimator, which returns its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hard: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return hard

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        return g, None


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "saving": lambda h, w: Cube.apply(h, 2.0),
    "setup_context": lambda h, w: WithSetup.apply(h, w),
    "mark_dirty": lambda h, w: InPlace.apply(h * 1),
    "straight_through": lambda h, w: Straight.apply(h, (h > 0).double()),
    "chained": lambda h, w: Cube.apply(F.linear(Cube.apply(h, 1.0), w).tanh(), 0.5),
    "under_no_grad": lambda h, w: (torch.no_grad()(lambda: Cube.apply(h, 1.0))(), h * 2),
}


@pytest.mark.parametrize("per_loss", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_context_custom_function(name: str, per_loss: bool) -> None:
    """The function's own backward runs for each loss, with the tensors that forward saved."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            results = [FUNCTIONS[name](F.linear(x, w), w) for x in xs]
            losses = [(r[0] if isinstance(r, tuple) else r) * 2 for r in results]
        for loss in losses if per_loss else []:
            if loss.requires_grad:
                loss.sum().backward()
        if not per_loss:
            differentiate(losses)
        return results, losses, w

    same(program)


def test_context_custom_function_that_fails() -> None:
    """Errors of its forward and its backward reach the user unchanged."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, now: bool) -> Tensor:
            if now:
                raise KeyError("forward")
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            raise LookupError("backward")

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            results = [F.linear(x, w) for x in xs]
            with pytest.raises(KeyError, match="forward"):
                Failing.apply(results[1], True)
            late = Failing.apply(results[2], False)
            after = results[0] * 2
        with pytest.raises(LookupError, match="backward"):
            late.sum().backward()
        return results, after

    same(program)


# --- compiled functions ---


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", ["function", "module", "graph_break", "block_in_it"])
def test_context_compile(kind: str, backend: str) -> None:
    """Calls compiled code in the block, with pending arguments and closures."""

    def program(block: Blocks) -> Any:
        torch._dynamo.reset()
        layer, xs = nn.Linear(3, 3).double(), inputs((2, 2, 2))

        def function(h: Tensor) -> Tensor:
            if kind == "block_in_it":
                with block():
                    return layer(h).tanh()
            y = layer(h).tanh()
            if kind == "graph_break":
                torch._dynamo.graph_break()
            return y * 2

        compiled = torch.compile(layer if kind == "module" else function, backend=backend)
        if kind == "block_in_it":
            results = [compiled(x) for x in xs]
        else:
            with block():
                results = [compiled(layer(x)).sigmoid() for x in xs]
        differentiate(results)
        return results, list(layer.parameters())

    same(program)


# --- transforms ---


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "vmap": lambda m, h, w: torch.vmap(lambda a: m(a) * h[0])(h),
    "vmap_in_dims": lambda m, h, w: torch.vmap(torch.mv, (None, 0))(w, h),
    "vmap_of_vmap": lambda m, h, w: torch.vmap(torch.vmap(lambda a: a * h[0, 0] + w[0, 0]))(h),
    "vmap_randomness": lambda m, h, w: torch.vmap(
        lambda a: F.dropout(a, 0.0) * 2, randomness="different"
    )(h),
    "grad": lambda m, h, w: torch.func.grad(lambda a: (m(a) * h).sum())(h),
    "grad_and_value": lambda m, h, w: torch.func.grad_and_value(lambda a: m(a).sum())(h),
    "grad_of_parameters": lambda m, h, w: torch.func.grad(
        lambda p: torch.func.functional_call(m, p, (h,)).tanh().sum()
    )(dict(m.named_parameters())),
    "per_sample_grad": lambda m, h, w: torch.vmap(torch.func.grad(lambda a: m(a).tanh().sum()))(h),
    "jvp": lambda m, h, w: torch.func.jvp(lambda a: m(a).tanh(), (h,), (h * 2,)),
    "vjp": lambda m, h, w: torch.func.vjp(lambda a: m(a).tanh(), h)[1](h * 2),
    "jacrev": lambda m, h, w: torch.func.jacrev(lambda a: (w @ a).tanh())(h[0]),
    "jacfwd": lambda m, h, w: torch.func.jacfwd(lambda a: (w @ a).tanh())(h[0]),
    "hessian": lambda m, h, w: torch.func.hessian(lambda a: (w @ a).tanh().sum())(h[0]),
    "linearize": lambda m, h, w: torch.func.linearize(lambda a: m(a).tanh(), h)[1](h),
    "functionalize": lambda m, h, w: torch.func.functionalize(lambda a: (a * 1).add_(1))(h),
    "functional_jacobian": lambda m, h, w: torch.autograd.functional.jacobian(
        lambda a: (w @ a).tanh(), h[0].detach()
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_context_transform(name: str) -> None:
    """Calls transforms of torch.func in the block, over pending values and parameters."""

    def program(block: Blocks) -> Any:
        model, w, xs = nn.Linear(3, 3).double(), weight(), inputs()
        with block():
            results = [TRANSFORMS[name](model, F.linear(x, w), w) for x in xs]
        differentiate(results)
        return results, w, list(model.parameters())

    same(program)


def test_context_block_inside_a_transform() -> None:
    """Calls vmap, grad and jvp of a function that opens a block."""

    def program(block: Blocks) -> Any:
        w, x = weight(), rand(4, 3)

        def function(a: Tensor) -> Tensor:
            with block():
                return ((w @ a).tanh() * a).sum()

        results = [torch.vmap(function)(x), torch.func.grad(function)(x[0])]
        results.append(torch.vmap(torch.func.grad(function))(x))
        results.append(torch.func.jvp(function, (x[0],), (x[1],)))
        return results

    same(program)


# --- modes and subclasses ---


@pytest.mark.parametrize("place", ["around", "inside"])
def test_context_torch_function_mode(place: str) -> None:
    """The mode observes the calls that the user wrote, and may change them."""

    def program(block: Blocks) -> Any:
        calls: list[str] = []

        class Mode(TorchFunctionMode):
            def __torch_function__(
                self, f: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                calls.append(getattr(f, "__name__", str(f)))
                result = f(*args, **(kwargs or {}))
                return result * 2 if f is F.linear else result

        w, xs = weight(), inputs()
        if place == "around":
            with Mode(), block():
                results = [F.linear(x, w).tanh()[0] for x in xs]
        else:
            with block(), Mode():
                results = [F.linear(x, w).tanh()[0] for x in xs]
        differentiate(results)
        return results, w, calls

    same(program)


@pytest.mark.parametrize("place", ["around", "inside"])
def test_context_torch_dispatch_mode(place: str) -> None:
    """The mode observes the same ops as in eager mode, with real values, and may change them."""

    def program(block: Blocks) -> Any:
        ops: list[str] = []

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(
                self, f: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                ops.append(str(f))
                result = f(*args, **(kwargs or {}))
                return result * 2 if f is torch.ops.aten.tanh.default else result

        w, xs = weight(), inputs()
        if place == "around":
            with Mode(), block():
                results = [F.linear(x, w).tanh()[0] for x in xs]
        else:
            with block(), Mode():
                results = [F.linear(x, w).tanh()[0] for x in xs]
        differentiate(results)
        return results, w, sorted(ops)

    same(program)


def test_context_flop_counter() -> None:
    """FlopCounterMode of PyTorch counts the same number of operations."""
    from torch.utils.flop_counter import FlopCounterMode

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with FlopCounterMode(display=False) as counter, block():
            results = [F.linear(x, w).tanh() for x in xs]
        return results, counter.get_total_flops()

    same(program)


def test_context_fake_tensors() -> None:
    """Shapes without values: fake tensors made in the block, and results of them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            results = [F.linear(x, w) for x in xs]
            with FakeTensorMode() as mode:
                fake = mode.from_tensor(rand(2, 3))
                product = fake @ torch.empty(3, 4, dtype=DOUBLE)
        return results, type(product).__name__, tuple(product.shape), product.dtype

    same(program)


class Tagged(Tensor):
    """A subclass with __torch_function__. Results keep the type and a tag."""

    tag: str = ""

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(f, types, args, kwargs or {})
        if isinstance(result, Tagged):
            result.tag = "+".join(sorted(a.tag for a in args if isinstance(a, Tagged) and a.tag))
        return result


class Wrapper(Tensor):
    """A subclass with __torch_dispatch__, which holds another tensor and counts its ops."""

    ops: list[str]
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, ops: list[str]) -> Any:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        made.inner, made.ops = inner, ops
        return made

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = [a for a in args if isinstance(a, Wrapper)]
        found[0].ops.append(str(f))
        plain = [a.inner if isinstance(a, Wrapper) else a for a in args]
        result = f(*plain, **(kwargs or {}))
        return Wrapper(result, found[0].ops) if isinstance(result, Tensor) else result


@pytest.mark.parametrize("role", ["input", "weight", "pending"])
def test_context_torch_function_subclass(role: str) -> None:
    """Results keep the type and the attributes, if any argument is of the subclass."""

    def tagged(t: Tensor, tag: str) -> Tagged:
        made = t.as_subclass(Tagged)
        made.tag = tag
        return made

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []
        with block():
            for i, x in enumerate(xs):
                a: Tensor = tagged(x, f"x{i}") if role == "input" else x
                b: Tensor = tagged(w, "w") if role == "weight" else w
                h = a @ b
                if role == "pending":
                    h = tagged(h, "h")
                y = h.tanh() * 2
                results += [y, getattr(y, "tag", None), type(h).__name__]
        differentiate(results)
        return results, w

    same(program)


@pytest.mark.parametrize("role", ["input", "pending", "mixed"])
def test_context_torch_dispatch_subclass(role: str) -> None:
    """The code of the wrapper observes each op, as in eager mode."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []
        with block(), torch.no_grad():
            for x in xs:
                ops: list[str] = []
                h = F.linear(x, w)
                wrapped = Wrapper(x if role == "input" else h, ops)
                y = wrapped * 2 + (h if role == "mixed" else 1)
                results += [type(y).__name__, y.inner, h, sorted(ops)]
        return results

    same(program)
