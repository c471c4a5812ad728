"""Cells that run as one node: elementwise ops as one program (elementwise_fusion.h)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_cells import Variant, check_body, compare_with_eager, rows
from torch import Tensor
from torch.nn.functional import linear, softsign
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.needs("elementwise_fusion")

H = 5
WEIGHT = torch.linspace(-1, 1, 4 * H * H).view(4 * H, H)
ONE, THREE = WEIGHT[:H].clone(), WEIGHT[: 3 * H].clone()
GAIN, BIAS = WEIGHT[0].clone(), WEIGHT[1].clone()
LONG, COLUMN = WEIGHT[:, 3].clone(), WEIGHT[:H, 2]
GATES = [(w.clone(), b.clone()) for w, b in zip(WEIGHT.chunk(4), LONG.chunk(4), strict=True)]
LONGER = LONG[: 3 * H].clone()

HAS_VECTORS = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def lstm(x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, o, g = linear(x, WEIGHT).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def numbers(x: Tensor) -> Tensor:
    y = torch.add(x, 3, alpha=2) + (2 - x) + torch.sub(x, 1, alpha=2) - torch.rsub(x, 2, alpha=3)
    return (0.5 * y) * (y * 3 - 1) - (-y) + True


def scaled_sums(x: Tensor) -> Tensor:
    y = x.tanh()
    return torch.add(x, y, alpha=2) * torch.sub(x * 2, y * 3, alpha=0.5)


def squares_and_powers(x: Tensor) -> Tensor:
    y = x * x
    return y * y + (y * x).exp() * x.relu()


def in_place_of_in_place(x: Tensor) -> Tensor:
    i, f, o, g = linear(x, WEIGHT).chunk(4, dim=-1)
    i = i.sigmoid().tanh().exp()  # each result is saved
    f = f.tanh().sigmoid()
    return i * f + o.exp() * g.tanh().relu()


def gates_of_gates(x: Tensor) -> Tensor:
    """The sum of two products is a step of the program, and is read in parts."""
    total = linear(x, WEIGHT) + linear(x.tanh(), WEIGHT)
    i, f, o, g = total.chunk(4, dim=-1)
    return i.sigmoid() * f.tanh() + o.sigmoid() * g.tanh()


def a_part_with_another_result(x: Tensor) -> tuple[Tensor, Tensor]:
    i, f, o, g = linear(x, WEIGHT).chunk(4, dim=-1)
    c = i.sigmoid() * f.tanh()
    return o.sigmoid() * c.tanh() + g, c


def broadcast_rows(x: Tensor) -> Tensor:
    """Combines [3, H] with [1, H] or [H], whose gradients are summed over rows."""
    many = linear(x, THREE).view(3, H)
    one = linear(x, ONE).view(1, H)
    f = (many * one).sigmoid()
    return (f * many + one.view(H)).tanh() + one.exp()


def wide_rows_in_parts(x: Tensor) -> Tensor:
    many = linear(linear(x, THREE).view(3, H), WEIGHT)
    i, f, o, g = many.chunk(4, dim=-1)
    return i.sigmoid() * f.tanh() + o.exp() * g.relu()


def columns(x: Tensor) -> Tensor:
    """Broadcasting over the last dimension can't be a step of a program."""
    y = linear(x, WEIGHT).view(4, H)
    return (y * y[:, :1].tanh()).sigmoid() + y.t().contiguous().view(4, H)


def with_a_weight(x: Tensor) -> Tensor:
    y = linear(x, ONE)
    return (y * GAIN + BIAS).tanh() * y.sigmoid()


def of_one_tensor(x: Tensor) -> Tensor:
    y = linear(x, ONE)
    size = y.abs()
    scale = (size + 1).reciprocal() * (size + 2).log() + (y.square() + 0.5).sqrt()
    return torch.nn.functional.silu(y) * scale


def quotients(x: Tensor) -> Tensor:
    """Divides by another tensor, by itself and by a number, and divides a number (`reciprocal`)."""
    y = linear(x, ONE)
    z = softsign(y) / 3 + torch.div(y, 0.5) / (y.square() + 0.5)
    return (z / (z * z + 1)).tanh() / (2 / (y.exp() + 1)) + (y / y) * x


def broadcast_quotients(x: Tensor) -> Tensor:
    """Divides [3, H] by [1, H], and the reverse. The divisor's gradient may be a sum over rows."""
    many = linear(x, THREE).view(3, H).exp()
    one = linear(x, ONE).view(1, H).exp()
    return (many / one).tanh() + one / (many + 1)


