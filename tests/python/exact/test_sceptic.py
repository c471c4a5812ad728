"""What a sceptic found to differ from eager, each with the program that showed it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exactly import Blocks, assert_deferred, differentiate, inputs, rand, same, weight
from torch import Tensor, nn

NAN = float("nan")
INF = float("inf")

# --- gradients at values that tie, are zero or NaN ---

VALUES = {
    "ties": [[1.0, 1.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], [0.0, 1.0, 0.0, 1.0]],
    "zeros": [[0.0, 2.0, 3.0, 4.0], [0.0, 0.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]],
    "nan": [[NAN, 1.0, 2.0, 2.0], [0.0, 0.0, NAN, 1.0], [0.0, NAN, NAN, 5.0]],
    "inf": [[INF, INF, 1.0, 0.0], [-INF, 1.0, -INF, 1.0], [INF, -INF, 2.0, 3.0]],
}
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "min": lambda x: x.min(),
    "max": lambda x: x.max(),
    "min of a matrix": lambda x: x.view(2, 2).t().min(),
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "prod": lambda x: x.prod(),
    "prod over a dimension": lambda x: x.prod(0),
    "amax": lambda x: x.amax(),
    "aminmax": lambda x: x.aminmax()[0],
    "max over a dimension": lambda x: x.max(0).values,
    "median over a dimension": lambda x: x.median(0).values,
    "infinity norm": lambda x: torch.linalg.vector_norm(x, INF),
}


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("instances", [1, 3])
def test_gradients_of_equal_elements_are_shared(
    reduction: str, values: str, instances: int
) -> None:
    """functorch's `min`, `max`, `median` and `prod` have other gradients than eager's."""

    def program(block: Blocks) -> Any:
        xs = [torch.tensor(x, requires_grad=True) for x in VALUES[values][:instances]]
        with block():
            results = [REDUCTIONS[reduction](x * 1) for x in xs]
        differentiate(results)
        return results, xs

    same(program)


@pytest.mark.parametrize("reduction", ["min", "max", "median", "nanmedian", "prod", "amax"])
def test_infinite_gradients_of_reductions(reduction: str) -> None:
    """What has no part in the extremum gets no part of an infinite gradient."""

    def program(block: Blocks) -> Any:
        xs = [torch.tensor(x, requires_grad=True) for x in VALUES["ties"]]
        with block():
            results = [REDUCTIONS[reduction](x * 1) for x in xs]
        torch.autograd.backward(results, [torch.tensor(v) for v in (INF, NAN, 1.0)])
        return results, xs

    same(program)


def test_extrema_of_integers_and_low_precision() -> None:
    """Types that the native rules leave out, and what rounds."""

    def program(block: Blocks) -> Any:
        w = weight(6)
        with block():
            integers = [(w * i * 10).long().max() for i in range(3)]
            low = [(w * i).bfloat16().min() for i in range(1, 4)]
            single = [(w * i).sum().max() for i in range(3)]
        differentiate(low, single)
        return integers, low, single, w

    same(program)


def test_extrema_are_one_batch() -> None:
    """Of any shape."""

    def program(block: Blocks) -> Any:
        w, xs = weight(6), [rand(6) for _ in range(4)]
        with block():
            sizes = [(6, 1), (2, 3), (3, 2), (1, 6)]
            ys = [(w * x).view(size) for x, size in zip(xs, sizes, strict=True)]
            results = [f(y) for y in ys for f in (Tensor.max, Tensor.min, Tensor.prod)]
        differentiate(results)
        return results, w

    assert_deferred(same(program), batches=4)


def test_extremum_of_nothing_is_eagers_error() -> None:
    """A reduction of no elements."""

    def program(block: Blocks) -> Any:
        with block():
            return (weight(0) * 1).max()

    same(program, raises=RuntimeError)


# --- operands without dimensions ---

SCALAR_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda x: x.roll(1),
    "softmax": lambda x: x.softmax(0),
    "softmax's gradient": lambda x: torch._softmax_backward_data(x, x * 2, 0, x.dtype),
    "cumsum": lambda x: x.cumsum(0),
    "flip": lambda x: x.flip(0),
    "sort": lambda x: x.sort(0).values,
    "amax": lambda x: x.amax(0),
    "std": lambda x: x.var(0, correction=0),
    "logsumexp": lambda x: x.logsumexp(0),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "gather": lambda x: x.gather(0, torch.tensor(0)),
    "scatter": lambda x: x.scatter(0, torch.tensor(0), 2.0),
    "normalize": lambda x: F.normalize(x, dim=0),
    "count_nonzero": lambda x: x.count_nonzero(0),
}


@pytest.mark.parametrize("op", SCALAR_OPS)
@pytest.mark.parametrize("gradient", [True, False])
def test_dimension_of_a_number(op: str, gradient: bool) -> None:
    """Dimension 0 of what has none is not the batch's."""

    def program(block: Blocks) -> Any:
        xs = [torch.tensor(i + 1.0, requires_grad=gradient) for i in range(4)]
        w = torch.ones((), requires_grad=gradient)
        with block():
            results = [
                SCALAR_OPS[op](
                    (x * w) if gradient else torch.mm(x[None, None], x[None, None])[0, 0]
                )
                for x in xs
            ]
        differentiate(results)
        return results, xs

    same(program)


