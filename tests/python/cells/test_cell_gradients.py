"""Cells that run as one node: gradients of values that several ops read, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_cells import Variant, check_body, compare_with_eager, rows
from torch import Tensor, nn

H = 3
WEIGHT = torch.linspace(-1, 1, 4 * H * H).view(4 * H, H)


def gates(x: Tensor) -> tuple[Tensor, ...]:
    return torch.nn.functional.linear(x, WEIGHT).chunk(4, dim=-1)


def all_parts(x: Tensor) -> Tensor:
    i, f, o, g = gates(x)
    return i.sigmoid() * g.tanh() + f.exp() * o.relu()


def a_part_that_nothing_reads(x: Tensor) -> Tensor:
    i, _, o, g = gates(x)
    return i.sigmoid() * g.tanh() + o


def a_part_twice(x: Tensor) -> Tensor:
    i, f, o, g = gates(x)
    return i.sigmoid() * g.tanh() + f * f + o.tanh() * o.sigmoid()


def a_part_that_is_also_read_in_pieces(x: Tensor) -> Tensor:
    i, f, o, g = gates(x)
    return (i * f + o * g)[..., :2] * i[..., 1:].tanh()


def parts_and_the_whole(x: Tensor) -> Tensor:
    whole = torch.nn.functional.linear(x, WEIGHT)
    i, f, o, g = whole.chunk(4, dim=-1)
    return (i.tanh() * f + o.sigmoid() * g).sum() + whole.tanh().sum()


def rows_of_a_matrix(x: Tensor) -> Tensor:
    first, second = (x.view(H, 1) * x).unbind(0)[:2]
    return first.tanh() * second.sigmoid()


def broadcast_parts(x: Tensor) -> Tensor:
    i, f, o, g = gates(x)
    return (i.view(H, 1) * f.sigmoid()).sum(0) * o.tanh() + g


def a_sum_with_itself(x: Tensor) -> Tensor:
    y = x.tanh()
    return (y + y).sigmoid() + (y + 1)


def sums_of_sums(x: Tensor) -> Tensor:
    i, f, o, g = gates(x)
    return (i.tanh() + f.tanh()) + ((o - g.tanh()) + x)


FUNCTIONS = [
    all_parts,
    a_part_that_nothing_reads,
    a_part_twice,
    a_part_that_is_also_read_in_pieces,
    parts_and_the_whole,
    rows_of_a_matrix,
    broadcast_parts,
    a_sum_with_itself,
    sums_of_sums,
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradients_of_parts(function: Callable[[Tensor], Tensor]) -> None:
    check_body(function, [(x,) for x in rows(6, H)])


def test_parts_that_only_some_results_need() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        i, j, o, g = gates(x)
        total = i.sigmoid() + j
        return total * g.tanh(), total, o.tanh() * j

    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(8, H)]
        called = variant.cell(f)
        with variant.block():
            results = [called(x * 1) for x in leaves]
            loss = torch.stack([result[k % 3].sum() for k, result in enumerate(results)]).sum()
            loss = loss + results[0][1].sum()
            del results  # a held result with consumers would be a separate op
        loss.backward()
        return loss, [x.grad for x in leaves]

    compare_with_eager(program)


def test_a_sums_gradient_that_goes_to_several_inputs() -> None:
    def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x + y) + (z + x.tanh())

    calls = list(zip(rows(5, H), rows(5, H), rows(5, H), strict=True))
    check_body(f, calls)


def test_backward_again() -> None:
    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(5, H)]
        called = variant.cell(sums_of_sums)
        with variant.block():
            loss = torch.stack([called(x * 1).sum() for x in leaves]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [x.grad for x in leaves]

    compare_with_eager(program)


@pytest.mark.parametrize("use", [(0,), (1,), (0, 1)])
def test_second_derivatives_of_results_that_depend_on_different_inputs(
    use: tuple[int, ...],
) -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x * w).tanh(), (x * 3).tanh()

    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(4, H)]
        weight = torch.ones(H).requires_grad_()
        called = variant.cell(f)
        with variant.block():
            results = [called(x, weight) for x in leaves]
        loss = torch.stack([result[k].sum() for result in results for k in use]).sum()
        inputs = [weight, *leaves] if 0 in use else leaves
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        torch.stack([g.square().sum() for g in first]).sum().backward()
        return list(first), weight.grad, [x.grad for x in leaves]

    compare_with_eager(program)


def test_states_that_come_back_with_a_graph() -> None:
    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return (a - b).tanh(), -a

    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(3, H)]
        called = variant.cell(f)
        held = []
        with variant.block():
            for x in leaves:
                a, b = x * 1, x * 2
                for _ in range(3):
                    a, b = called(a, b)
                    held.append((a, b))
        loss = torch.stack([(a * b).sum() for a, b in held]).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        torch.stack([g.square().sum() for g in first]).sum().backward()
        return list(first), [x.grad for x in leaves]

    compare_with_eager(program)


@pytest.mark.parametrize("doubled", [True, False])
def test_hooks_of_a_part_that_is_a_result_and_read(doubled: bool) -> None:
    """The call is not one node, because the part's gradient must pass through the user's view."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        a, b, *_ = gates(x)
        return a, a * b

    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(4, H)]
        called = variant.cell(f)
        with variant.block():
            results = [called(x * 1) for x in leaves]
        for a, _ in results:
            a.register_hook(lambda g: g * 2) if doubled else a.retain_grad()
        torch.stack([(a + ab).sum() for a, ab in results]).sum().backward()
        return [x.grad for x in leaves], [None if doubled else a.grad for a, _ in results]

    compare_with_eager(program, bodies=False)