def copies(x: Tensor) -> Tensor:
    y = x.clone()
    return (y + x).clone() * y.neg().clone()


def one_element(x: Tensor) -> Tensor:
    return x[:1].tanh() * x[1:2] + x[2:3].sigmoid()


def biased(x: Tensor) -> Tensor:
    i, f, o, g = linear(x, WEIGHT, LONG).chunk(4, dim=-1)
    return i.sigmoid() * f.tanh() + o.exp() * g.relu()


def biased_rows(x: Tensor) -> Tensor:
    many = linear(linear(x, THREE, LONGER).view(3, H), WEIGHT, LONG)
    i, f, o, g = many.chunk(4, dim=-1)
    return i.sigmoid() * f.tanh() + o.exp() * g.relu()


def biased_siblings(x: Tensor) -> Tensor:
    i, f, o, g = (linear(x, w, b) for w, b in GATES)
    return i.sigmoid() * f.tanh() + o.exp() * g


def bias_seen_by_others(x: Tensor) -> Tensor:
    """A program reads the product before other nodes, after other nodes, or not at all."""
    y = linear(x, ONE, BIAS)
    after = torch.cat([y.tanh(), y], -1).cumsum(-1)
    z = linear(x.tanh(), ONE, BIAS)
    before = z.cumsum(-1) * z
    return torch.cat([after, before, linear(x.sigmoid(), ONE, BIAS).cumsum(-1)])


def bias_with_gaps(x: Tensor) -> Tensor:
    return linear(x, ONE, COLUMN).tanh() * x.sigmoid()


def biased_column(x: Tensor) -> Tensor:
    return torch.addmv(BIAS, ONE, x.view(H)).tanh() * x.view(H)


FUNCTIONS = [
    biased,
    biased_rows,
    biased_siblings,
    bias_seen_by_others,
    bias_with_gaps,
    biased_column,
    numbers,
    scaled_sums,
    squares_and_powers,
    in_place_of_in_place,
    gates_of_gates,
    broadcast_rows,
    wide_rows_in_parts,
    columns,
    with_a_weight,
    of_one_tensor,
    quotients,
    broadcast_quotients,
    copies,
    one_element,
]


@pytest.mark.parametrize("members", [1, 2, 7])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function: Callable[[Tensor], Tensor], members: int) -> None:
    check_body(function, [(x,) for x in rows(members, H)])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types(dtype: torch.dtype) -> None:
    def f(x: Tensor) -> Tensor:
        i, f, o, g = x.chunk(4)
        return i.sigmoid() * f.tanh() + o.relu() * g.exp() - (1 - i)

    check_body(f, [(x.to(dtype),) for x in rows(5, 16)])