# --- gradients of a transform ---


def block_of(block: Blocks, w: Tensor) -> tuple[Tensor, Tensor]:
    """A held value, and one that was computed from it."""
    with block():
        h = torch.cat([(w * i).sin() for i in range(1, 3)])
        y = (h * h).cos() * w.sum()
    return h, y


BATCHED_GRADIENTS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "is_grads_batched": lambda w, h, y: torch.autograd.grad(
        y, [w, h], torch.eye(6).double(), is_grads_batched=True, retain_graph=True
    ),
    "vmap": lambda w, h, y: torch.vmap(
        lambda v: torch.autograd.grad(y, w, v, retain_graph=True)[0]
    )(torch.eye(6).double()),
    "of two roots": lambda w, h, y: torch.vmap(
        lambda v: torch.autograd.grad([y, h], w, [v, v.cos()], retain_graph=True)[0]
    )(torch.eye(6).double()),
    "of one root of two": lambda w, h, y: torch.vmap(
        lambda v: torch.autograd.grad(
            [y.sum(), h], w, [torch.ones(()).double(), v], retain_graph=True
        )[0]
    )(torch.eye(6).double()),
    "twice": lambda w, h, y: [
        torch.autograd.grad(y, w, torch.eye(6).double(), is_grads_batched=True, retain_graph=r)
        for r in (True, False)
    ],
    "with create_graph": lambda w, h, y: torch.autograd.grad(
        torch.autograd.grad(y, w, torch.eye(6).double(), is_grads_batched=True, create_graph=True)[
            0
        ].sum(),
        w,
    ),
    "and an ordinary one": lambda w, h, y: [
        torch.autograd.grad(y, w, torch.eye(6).double(), is_grads_batched=True, retain_graph=True),
        torch.autograd.grad(y.sum(), [h, w]),
    ],
}


@pytest.mark.parametrize("how", BATCHED_GRADIENTS)
def test_batched_gradients(how: str) -> None:
    """Gradients that are tensors of vmap go through the block as through eager's graph."""

    def program(block: Blocks) -> Any:
        w = weight(3)
        return BATCHED_GRADIENTS[how](w, *block_of(block, w))

    same(program)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian_and_hessian(strategy: str) -> None:
    """torch.autograd.functional with vectorize=True."""

    def program(block: Blocks) -> Any:
        x = rand(3)
        return (
            torch.autograd.functional.jacobian(
                lambda w: block_of(block, w), x, vectorize=True, strategy=strategy
            ),
            torch.autograd.functional.hessian(
                lambda w: block_of(block, w)[1].sum(),
                x,
                vectorize=True,
                outer_jacobian_strategy=strategy,
            ),
        )

    same(program)


