"""W @ cat([A, B]) runs without the cat, with eager's values, gradients and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import assert_same, check, rand
from torch import Tensor

pytestmark = pytest.mark.needs("fuse_cat_matmul")

FLOAT = torch.float32
N = 24  # columns
Instance = tuple[Tensor, ...]
HAS_KERNEL = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


@pytest.fixture(params=[1, 2], ids=["one_thread", "two_threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def weight(rows: int = 16, columns: int = 32, dtype: torch.dtype = FLOAT) -> Tensor:
    return rand(rows, columns, dtype=dtype) / columns


def instances(count: int = 9, *rows: int, dtype: torch.dtype = FLOAT) -> list[Instance]:
    return [tuple(rand(n, N, dtype=dtype) for n in rows or (16, 16)) for _ in range(count)]


def product(w: Tensor, *pieces: Tensor) -> Tensor:
    return w @ torch.cat([piece.tanh() for piece in pieces])


def cats(report: ab.Report) -> int:
    return sum(s.batches for s in report.signatures if s.op == "aten::cat")


def check_without_cat(function: Callable[..., Any], *given: Any, parameters: Any) -> None:
    report = check(function, *given, parameters=parameters)
    assert cats(report) == (0 if HAS_KERNEL else 1), report


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("rows", [(16, 16), (8, 8, 8, 8), (32,), (40, 40)], ids=str)
def test_values_and_gradients(rows: Sequence[int]) -> None:
    parameters = [weight(16, sum(rows))]
    check_without_cat(product, *instances(70, *rows), parameters=parameters)
    check_without_cat(product, *instances(1, *rows), parameters=parameters)
    check_without_cat(
        lambda w, *x: torch.mm(w, torch.cat([y.tanh() for y in x], -2)),
        *instances(3, *rows),
        parameters=parameters,
    )


@pytest.mark.usefixtures("threads")
def test_the_products_of_one_instance_stay_on_one_thread() -> None:
    """The products of an instance add to one output, so threads must not divide them."""
    check_without_cat(product, *instances(151, 16, 16, 16), parameters=[weight(16, 48)])


NOT_JOINED: dict[str, tuple[Callable[..., Any], Sequence[int]]] = {
    "different_lengths": (product, (5, 27)),
    "few_rows": (product, (4,) * 8),
    "side_by_side": (lambda w, a, b: w @ torch.cat([a.tanh(), b.tanh()], 1), (32, 32)),
    "outside": (lambda w, a, b: w @ torch.cat([a, b.tanh()]), (16, 16)),
    "turned": (
        lambda w, a, b: w @ torch.cat([a.tanh(), b[:, :16].t().tanh().t()[:, :1].expand(16, N)]),
        (16, 16),
    ),
    "used_twice": (lambda w, a, b: [w @ (c := torch.cat([a.tanh(), b.tanh()])), c.sin()], (16, 16)),
    "seen_in_part": (
        lambda w, a, b: [w @ (c := torch.cat([a.tanh(), b.tanh()])), c[3:7] * 2],
        (16, 16),
    ),
    "read_through_a_view": (lambda w, a, b: w @ torch.cat([b.tanh(), a.tanh(), b])[8:40], (16, 16)),
    "twice_in_products": (
        lambda w, a, b: [w @ (c := torch.cat([a.tanh(), b.tanh()])), w @ c],
        (16, 16),
    ),
    "not_trained": (
        lambda w, a, b: w.detach() @ torch.cat([a.tanh(), b.tanh()]),
        (16, 16),
    ),
    "computed_weight": (lambda w, a, b: w.tanh() @ torch.cat([a.tanh(), b.tanh()]), (16, 16)),
}


@pytest.mark.parametrize("name", NOT_JOINED)
def test_where_the_cat_stays(name: str) -> None:
    function, rows = NOT_JOINED[name]
    report = check(function, *instances(5, *rows), parameters=[weight()])
    assert cats(report) == 1, report


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_types_keep_the_cat(dtype: torch.dtype) -> None:
    report = check(product, *instances(5, dtype=dtype), parameters=[weight(dtype=dtype)])
    assert cats(report) == 1, report


def test_a_cat_that_is_held_stays() -> None:
    w = weight().requires_grad_()
    xs = [rand(16, N, dtype=FLOAT).requires_grad_() for _ in range(4)]

    def run(enabled: bool) -> list[Tensor]:
        with ab.batch(enabled=enabled):
            held = [torch.cat([x.tanh(), x.sin()]) for x in xs]
            results = [w @ h for h in held]
        total = sum((r.sum() for r in results), torch.zeros(()))
        return [*results, *held, *torch.autograd.grad(total, [w, *xs, *held])]

    for value, expected in zip(run(True), run(False), strict=True):
        assert_same("value or gradient", value, expected)


def test_pieces_that_are_read_again() -> None:
    """Pieces occur twice in a cat, in several cats, in other ops, and as parts of one value."""

    def function(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        a, b = a.tanh(), b.tanh()
        wide = torch.cat([a, b]).sin()
        return [
            w @ torch.cat([a, a]),
            w @ torch.cat([b, a]),
            (w @ torch.cat([a * b, b])) @ b.t(),
            w @ torch.cat([wide[:16], wide[16:]]),
            w @ torch.cat([wide[8:24], wide[16:]]),
        ]

    check(function, *instances(6), parameters=[weight()])


@pytest.mark.parametrize("read", [(0,), (1,), (0, 1), (0, 1, 2)], ids=str)
def test_pieces_that_were_computed_before(read: tuple[int, ...]) -> None:
    """For some instances, an earlier flush has computed the first piece, the second, or all."""
    w = weight(columns=48).requires_grad_()
    xs = [rand(16, N, dtype=FLOAT).requires_grad_() for _ in range(6)]

    def run(enabled: bool) -> list[Tensor]:
        with ab.batch(enabled=enabled) as scope:
            pieces = [[x.tanh(), x.sin(), x.cos()] for x in xs]
            for of_one in pieces[::2]:
                for i in read:
                    float(of_one[i].detach().sum())
            results = [(w @ torch.cat(of_one)).sigmoid() for of_one in pieces]
        if enabled and HAS_KERNEL:
            assert cats(scope.report()) == 0
        total = sum((r.sum() for r in results), torch.zeros(()))
        return [*results, *torch.autograd.grad(total, [w, *xs])]

    for value, expected in zip(run(True), run(False), strict=True):
        assert_same("value or gradient", value, expected)


def test_two_weights_and_a_part_of_one() -> None:
    def function(w: Tensor, v: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        a, b = a.tanh(), b.tanh()
        return [
            w @ torch.cat([a, b]),
            v @ torch.cat([a, b]),
            (w if a.requires_grad else v)[:, 8:24] @ torch.cat([a[:8], b[8:]]),
        ]

    check(function, *instances(5), parameters=[weight(), weight()])


def tree(w: Tensor, leaves: Sequence[Tensor], read: int = 2) -> list[Tensor]:
    """Computes the matrices of MV-RNN: phrases from words."""
    states = [leaf.tanh() for leaf in leaves]
    while len(states) > read - 1:
        states = [*states[2:], (w @ torch.cat(states[:2])).tanh()]
    return states


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"policy": "depth"}], ids=str)
def test_trees(options: dict[str, Any]) -> None:
    w = weight(16, 32).requires_grad_()
    forest = [[rand(16, N, dtype=FLOAT).requires_grad_() for _ in range(n)] for n in (2, 5, 9, 3)]
    wanted = [w, *(leaf for leaves in forest for leaf in leaves)]

    def run(enabled: bool) -> list[Tensor]:
        with ab.batch(enabled=enabled, **options):
            roots = [tree(w, leaves)[0] for leaves in forest]
        total = torch.stack([root.square().sum() for root in roots]).sum()
        return [*roots, *torch.autograd.grad(total, wanted)]

    for value, expected in zip(run(True), run(False), strict=True):
        assert_same("value or gradient", value, expected)


def test_only_what_is_reached_is_differentiated() -> None:
    """An instance that is not finite adds nothing to the gradients of the others."""
    w = weight().requires_grad_()
    xs = [rand(16, N, dtype=FLOAT).requires_grad_() for _ in range(6)]
    with torch.no_grad():
        xs[2][3, 4] = float("nan")
    with ab.batch():
        results = [w @ torch.cat([x * 2, x.sin()]) for x in xs]
    torch.stack([r.sum() for i, r in enumerate(results) if i not in (2, 4)]).sum().backward()
    grads = [w.grad, *(x.grad for x in xs)]
    w.grad = None
    for x in xs:
        x.grad = None
    sum(
        ((w @ torch.cat([x * 2, x.sin()])).sum() for i, x in enumerate(xs) if i not in (2, 4)),
        torch.zeros(()),
    ).backward()
    for grad, expected in zip(grads, [w.grad, *(x.grad for x in xs)], strict=True):
        assert_same("gradient", grad, expected)
    assert xs[2].grad is None
    assert xs[4].grad is None


@pytest.mark.parametrize("wanted", ["weight", "one_piece"])
def test_gradients_of_some_operands(wanted: str) -> None:
    w, a, b = weight().requires_grad_(), *(rand(16, N, dtype=FLOAT) for _ in range(2))
    leaf = w if wanted == "weight" else b.requires_grad_()

    def run(enabled: bool) -> tuple[Tensor, ...]:
        with ab.batch(enabled=enabled):
            results = [w @ torch.cat([a * i, b.sin()]) for i in range(4)]
        return torch.autograd.grad(torch.stack(results).square().sum(), [leaf])

    assert_same("gradient", run(True)[0], run(False)[0])


def test_double_backward() -> None:
    w = weight().requires_grad_()
    xs = [rand(16, N, dtype=FLOAT).requires_grad_() for _ in range(4)]

    def run(enabled: bool) -> tuple[Tensor, ...]:
        with ab.batch(enabled=enabled):
            losses = [product(w, x, x.sin()).square().sum() for x in xs]
        first = torch.autograd.grad(torch.stack(losses).sum(), [w, *xs], create_graph=True)
        penalty = torch.stack([g.square().sum() for g in first]).sum()
        return (*first, *torch.autograd.grad(penalty, [w, *xs]))

    for grad, expected in zip(run(True), run(False), strict=True):
        assert_same("gradient", grad, expected)


@pytest.mark.parametrize("write", ["none", "held_piece", "weight"])
def test_held_pieces_and_writes_before_backward(write: str) -> None:
    """A gradient passes through a held piece. Eager copies the piece and saves the weight."""
    w = weight().requires_grad_()
    xs = [rand(16, N, dtype=FLOAT).requires_grad_() for _ in range(4)]

    def run(enabled: bool) -> list[Tensor]:
        seen: list[Tensor] = []
        with ab.batch(enabled=enabled):
            held = [x + 1 for x in xs]
            results = [w @ torch.cat([h, x.tanh()]) for h, x in zip(held, xs, strict=True)]
        for h in held:
            h.register_hook(seen.append)
        loss = torch.stack(results).square().sum()
        with torch.no_grad():
            for target in {"none": [], "held_piece": held, "weight": [w]}[write]:
                target.mul_(1.5)
        grads = torch.autograd.grad(loss, [w, *xs, *held])
        return [*results, *grads, *seen]

    if write == "weight":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(False)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(True)
        return
    expected = run(False)
    for value, other in zip(run(True), expected, strict=True):
        assert_same("value or gradient", value, other)


def test_a_second_backward_is_an_error() -> None:
    w, x = weight().requires_grad_(), rand(16, N, dtype=FLOAT).requires_grad_()
    with ab.batch():
        losses = [product(w, x, x).sum() for _ in range(3)]
    torch.stack(losses).sum().backward(retain_graph=True)
    losses[0].backward()
    with pytest.raises(RuntimeError, match="a second time"):
        losses[0].backward()


def test_in_a_cell() -> None:
    cell = ab.cell(lambda w, a, b: w @ torch.cat([a, b.tanh()]))

    def function(w: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        h = cell(w, a.tanh(), b)
        return [cell(w, h, b), cell(w, h, h)]

    check(function, *instances(5), parameters=[weight()])


def test_what_waits_may_read_the_cat_later() -> None:
    """A read of the product leaves the other nodes pending."""
    w = weight().requires_grad_()
    xs = [rand(16, N, dtype=FLOAT) for _ in range(4)]

    def run(enabled: bool) -> list[Tensor]:
        out = []
        with ab.batch(enabled=enabled):
            for x in xs:
                joined = torch.cat([x.tanh(), x.sin()])
                first, later = w @ joined, joined * 3
                del joined
                if first.detach().sum() > 1e9:  # a read
                    later = later + 1
                out += [first, later, w @ torch.cat([first, x.tanh()])]
        return [*out, *torch.autograd.grad(torch.cat(out).square().sum(), [w])]

    for value, expected in zip(run(True), run(False), strict=True):
        assert_same("value or gradient", value, expected)


def test_the_library_is_turned_off_before_backward() -> None:
    w = weight().requires_grad_()
    xs = [rand(16, N, dtype=FLOAT) for _ in range(4)]
    with ab.batch():
        results = [product(w, x, x.sin()) for x in xs]
    with torch.backends.mkldnn.flags(enabled=False):
        (grad,) = torch.autograd.grad(torch.stack(results).square().sum(), [w])
    loss = torch.stack([product(w, x, x.sin()) for x in xs]).square().sum()
    assert_same("gradient", grad, torch.autograd.grad(loss, [w])[0])


@pytest.mark.skipif("ATEN_CPU_CAPABILITY" in os.environ, reason="it is such a run")
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_on_other_cpus(capability: str) -> None:
    if capability == "avx2" and not HAS_KERNEL:
        pytest.skip("this CPU has no AVX2")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"


def test_a_product_whose_flush_failed_is_met_again() -> None:
    """The first piece is a cat. The product was fused before, so its operands are the pieces."""
    w, table = weight(), rand(4, 16, dtype=FLOAT).requires_grad_()
    upper, lower = (rand(8, 16, dtype=FLOAT) for _ in range(2))
    with ab.batch():
        inner = torch.cat([(upper * w[0, 0]).tanh(), (lower * w[0, 0]).tanh()])
        bad = F.embedding(torch.tensor([7] * 16), table)
        y = w @ torch.cat([inner, bad])
        with pytest.raises(IndexError, match="index out of range"):
            y.sum().item()
        good = w @ torch.cat([inner, inner * 2])
    expected = torch.cat([(upper * w[0, 0]).tanh(), (lower * w[0, 0]).tanh()])
    torch.testing.assert_close(good, w @ torch.cat([expected, expected * 2]))
    with pytest.raises(RuntimeError):
        y.sum()
