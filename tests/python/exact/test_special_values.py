"""Gradients at ties, zero, infinity and NaN; 0-dimensional operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import Blocks, assert_deferred, differentiate, rand, same, weight
from torch import Tensor

NAN = float("nan")
INF = float("inf")

# --- gradients at ties, zero and NaN ---

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
    """The gradients of `min`, `max`, `median` and `prod` in functorch differ from eager."""
    if reduction == "aminmax" and "NotImpl" in str(torch.ones(2, requires_grad=True).aminmax()[0]):
        pytest.skip("this PyTorch has no derivative of aminmax")

    def program(block: Blocks) -> Any:
        xs = [torch.tensor(x, requires_grad=True) for x in VALUES[values][:instances]]
        with block():
            results = [REDUCTIONS[reduction](x * 1) for x in xs]
        differentiate(results)
        return results, xs

    same(program)


@pytest.mark.parametrize("reduction", ["min", "max", "median", "nanmedian", "prod", "amax"])
def test_infinite_gradients_of_reductions(reduction: str) -> None:
    """An element that is not an extremum gets no part of an infinite gradient."""

    def program(block: Blocks) -> Any:
        xs = [torch.tensor(x, requires_grad=True) for x in VALUES["ties"]]
        with block():
            results = [REDUCTIONS[reduction](x * 1) for x in xs]
        torch.autograd.backward(results, [torch.tensor(v) for v in (INF, NAN, 1.0)])
        return results, xs

    same(program)


def test_extrema_of_integers_and_low_precision() -> None:
    """Tests dtypes that native rules do not accept, and dtypes that round."""

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
    """Extrema of tensors of all shapes run as one batch."""

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
    """Reduces a tensor without elements."""

    def program(block: Blocks) -> Any:
        with block():
            return (weight(0) * 1).max()

    same(program, raises=RuntimeError)


LOGITS = [[INF, -INF, 0.5], [-INF, INF, NAN], [2.0, -1.0, 0.0], [800.0, -800.0, INF]]
WEIGHTS: dict[str, tuple[int, ...] | None] = {
    "none": None,
    "by class": (3,),
    "by row": (-1, 1),
    "by element": (-1, 3),
    "a number": (),
    "one": (1, 1),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("argument", ["weight", "pos_weight"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_binary_cross_entropy_of_infinite_logits(kind: str, argument: str, reduction: str) -> None:
    """functorch decomposes the op, and the gradient of the parts can be NaN, unlike in eager."""

    def program(block: Blocks) -> Any:
        results = []
        xs = [torch.tensor(LOGITS[:rows], requires_grad=True) for rows in (2, 4, 1, 3)]
        shared, sizes = torch.tensor([0.5, 2.0, 3.0]), WEIGHTS[kind]
        with block() as scope:
            for x in xs:
                options = {}
                if sizes == (3,):
                    options = {argument: shared}
                elif sizes is not None:
                    options = {argument: torch.rand([len(x) if n < 0 else n for n in sizes]) * 2}
                target = (x.detach() > 0).float() if sizes is not None else torch.rand(x.shape)
                results.append(
                    F.binary_cross_entropy_with_logits(
                        x * 1, target, reduction=reduction, **options
                    )
                )
        if block.enabled:
            losses = [r for r in scope.report().signatures if "entropy" in r.op]
            assert [(r.batches, r.rule) for r in losses] == [(1, "native")]
        differentiate(results)
        return results, xs

    same(program)


@pytest.mark.parametrize("argument", ["weight", "pos_weight"])
def test_weights_of_binary_cross_entropy_have_no_gradient(argument: str) -> None:
    """The block raises eager's error."""

    def program(block: Blocks) -> Any:
        with block():
            w = weight(3) * 2
            return F.binary_cross_entropy_with_logits(rand(3), rand(3), **{argument: w})

    same(program, raises=RuntimeError)


def test_binary_cross_entropy_of_other_layouts_and_types() -> None:
    """Tests arguments that the native rule does not accept."""

    def program(block: Blocks) -> Any:
        xs = [torch.tensor(LOGITS[:3], requires_grad=True) for _ in range(3)]
        one = [torch.tensor(INF, requires_grad=True) for _ in range(3)]
        loss = F.binary_cross_entropy_with_logits
        with block():
            y = torch.ones(3, 3)
            results = [loss((x * 1).t(), y, reduction="none") for x in xs]
            results += [loss((x * 1).t(), y) for x in xs]
            results += [loss(x * 1, y.double()) for x in xs]
            results += [loss(x * 1, torch.ones(())) for x in one]
        differentiate(results)
        return results, xs, one

    same(program)


# --- 0-dimensional operands ---

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
    """Dimension 0 of a 0-dimensional tensor must not become the batch's dimension."""

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


# --- cases found by a sweep over infinite, tiny and huge values ---


def own_embedding(padding_idx: int | None, kind: torch.dtype) -> Callable[[Tensor, int], Tensor]:
    def function(w: Tensor, k: int) -> Tensor:
        indices = torch.tensor([[2, 1], [1, k]], dtype=kind)
        return F.embedding(indices, w.view(3, 2).tanh(), padding_idx=padding_idx)

    return function


ODD: dict[str, tuple[list[float], Callable[[Tensor, int], Tensor]]] = {
    "norm of one huge number": ([1e300], lambda x, k: x.norm()),
    "norm of one tiny number": ([1e-300], lambda x, k: torch.linalg.vector_norm(x)),
    "norms of one or two": ([1e300, 2.0], lambda x, k: (x[: k % 2 + 1] * 1).norm()),
    "norms of rows of one": ([1e300, 1e-300], lambda x, k: (x.view(2, 1) * 1).norm(dim=1)),
    "product of an infinite number": ([INF], lambda x, k: x[0].prod()),
    "logcumsumexp of an infinite number": ([INF], lambda x, k: x[0].logcumsumexp(0)),
    "steps from infinity": ([INF, 1.0], lambda x, k: torch.linspace(x[0].detach(), x[1], 4)),
    "embedding in a computed matrix": ([1.0] * 6, own_embedding(None, torch.int64)),
    "with padding": ([1.0] * 6, own_embedding(2, torch.int64)),
    "with padding, of int32": ([1.0] * 6, own_embedding(-1, torch.int32)),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_values(name: str) -> None:
    """Some of several instances have these values."""
    values, function = ODD[name]

    def program(block: Blocks) -> Any:
        xs = [torch.full((len(values),), 0.5, dtype=torch.float64) for _ in range(4)]
        xs[1:3] = [torch.tensor(values, dtype=torch.float64) for _ in range(2)]
        leaves = [x.requires_grad_() for x in xs]
        with block():
            results = [function(x * 1, k) for k, x in enumerate(leaves[:3])]
        differentiate(results)
        return results, leaves

    same(program)