def test_gradcheck_of_all_kinds() -> None:
    """gradcheck with batched gradients and forward-mode AD, and of second derivatives."""

    def program(block: Blocks) -> Any:
        w = weight(3)
        f = lambda w: block_of(block, w)  # noqa: E731
        return (
            torch.autograd.gradcheck(f, w, check_batched_grad=True, check_forward_ad=True),
            torch.autograd.gradgradcheck(f, w, check_batched_grad=True, check_fwd_over_rev=True),
        )

    same(program)


# --- buffers that are refilled through NumPy ---

BUFFER_USES: dict[str, Callable[[Tensor, Tensor, Tensor], list[Tensor]]] = {
    "on the right of @": lambda w, m, t: [w.detach() @ t],
    "on the right of @, trained": lambda w, m, t: [w @ t],
    "both": lambda w, m, t: [t * w, w.detach() @ t, t * w],
    "the same twice": lambda w, m, t: [w @ t, w @ t, w + t],
    "as a vector": lambda w, m, t: [m @ t, t @ m],
    "as a bias": lambda w, m, t: [F.linear(w * 1, m, t), F.layer_norm(w * 1, (3,), t, t)],
    "as a view": lambda w, m, t: [w * t[:3], w @ t.view(3), m @ t.view(3, 1)],
    "stacked": lambda w, m, t: [torch.stack([w, t])],
}


@pytest.mark.parametrize("made", ["numpy", "torch", "in the block"])
@pytest.mark.parametrize("use", BUFFER_USES)
def test_refilled_buffer(use: str, made: str) -> None:
    """What a buffer held when it was used counts, in a weight's position too."""

    def program(block: Blocks) -> Any:
        w, m, results = weight(3), weight(3, 3), []
        t = torch.from_numpy(np.zeros(3)) if made == "numpy" else torch.zeros(3).double()
        with block():
            if made == "in the block":
                t = torch.zeros(3).double()
            buffer = t.numpy()
            for i in range(3):
                buffer[:] = np.arange(3) + i
                # Eager's gradient would be of what the buffer holds at last.
                results.extend(BUFFER_USES[use](w, m, t if block.enabled else t.clone()))
        differentiate(results)
        return results, w, m

    same(program)


def test_buffer_given_away_after_its_first_use() -> None:
    """From then on it is copied at each use."""

    def program(block: Blocks) -> Any:
        w, t = weight(3), torch.ones(3).double()
        with block() as scope:
            results = [w * t.clone(), w @ t.clone()]
            first = [w.detach() * t, w.detach() @ t]
            if block.enabled:
                scope.flush()
            buffer = t.numpy()
            for i in range(3):
                buffer[:] = i
                now = t if block.enabled else t.clone()
                results += [w * now, w @ now]
        differentiate(results)
        return first, results, w

    same(program)


def test_buffer_that_changes_its_sign_alone() -> None:
    """-0 is another content than 0."""

    def program(block: Blocks) -> Any:
        w, buffer = weight(1), np.zeros(1)
        t = torch.from_numpy(buffer)
        with block():
            results = [1 / (w.detach() * 0 @ t + t)]
            buffer[:] = -0.0
            results += [1 / (w.detach() * 0 @ t * 0 + t), torch.mv(t[None], t).copysign(t)]
        return results

    same(program)


# --- in-place ops ---

WRONG_FILLS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x.fill_(x),
    "a vector": lambda x: x.fill_(torch.ones(3).double()),
    "one element": lambda x: x.fill_(x[:1]),
}


@pytest.mark.parametrize("value", WRONG_FILLS)
def test_fill_with_more_than_a_number(value: str) -> None:
    """fill_ takes a tensor without dimensions."""

    def program(block: Blocks) -> Any:
        with block():
            return WRONG_FILLS[value](weight(3) * 1)

    same(program, raises=RuntimeError)