def test_blocks() -> None:
    """Tests more members than a block has, and rows that are not a multiple of a vector."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        i, f, o, g = (x * 0.2 + y * 0.1).chunk(4, dim=-1)
        return i.sigmoid() * f.tanh() + o.relu() * g.exp()

    check_body(f, list(zip(rows(150, 1, 4 * 67), rows(150, 1, 4 * 67), strict=True)))


def test_several_threads() -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        check_body(lambda x: x.tanh() * x.sigmoid() + x, [(x,) for x in rows(40, 4001)])
    finally:
        torch.set_num_threads(threads)


def test_weights_with_gradients() -> None:
    weight = torch.linspace(-1, 1, H)

    def program(variant: Variant) -> Any:
        gain = weight.clone().requires_grad_()

        def f(x: Tensor) -> Tensor:
            y = linear(x, ONE).tanh()
            return (y * gain + gain).sigmoid() * y

        called = variant.cell(f)
        with variant.block():
            loss = torch.stack([called(x * 1).sum() for x in rows(6, H)]).sum()
        loss.backward()
        return loss, gain.grad

    compare_with_eager(program)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("reached", [None, 1], ids=str)
def test_biases_with_gradients(separate: bool, reached: int | None) -> None:
    """Tests biases that a program adds. A bias gets no gradient if its result is unused."""

    def program(variant: Variant) -> Any:
        weight, bias = WEIGHT.clone().requires_grad_(), LONG.clone().requires_grad_()
        parts = [t.detach().clone().requires_grad_() for t in (*weight.chunk(4), *bias.chunk(4))]

        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            if separate:
                i, f, o, g = (linear(x, w, b) for w, b in zip(parts[:4], parts[4:], strict=True))
            else:
                i, f, o, g = linear(x, weight, bias).chunk(4, dim=-1)
            return i.sigmoid() * f.tanh(), o.exp() * g.relu() + o

        called = variant.cell(f)
        with variant.block():
            results = [called(x * 1) for x in rows(6, H)]
            taken = [r if reached is None else r[reached : reached + 1] for r in results]
            loss = torch.stack([sum(t.sum() for t in r) for r in taken]).sum()
            del results, taken
        loss.backward()
        return loss, [t.grad for t in (weight, bias, *parts)]

    compare_with_eager(program)


def test_a_product_with_a_bias_is_a_result_too() -> None:
    def program(variant: Variant) -> Any:
        called = variant.cell(lambda x: (y := linear(x, ONE, BIAS), y.tanh() * x))
        leaves = [x.requires_grad_() for x in rows(6, H)]
        with variant.block():
            pairs = [called(x * 1) for x in leaves]
            loss = torch.stack([(y.exp() * z).sum() for y, z in pairs]).sum()
            del pairs
        loss.backward()
        return loss, [x.grad for x in leaves]

    compare_with_eager(program)


@pytest.mark.skipif(not HAS_VECTORS, reason="a CPU with AVX2 or AVX-512")
def test_the_program_adds_the_bias() -> None:
    cell = ab.cell(biased)
    with profile(activities=[ProfilerActivity.CPU]) as profiled, ab.batch():
        found = [cell(x) for x in rows(6, H)]
    names = {e.name for e in profiled.events()}
    assert "aten::mm" in names, names
    assert "aten::addmm" not in names, names
    torch.testing.assert_close(found, [biased(x) for x in rows(6, H)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_is_exact_to_two_units_in_the_last_place(dtype: torch.dtype) -> None:
    sizes = torch.logspace(-40, 2, 40001, base=10, dtype=torch.float64)
    x = torch.cat([sizes, -sizes, torch.linspace(-10, 10, 40002, dtype=torch.float64)]).to(dtype)
    cell = ab.cell(lambda x: (x * 1).tanh() * 1)
    with ab.batch():
        found = [cell(x), cell(x.flip(0))][0]
    exact = x.double().tanh()
    unit = (
        torch.nextafter(exact.to(dtype).abs(), torch.tensor(2, dtype=dtype)) - exact.to(dtype).abs()
    )
    assert ((found.double() - exact).abs() <= 2 * unit.double()).all()


def test_not_a_number_and_infinity() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e30, 100.0])

    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 1
        return y.relu(), y.tanh() * 2, y.sigmoid() + 0, -(y * 0), y.exp() - 1

    def program(variant: Variant) -> Any:
        leaves = [odd.clone().requires_grad_(), odd.flip(0).requires_grad_()]
        called = variant.cell(f)
        with variant.block():
            results = [called(x) for x in leaves]
        found = [t for result in results for t in result]
        torch.autograd.backward(found, [torch.ones_like(t) for t in found])
        signs = [t.nan_to_num(7).signbit() for t in found]
        return [t.nan_to_num(7, 8, 9) for t in found], signs, [x.grad for x in leaves]

    with_cells, eager = Variant(True), Variant(False)
    torch.testing.assert_close(program(with_cells), program(eager), equal_nan=True)


@pytest.mark.parametrize("taken", ["first", "second", "mixed", "both"])
def test_results_that_gradients_reach(taken: str) -> None:
    """Only one result of some members is used. These members are differentiated separately."""

    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(9, H)]
        called = variant.cell(a_part_with_another_result)
        with variant.block():
            losses = []
            for k, x in enumerate(leaves):
                first, second = called(x * 1)
                use = {"first": 0, "second": 1, "mixed": k % 2, "both": 2}[taken]
                losses.append((first.sum(), second.sum(), (first * second).sum())[use])
                del first, second
            loss = torch.stack(losses).sum()
            del losses
        loss.backward()
        return loss, [x.grad for x in leaves]

    compare_with_eager(program)


def test_some_inputs_need_gradients() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x.tanh() * y + y.sigmoid() * x

    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_(k % 3 != 1) for k, x in enumerate(rows(9, H))]
        called = variant.cell(f)
        with variant.block():
            loss = torch.stack([called(x, x.detach() + 1).sum() for x in leaves]).sum()
        loss.backward()
        return loss, [x.grad for x in leaves]

    compare_with_eager(program)


def test_without_gradients() -> None:
    def program(variant: Variant) -> Any:
        called = variant.cell(in_place_of_in_place)
        with torch.no_grad(), variant.block():
            return [called(x) for x in rows(6, H)]

    compare_with_eager(program)


def test_second_derivatives() -> None:
    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(4, H)]
        called = variant.cell(gates_of_gates)
        with variant.block():
            loss = torch.stack([called(x * 1).sum() for x in leaves]).sum()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in gradients), leaves)

    compare_with_eager(program)


@pytest.mark.parametrize("picked", [(0, 1, 2), (1, 3, 5), (4,), ()], ids=str)
def test_members_of_which_other_results_are_reached(picked: tuple[int, ...]) -> None:
    """Members with the same reached results are processed together, in any order of members."""

    def program(variant: Variant) -> list[Tensor]:
        cell = variant.cell(lstm)
        xs = [x.requires_grad_() for x in rows(6, H)]
        with variant.block():
            pairs = [cell(x * 1, x * 2) for x in xs]
            total = sum((h.sum() for h, _ in pairs), torch.zeros(()))
            total = total + sum((pairs[k][1].square().sum() for k in picked), torch.zeros(()))
            del pairs
        total.backward()
        return [total.detach(), *(x.grad for x in xs)]  # type: ignore[list-item]

    compare_with_eager(program)


def test_a_number_is_rounded_before_it_is_scaled() -> None:
    """1e39 is infinite in float32, and 0 times infinity is NaN."""
    cell = ab.cell(lambda x: torch.add(x, 1e39, alpha=0).tanh() + torch.add(x, 3e38, alpha=2))
    xs = rows(4, H)
    with ab.batch():
        results = [cell(x * 1) for x in xs]
    for result, x in zip(results, xs, strict=True):
        eager = torch.add(x, 1e39, alpha=0).tanh() + torch.add(x, 3e38, alpha=2)
        torch.testing.assert_close(result, eager, equal_nan=True)


@pytest.mark.skipif(not HAS_VECTORS, reason="a CPU with AVX2 or AVX-512")
def test_ops_of_one_tensor_are_one_program() -> None:
    cell = ab.cell(of_one_tensor)
    with profile(activities=[ProfilerActivity.CPU]) as profiled, ab.batch():
        results = [cell(x) for x in rows(6, H)]
    assert len(results) == 6
    (name,) = [e.name for e in profiled.events() if "torch_autobatch::elementwise" in e.name]
    for op in ("abs", "reciprocal", "log", "square", "sqrt", "silu"):
        assert f"aten::{op}" in name, name


@pytest.mark.skipif(not HAS_VECTORS, reason="a CPU with AVX2 or AVX-512")
def test_softsign_is_one_program() -> None:
    cell = ab.cell(lambda x: softsign(x * 2) / 3)
    leaves = [x.requires_grad_() for x in rows(6, H)]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with ab.batch():
            loss = torch.stack([cell(x).sum() for x in leaves]).sum()
        loss.backward()
    programs = [e.name for e in profiled.events() if "torch_autobatch::elementwise" in e.name]
    forward, backward = programs
    for op in ("mul.Tensor", "abs", "add.Tensor", "div.Tensor"):
        assert f"aten::{op}" in forward, programs
        assert f"aten::{op}" in backward, programs
    assert forward.count("aten::div.Tensor") == 2, programs


@pytest.mark.skipif(not HAS_VECTORS, reason="a CPU with AVX2 or AVX-512")
def test_gates_are_one_program() -> None:
    cell = ab.cell(lstm)
    states = [x.requires_grad_() for x in rows(6, H)]
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        with ab.batch():
            pairs = [cell(x, x * 2) for x in states]
            loss = torch.stack([(h + c).sum() for h, c in pairs]).sum()
            del pairs  # a held state with consumers would be a separate op
        loss.backward()
    programs = [e.name for e in profiled.events() if "torch_autobatch::elementwise" in e.name]
    ops = ["sigmoid"] * 2 + ["tanh", "sigmoid", "mul.Tensor", "mul.Tensor", "add.Tensor", "tanh"]
    forward, backward = programs
    for op in ops:
        assert f"aten::{op}" in forward, programs
        assert f"aten::{op}" in backward, programs
    assert forward.endswith(" x 6"), programs
    assert backward.endswith(" x 6, backward"), programs
