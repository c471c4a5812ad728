"""Elementwise ops and matrix products against eager, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import (
    BINARY,
    DOUBLE,
    UNARY,
    Sizes,
    check,
    raises_as_eager,
    rand,
    rules_of,
)
from torch import Tensor

# --- elementwise ---


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    op = UNARY[name]
    shapes = [(3,), (4,), (2, 3), (), (1, 3), (3, 1), (0, 3), (3,), (2, 3)]
    report = check(lambda x: op(op(x * 1.5)), *[rand(*s) for s in shapes])
    assert set(rules_of(report).values()) == {"native"}
    # Strided, transposed and expanded operands.
    check(lambda x: op(x[:, ::2]), rand(2, 4), rand(3, 4), rand(2, 5))
    check(lambda x: op(x.t() * 1.0), rand(2, 3), rand(2, 3), rand(4, 5))
    check(lambda x: op(x.expand(2, 3)), rand(3), rand(1, 3), rand(2, 1))


def test_unary_different_lengths_are_one_batch() -> None:
    report = check(lambda x: x.tanh(), rand(3), rand(5), rand(1), rand(0))
    (row,) = report.signatures
    assert (row.instances, row.batches, row.largest) == (4, 1, 4)


def test_unary_constants_are_in_the_signature() -> None:
    alphas = [0.1, 0.2, 0.1, 0.5]
    report = check(lambda x, a: F.elu(x, a), *[(rand(3), a) for a in alphas])
    assert report.batches == 3
    check(lambda x, a: x * a + a, *[(rand(3), a) for a in alphas])
    check(lambda x, a: F.leaky_relu(x, a), *[(rand(3), a) for a in alphas])
    check(lambda x, which: which(x), (rand(3), F.relu), (rand(3), F.elu), (rand(3), F.silu))


BROADCASTS = [
    ((3,), (3,)),
    ((4,), (4,)),
    ((2, 3), (3,)),
    ((4, 3), (3,)),
    ((2, 3), (1, 3)),
    ((2, 3), (2, 1)),
    ((3,), (2, 3)),
    ((3,), (4, 3)),
    ((), (3,)),
    ((2, 3), ()),
    ((1,), (3,)),
    ((2, 1), (1, 3)),
    ((3, 1), (1, 4)),
    ((2, 2, 3), (3,)),
    ((2, 2, 3), (2, 3)),
    ((2, 2, 3), (2, 1, 1)),
    ((), ()),
    ((1,), ()),
    ((0, 3), (3,)),
    ((1, 3), (1, 1, 3)),
]


@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str) -> None:
    op = BINARY[name]
    pairs = [(rand(*a), rand(*b)) for a, b in BROADCASTS * 2]
    check(lambda x, y: op(x.tanh(), y.sin()), *pairs)


@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "where"])
def test_binary_with_a_shared_side(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    op, (a, b) = BINARY[name], shapes
    check(lambda p, x: op(p, x.tanh()), *[rand(*b) for _ in range(3)], parameters=[rand(*a)])
    check(lambda p, x: op(x.tanh(), p), *[rand(*a) for _ in range(3)], parameters=[rand(*b)])
    check(
        lambda p, q, x: op(p * 1, q.tanh()) + x.sum(),
        *[rand(2) for _ in range(3)],
        parameters=[rand(*a), rand(*b)],
    )


def test_binary_of_a_value_with_itself() -> None:
    check(lambda x: (h := x.tanh()) * h + h / h, rand(3), rand(2, 3), rand(3))


@pytest.mark.parametrize("left", [torch.float32, DOUBLE, torch.bfloat16])
@pytest.mark.parametrize("right", [torch.float32, DOUBLE, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shapes", [((3,), (3,)), ((3,), ()), ((), (3,))], ids=str)
def test_type_promotion(
    left: torch.dtype, right: torch.dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    pairs = [(rand(*shapes[0]).to(left), (rand(*shapes[1]) * 3).to(right)) for _ in range(3)]
    try:
        pairs[0][0] + pairs[0][1]
    except NotImplementedError:  # PyTorch 2.15 promotes some pairs to a complex dtype of bfloat16
        raises_as_eager(lambda: [x.clone().requires_grad_().tanh() + y for x, y in pairs])
        return
    check(lambda x, y: x.tanh() + y, *pairs)
    check(lambda x, y: x.tanh() * y * 2.5, *pairs)


def test_integers_and_booleans() -> None:
    xs = [rand(3, 3) for _ in range(3)]
    check(lambda x: x.tanh().argmax(-1) * 2 + 1, *xs)
    check(lambda x: x.tanh().argmax(-1) / 2, *xs)
    check(lambda x: (x.tanh() > 0) & (x.sin() < 0.5), *xs)
    check(lambda x: ((x.tanh() > 0).sum(), (x.tanh() > 0).any(0), ~(x.tanh() > 0)), *xs)
    check(lambda x: F.one_hot(x.tanh().argmax(-1), 3), *xs)


def test_complex() -> None:
    xs = [torch.randn(3, dtype=torch.complex64) for _ in range(3)]
    check(lambda x: (x * x).exp().abs(), *xs)
    check(lambda x: (x * 2j).conj() + 1, *xs)
    check(lambda p, x: F.linear(x, p), *xs, parameters=[torch.randn(2, 3, dtype=torch.complex64)])


def test_a_complex_exponent_makes_a_complex_result() -> None:
    check(lambda x: x.tanh() ** 1j, rand(3).abs(), rand(3).abs())


def test_division_by_small_numbers_does_not_overflow() -> None:
    def small(value: float) -> Tensor:
        return torch.tensor([value])

    check(lambda x, y: x / y, (small(1e-30), small(1e-25)), (small(1e-30), small(2e-25)))


# --- matrix products ---


LINEAR: dict[str, tuple[Callable[..., Tensor], list[Sizes], list[Sizes]]] = {
    "linear": (
        lambda w, b, x: F.linear(x, w, b),
        [(4, 3), (4,)],
        [(3,), (2, 3), (5, 3), (2, 2, 3), (0, 3)],
    ),
    "linear_vector": (lambda w, x: F.linear(x, w), [(3,)], [(3,), (2, 3)]),
    "addmm": (lambda b, w, x: torch.addmm(b, x, w), [(4,), (3, 4)], [(2, 3), (5, 3), (0, 3)]),
    "addmm_scaled": (
        lambda b, w, x: torch.addmm(b, x, w, beta=2, alpha=0.5),
        [(4,), (3, 4)],
        [(2, 3), (5, 3)],
    ),
    "addmm_bias_matrix": (lambda b, w, x: torch.addmm(b, x, w), [(1, 4), (3, 4)], [(2, 3), (5, 3)]),
    "addmv": (lambda b, w, x: torch.addmv(b, w, x), [(4,), (4, 3)], [(3,), (3,)]),
    "on_the_right": (lambda w, x: x @ w, [(3, 4)], [(3,), (2, 3), (5, 3), (2, 2, 3), (2, 2, 2, 3)]),
    "on_the_left": (lambda w, x: w @ x, [(4, 3)], [(3,), (3, 1), (3, 2), (2, 3, 2), (3, 0)]),
    "transposed": (lambda w, x: x @ w.t(), [(4, 3)], [(3,), (2, 3)]),
    "sliced": (lambda w, x: x @ w[:, :2], [(3, 3)], [(3,), (2, 3)]),
    "computed": (lambda w, x: x @ (w * 2).tanh(), [(3, 3)], [(3,), (2, 3)]),
    "also_as_data": (
        lambda w, x: F.linear(x, w) + F.linear(w, x.view(-1, 3)).sum(),
        [(4, 3)],
        [(3,), (2, 3)],
    ),
    "with_itself": (lambda w, x: w @ w + x.sum(), [(3, 3)], [(3,), (2, 3)]),
    "twice": (lambda w, x: F.linear(F.linear(x, w), w) @ w, [(3, 3)], [(3,), (2, 3)]),
    "expanded": (lambda w, x: F.linear(x, w.expand(4, 3)), [(1, 3)], [(3,), (2, 3)]),
    "bmm": (lambda w, x: torch.bmm(x, w), [(2, 3, 3)], [(2, 3, 3), (2, 1, 3)]),
    "baddbmm": (lambda w, x: torch.baddbmm(x, x @ w, x), [(3, 3)], [(2, 3, 3), (2, 3, 3)]),
    "dot": (lambda w, x: torch.dot(w, x), [(3,)], [(3,), (3,)]),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_product_with_a_weight(name: str, dtype: torch.dtype) -> None:
    function, weights, inputs = LINEAR[name]
    xs = [rand(*s, dtype=dtype) for s in inputs * 2]
    check(function, *xs, parameters=[rand(*s, dtype=dtype) for s in weights])
    check(
        lambda *a: function(*a[:-1], a[-1].sin()),
        *xs,
        parameters=[rand(*s, dtype=dtype) for s in weights],
    )


def test_one_weight_is_one_product_whatever_the_number_of_rows() -> None:
    xs = [rand(n, 3) for n in (1, 4, 2, 7)]
    report = check(lambda w, b, x: F.linear(x, w, b), *xs, parameters=[rand(4, 3), rand(4)])
    assert (report.batches, rules_of(report)) == (1, {"aten::linear": "native"})


def test_different_weights_do_not_mix() -> None:
    weights = [rand(4, 3), rand(4, 3)]
    pairs = [(rand(2, 3), i % 2) for i in range(6)]
    check(lambda v, w, x, i: F.linear(x, (v, w)[i]), *pairs, parameters=weights)


@pytest.mark.parametrize("a", [(3,), (2, 3), (1, 3), (5, 2, 3)], ids=str)
@pytest.mark.parametrize("b", [(3,), (3, 4), (3, 1), (5, 3, 4)], ids=str)
def test_product_of_computed_values(a: Sizes, b: Sizes) -> None:
    check(
        lambda x, y: torch.matmul(x.tanh(), y.sin()),
        *[(rand(*a), rand(*b)) for _ in range(3)],
        (rand(*a[:-1], 2), rand(*b[:-2], 2, *b[-1:]) if len(b) > 1 else rand(2)),
    )


WRONG_RANKS = [
    (torch.mm, (3,), (3, 4)),
    (torch.mm, (2, 3), (3,)),
    (torch.mm, (2, 2, 3), (2, 3, 2)),
    (torch.bmm, (2, 3), (3, 2)),
    (torch.mv, (2, 3), (3, 2)),
    (torch.mv, (2, 3), (3, 1)),
    (torch.mv, (3,), (3,)),
    (torch.dot, (2, 3), (3, 2)),
    (torch.dot, (3,), (3, 3)),
]


@pytest.mark.parametrize(
    ("op", "a", "b"), WRONG_RANKS, ids=[f"{op.__name__}{a}{b}" for op, a, b in WRONG_RANKS]
)
def test_product_of_wrong_ranks_is_an_error(op: Any, a: Sizes, b: Sizes) -> None:
    x, y = rand(*a).requires_grad_(), rand(*b).requires_grad_()
    raises_as_eager(lambda: op(x, y))
    raises_as_eager(lambda: op(x.tanh(), y.tanh()))
    raises_as_eager(lambda: op(x.tanh(), y))
    raises_as_eager(lambda: op(x, y.tanh()))


# --- operands that all members of a batch share ---

SHARED = BINARY | {
    "atan2": torch.atan2,
    "fmin": torch.fmin,
    "logaddexp": torch.logaddexp,
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "prelu": lambda x, y: F.prelu(x, y.reshape(-1)[:1]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("operands", ["zz hh hh", "zw hw hw", "wz wh wh", "hh hh", "zh hh hw xh"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_shared_operands(name: str, shape: Sizes, operands: str) -> None:
    """h is held, so its readers have a separate level, in which all members read the same value."""
    op = SHARED[name]

    def run(enabled: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        x = torch.rand(shape, dtype=DOUBLE, requires_grad=True)
        w = torch.rand(shape, dtype=DOUBLE, requires_grad=True)
        with ab.batch(enabled=enabled):
            z = x.sin()
            h = z.tanh()
            of = {"x": x, "w": w, "z": z, "h": h}
            results = [op(of[a], of[b]) for a, b in operands.split()]
            loss = torch.stack([y.square().sum() for y in results]).sum()
        held = torch.autograd.grad(loss, [h], retain_graph=True)
        return [loss.detach(), *held, *torch.autograd.grad(loss, [x, w], allow_unused=True)]

    for ours, eager in zip(run(True), run(False), strict=True):
        assert (ours is None) == (eager is None)
        if eager is not None:
            torch.testing.assert_close(ours, eager)