IN_PLACE: dict[str, tuple[Callable[[Tensor], Any], type[Exception] | None]] = {
    "acosh_": (lambda x: x.acosh_(), NotImplementedError),
    "asinh_": (lambda x: x.asinh_(), NotImplementedError),
    "atanh_": (lambda x: x.atanh_(), NotImplementedError),
    "leaky_relu_": (lambda x: F.leaky_relu_(x, -0.5), RuntimeError),
    "elu_": (lambda x: F.elu_(x, -0.5), RuntimeError),
    "celu_": (lambda x: torch.celu_(x, -0.5), RuntimeError),
    "leaky_relu_, positive": (lambda x: F.leaky_relu_(x, 0.5), None),
    "elu_, positive": (lambda x: F.elu_(x, 0.5), None),
    "celu_, positive": (lambda x: torch.celu_(x, 0.5), None),
    "selu_": (lambda x: torch.selu_(x), None),
}


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_op_without_its_functional_gradient(op: str) -> None:
    """Autograd has other formulas for some in-place ops, or none."""
    function, error = IN_PLACE[op]

    def program(block: Blocks) -> Any:
        w = torch.tensor([1.5, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        with block():
            results = []
            for i in range(1, 3):
                x = w * i - (0 if error is NotImplementedError else 4)
                function(x)
                results.append(x)
        values = [x.detach().clone() for x in results]
        differentiate(results)
        return values, w

    same(program, raises=error)


# --- metadata ---

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
    """The Meta kernels of some ops give other strides than the CPU's where it is not row-major."""

    def program(block: Blocks) -> Any:
        x, s = torch.rand(size, size).t().requires_grad_(), torch.tensor(2.0, requires_grad=True)
        with block():
            result = LARGE_OPS[op](x * 1, s * 1)
            strides = result.stride()
        return strides, result.stride(), result.detach()[:3, :3].clone()

    same(program)


@pytest.mark.parametrize("sizes", [(1, 5), (1, 1, 5), (3, 1, 5), (2, 1, 1, 5), (1, 2, 1, 5)])
def test_strides_of_expand(sizes: tuple[int, ...]) -> None:
    """A new dimension of one element steps over what follows it."""

    def program(block: Blocks) -> Any:
        w = weight(1, 5)
        with block():
            x = w * 2
            return [
                t.stride()
                for t in (x.expand(sizes), x[:, ::2].expand(*sizes[:-1], 3), x[0].expand(sizes))
            ] + [x.sum().expand(sizes).stride(), w.expand(sizes).stride()]

    same(program)


# --- held values whose elements share memory ---

EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x.sum(),
    "by elements": lambda x: (x * torch.arange(12.0).double().view(4, 3)).sum(),
    "by a product": lambda x: (x @ torch.ones(3, 2).double()).sum(),
    "by a function": lambda x: x.cumsum(0).sum(),
    "twice": lambda x: (x * x).sum() + x.cos().mean(),
    "through a view": lambda x: (x[1:] * 2).sum(),
}
BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "outside": lambda w: w.expand(4, 3),
    "computed": lambda w: (w * 2).expand(4, 3),
    "a view": lambda w: (w * 2).view(1, 3)[:, :].broadcast_to(4, 3),
    "of a number": lambda w: w.sum().expand(4, 3),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("use", EXPANDED)
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradient_of_a_held_expanded_tensor(use: str, base: str, create_graph: bool) -> None:
    """Each of its elements has a gradient of its own; views of it alone do not tell whose."""
    if use == "through a view":
        pytest.xfail("see README's limits")

    def program(block: Blocks) -> Any:
        w = weight(3)
        with block():
            held = [BASES[base](w * i if base != "outside" else w) for i in range(1, 3)]
            results = [EXPANDED[use](x) for x in held]
        grads = torch.autograd.grad(
            sum(results), [*held, w], retain_graph=True, create_graph=create_graph
        )
        return [g.detach().contiguous() for g in grads], w

    same(program)


def test_backward_to_a_held_expanded_tensor() -> None:
    """`backward(inputs=[x])`, hooks and `retain_grad` of what `broadcast_to` gave."""

    def program(block: Blocks) -> Any:
        w, seen = weight(4), []
        with block():
            x = w.broadcast_to(4, 4)
            x.retain_grad()
            x.register_hook(lambda g: seen.append(g.clone()))
            y = x.sum() + (x * w).sum()
        y.backward()
        return x, w, seen

    same(program)


def test_held_views_of_one_region() -> None:
    """Two held views of the same elements are one operand in forward, not in backward."""

    def program(block: Blocks) -> Any:
        w = weight(3, 3)
        with block():
            views = [w[:2] for _ in range(3)]
            others = [w[:2], w.detach()[:2], w[:2]]
            results = [x.cumsum(0) for x in views]
            more = [x.logcumsumexp(0) for x in others]
        return torch.autograd.grad(
            sum((r * i).sum() for i, r in enumerate([*results, *more], 1)), [*views, w]
        )

    same(program)


READ_FIRST: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "itself": lambda x, y: x.sum().item(),
    "its grad_fn": lambda x, y: x.grad_fn is None,
    "what was computed from it": lambda x, y: y.mean().item(),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("use", EXPANDED)
@pytest.mark.parametrize("read", READ_FIRST)
def test_expanded_tensor_that_was_read(use: str, base: str, read: str) -> None:
    """What was captured before and after the read gives each element its own gradient."""

    def program(block: Blocks) -> Any:
        w = weight(3)
        with block():
            x = BASES[base](w)
            before = EXPANDED[use](x)
            other = x.cos()
            READ_FIRST[read](x, other)
            after = EXPANDED[use](x) + other.sum()
        inputs = [w] if use == "through a view" else [x, w]
        grads = torch.autograd.grad(before + after, inputs)
        return [g.contiguous() for g in grads], before, after, w

    same(program)


def test_gradient_of_a_leaf_with_gaps_is_dense() -> None:
    """Every second column of a matrix: its gradient has no gaps."""

    def program(block: Blocks) -> Any:
        x, w = rand(4, 6)[:, ::2].detach().requires_grad_(), weight(3)
        with block():
            y = (x * w).sum()
        return torch.autograd.grad(y, [x, w], retain_graph=True), y.backward(), x.grad, w

    same(program)


# --- calls that are known ---


def frozen_halves(block: Blocks) -> Any:
    """Two weights of one shape, each a new tensor object in every instance."""
    w, layer = rand(6, 3), nn.Linear(3, 3).double()
    with block():
        results = []
        for x in inputs():
            h = layer(x)
            results += [F.linear(h, w[:3]), F.linear(h, w[3:]), h @ w[:3].t(), h @ w[3:].t()]
    return results


def frozen_projections(block: Blocks) -> Any:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double().requires_grad_(False)
    layer = nn.Linear(4, 4).double()
    with block():
        results = []
        for rows in (3, 4, 5):
            q = layer(rand(1, rows, 4))
            results.append(attention(q, q * 2, q * 3)[0])
    return results


def one_matrix_in_two_shapes(block: Blocks) -> Any:
    """An earlier block does not decide which matrix a later one multiplies."""
    w, x, y, z = weight(2, 2), rand(2, 4), rand(2, 4) + 1, rand(2, 4) + 2
    with block():
        first = [w @ x, w @ x.view(2, 4), w @ x[:2], w @ x.detach()]
    with block():
        second = [w @ y, w @ z]
    return first, second


@pytest.mark.parametrize("program", [frozen_halves, frozen_projections, one_matrix_in_two_shapes])
def test_known_calls_know_their_weights(program: Any) -> None:
    same(program)


def test_column_major_values_written_twice() -> None:
    """A captured write leaves what was read before it as it was, for a batch to be run again."""

    def program(block: Blocks) -> Any:
        b, xs = weight(4), [rand(3, 4).requires_grad_() for _ in range(3)]
        with block():
            results = []
            for x in xs:
                y = x.t().clone(memory_format=torch.contiguous_format).t() * 1.5
                y += b
                y.mul_(2)
                results.append(y)
        results[0].sum().backward()
        results[2].square().sum().backward()
        return results, b, xs

    same(program)