def test_results_have_autograd_nodes_of_their_own() -> None:
    """The nodes are like those of the ops that made the results, for any earlier cells."""

    def program(variant: Variant) -> list[Any]:
        partly = variant.cell(lambda x: (x.tanh(), x.detach().exp(), x.detach().neg()))
        cell = variant.cell(lambda x: (x.tanh(), x.exp(), x.neg()))
        xs = [x.requires_grad_() for x in rows(3, H)]
        seen: list[tuple[int, Tensor]] = []
        with variant.block():
            before = [partly(x * 2) for x in xs]
        with variant.block():
            results = [cell(x * 2) for x in xs]
        for first, second, third in results:
            assert len({first.grad_fn, second.grad_fn, third.grad_fn}) == 3
            second.grad_fn.register_prehook(lambda grads: seen.append((len(grads), grads[0])))
        loss = sum((a * 3 + b + c * 2).sum() for a, b, c in results)
        (loss + sum(a.sum() for a, _, _ in before)).backward()
        return [[n for n, _ in seen], sum(g for _, g in seen), [x.grad for x in xs]]

    compare_with_eager(program)


@pytest.mark.parametrize("kind", ["before", "after", "alone"])
@pytest.mark.parametrize("of_both", [False, True])
def test_gradient_of_a_held_state_of_an_lstm_cell(kind: str, of_both: bool) -> None:
    """h' is computed from c', so the gradient of h' always goes to c'."""
    lstm = nn.LSTMCell(4, 4)

    def function(x: Tensor) -> tuple[Tensor, ...]:
        h, c = lstm(x.tanh() if kind == "before" else x, (x, x))
        return (h, c, h.tanh()) if kind == "after" else (h, c)

    cell = ab.cell(function)

    def gradients(enabled: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        leaves = [torch.randn(1, 4, requires_grad=True) for _ in range(3)]
        with ab.batch(enabled=enabled):
            results = [cell(x) for x in leaves]
        total = torch.stack([r[-1].sum() + r[0].sum() for r in results]).sum()
        if of_both:
            total = total + torch.stack([r[1].sum() for r in results]).sum()
        wanted = [r[1] for r in results] + leaves + list(lstm.parameters())
        return list(torch.autograd.grad(total, wanted, allow_unused=True))

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert (found is None) == (expected is None)
        if found is not None:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["computed from the other", "lstm", "independent"])
def test_gradient_with_respect_to_another_result_of_the_cell_in_the_block(kind: str) -> None:
    lstm = nn.LSTMCell(4, 4, dtype=torch.double)

    def from_the_other(x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.tanh(x)
        return torch.sin(first * 2), first

    functions = {
        "computed from the other": from_the_other,
        "lstm": lambda x: lstm(x),
        "independent": lambda x: (torch.sin(x), torch.tanh(x)),
    }

    def gradients(enabled: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        cell = ab.cell(functions[kind])
        xs = [torch.randn(2, 4, dtype=torch.double, requires_grad=True) for _ in range(3)]
        with ab.batch(enabled=enabled, adaptive=False):
            found = []
            for result, other in map(cell, xs):
                wanted = [other, (other * 1)]
                found += torch.autograd.grad(
                    result.square().sum(), wanted, allow_unused=True, retain_graph=True
                )
                found += torch.autograd.grad((result * other).sum(), other, retain_graph=True)
        return found

    torch.testing.assert_close(gradients(True), gradients(False))


def test_a_held_result_after_a_read_of_part_of_the_block() -> None:
    """The read needs one result of each first cell. Waiting nodes read the other result."""

    def program(variant: Variant) -> list[Any]:
        first = variant.cell(lambda x: (x.tanh(), x.exp()))
        second = variant.cell(lambda x: (lambda h: (h, h.tanh()))(x.sigmoid()))
        xs = [x.requires_grad_() for x in rows(6, 2, H)]
        with variant.block():
            before = [first(x * 2) for x in xs[:3]]
            waiting = [a * 3 for a, _ in before]
            read = torch.stack([b[0].cos() for _, b in before]).detach().numpy()
            del before
            held = [second(x * 2) for x in xs[3:]]
        total = torch.stack([y.sum() for _, y in held]).sum()
        through = torch.autograd.grad(total, [h for h, _ in held])
        return [waiting, torch.from_numpy(read), held, list(through)]

    compare_with_eager(program)
