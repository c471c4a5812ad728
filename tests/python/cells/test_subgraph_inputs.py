"""Cells that run as one node: inputs, ops in the cell, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_cells import Variant, check_body, compare_with_eager, rows
from torch import Tensor, nn

# ---------------------------------------------------------------- inputs


def test_views_of_inputs_and_results() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = (x.view(2, 3) * 2).tanh() + x.view(2, 3)[1]
        return z[0], x[:2], z.t()

    check_body(f, [(x,) for x in rows(5, 6)])


def test_a_result_in_column_order_runs_op_by_op() -> None:
    check_body(lambda x: (x.view(2, 3).t() * 2).tanh() + 1, [(x,) for x in rows(5, 6)], body=False)


@pytest.mark.parametrize(
    ("function", "bodies"),
    [
        (lambda x: (x * 2).tanh(), True),
        (lambda x: (x.t() * 2).tanh(), False),
        (lambda x: (x[:, 0] * 2).tanh(), False),
        (lambda x: (x[0] * 2).tanh(), False),
    ],
)
def test_an_input_that_is_a_column(function: Callable[[Tensor], Tensor], bodies: bool) -> None:
    """The column slice has gaps between rows, so its views can't be made from a copy."""

    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(4, 3, 8)]
        called = variant.cell(function)
        with variant.block():
            wide = [(x * 1).sin() for x in leaves]
            results = [called(x[:, 2:5]) for x in wide]
        torch.stack([r.square().sum() for r in results]).sum().backward()
        return results, [x.grad for x in leaves]

    compare_with_eager(program, bodies=bodies)


def test_the_same_tensor_for_all_and_twice() -> None:
    shared = torch.randn(3)

    def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x * y + z).tanh() * shared

    check_body(f, [(x, x, shared) for x in rows(5, 3)])


def test_a_shared_pending_tensor() -> None:
    def program(variant: Variant) -> Any:
        leaf = torch.ones(3, requires_grad=True)
        leaves = [x.requires_grad_() for x in rows(4, 3)]
        called = variant.cell(lambda x, y: (x * y).tanh() * 2)
        with variant.block():
            shared = (leaf * 1).sin()
            results = [called(x * 1, shared) for x in leaves]
        torch.stack(results).square().sum().backward()
        return results, leaf.grad, [x.grad for x in leaves]

    compare_with_eager(program)


def test_operands_that_each_instance_has_of_its_own() -> None:
    """In a subgraph, a value has one number for all members, but separate memory."""

    def f(matrix: Tensor, vector: Tensor, row: Tensor, one: Tensor) -> Tensor:
        scaled = torch.where(matrix > one, matrix * row, one) + torch.lerp(matrix, row, 0.3)
        return scaled @ vector + torch.mv(matrix, vector * 2) + vector @ matrix.t() * one

    sizes = ((2, 3), (3,), (1, 3), (1,))
    inputs = list(zip(*(rows(5 + k, *s)[:5] for k, s in enumerate(sizes)), strict=True))
    check_body(f, inputs)
    check_body(f, [(matrix, *inputs[0][1:]) for matrix, *_ in inputs])


def test_a_transposed_weight_and_a_part_of_one() -> None:
    weight = nn.Parameter(torch.randn(3, 3))

    def program(variant: Variant) -> Any:
        weight.grad = None
        called = variant.cell(lambda x: F.linear(x @ weight, weight[:2]).tanh())
        with variant.block():
            results = [called(x * 1) for x in rows(5, 1, 3)]
        torch.stack(results).square().sum().backward()
        assert weight.grad is not None
        return results, weight.grad

    compare_with_eager(program)


def test_products_of_inputs_that_wait_for_no_cell_come_first() -> None:
    """This happens from the second block on, when it is known which inputs are states."""
    torch.manual_seed(0)
    of_x, of_h = nn.Linear(3, 4), nn.Linear(4, 4)

    def step(x: Tensor, h: Tensor) -> Tensor:
        y = x.view(1, 3)
        return (of_x(y.tanh()) + of_h(h) + y.sum()).tanh()

    def program(variant: Variant) -> Any:
        called, found = variant.cell(step), []
        for _ in range(2):
            of_x.zero_grad(), of_h.zero_grad()
            leaves = [x.requires_grad_() for x in rows(12, 3)]
            with variant.block():
                states = []
                for k in range(4):
                    h = torch.full((1, 4), 0.1 * k)
                    for x in leaves[: 3 * k + 1]:
                        h = called(x * 1, h)
                    states.append(h.sum())
                    del h
            torch.stack(states).sum().backward()
            parameters = [*of_x.parameters(), *of_h.parameters()]
            found.append([torch.stack(states), *(t.grad for t in [*parameters, *leaves])])
        if variant.enabled:
            of_inputs = [
                [row.batches for row in scope.report().signatures if row.note == "2 ops as one"]
                for scope in variant.scopes
            ]
            assert of_inputs == [[], [1]]
        return found

    compare_with_eager(program)


# ---------------------------------------------------------------- ops in the cell


@pytest.mark.parametrize("viewed", [False, True])
def test_results_from_what_comes_before_the_body(viewed: bool) -> None:
    """The subgraph reads these results only in products, or not at all."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(3)]
    xs = [[torch.randn(1, 4) for _ in range(n)] for n in (2, 3, 1)]

    def program(variant: Variant) -> list[Tensor]:
        embed, in_, back = layers

        @variant.cell
        def step(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            e = embed(x).tanh()
            return (in_(e) + back(h)).tanh(), e.view(4) if viewed else e

        found = []
        for _ in range(3):  # later blocks know which values have other uses
            losses = []
            with variant.block():
                for words in xs:
                    h = torch.zeros(1, 4)
                    for x in words:
                        h, e = step(x, h)
                    losses.append(h.square().sum() + e.square().sum())
            weights = [w for layer in layers for w in layer.parameters()]
            found += [*losses, *torch.autograd.grad(losses, weights)]
        return found

    compare_with_eager(program)


def test_an_op_with_and_without_hidden_results() -> None:
    """For one of two uses, the rule has more results than the op in eager mode."""
    torch.manual_seed(0)
    d = 6
    gru, table = nn.GRUCell(d, d), nn.Embedding(7, d)
    linear, out = nn.Linear(d, d), nn.Linear(d, d)

    def program(variant: Variant) -> list[Tensor]:
        @variant.cell
        def f(x: Tensor, h: Tensor, s: Tensor) -> Tensor:
            return (linear(s) + out(gru(x, h))).tanh() * s.sigmoid()

        found = []
        for _ in range(3):
            with variant.block():
                a, b, s = torch.ones(2, d), torch.ones(2, d), torch.zeros(2, d)
                s = f(a, b, f(a, b, s))
                s = f(a, table(torch.tensor([3])).expand(2, d), s)
            found += [s, *torch.autograd.grad(s.square().sum(), list(gru.parameters()))]
        return found

    compare_with_eager(program)


def test_detached_within() -> None:
    check_body(lambda x: ((x * 2).detach() * x).tanh(), [(x,) for x in rows(5, 3)])


def test_without_gradients_within() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x * 2).exp()
        return (x * scale).tanh()

    check_body(f, [(x,) for x in rows(5, 3)], body=False)


def test_losses_within() -> None:
    weight = torch.randn(5, 3)

    def f(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target) + F.mse_loss(x, x.tanh())

    check_body(f, [(x, torch.tensor([k % 5])) for k, x in enumerate(rows(6, 1, 3))])


def test_stacks_and_sums_within() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        both = torch.stack([x, y.tanh(), x * y])
        return both.sum(0) + both.max(0).values * both.softmax(0).mean()

    check_body(f, [(x, y) for x, y in zip(rows(5, 3), rows(6, 3), strict=False)])


def test_a_layer_within() -> None:
    layer = nn.LSTM(3, 4)

    def f(x: Tensor) -> Tensor:
        out, (h, c) = layer(x.tanh())
        return out.sum(0) + h[0] * c[0]

    check_body(f, [(x,) for x in rows(4, 5, 3)], body=False)  # the function might be random


def test_instances_of_many_lengths_run_op_by_op() -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 2).tanh().sum(0)

    f = ab.cell(f)
    inputs = [(torch.randn(k % 4 + 1, 3),) for k in range(12)]
    check_body(f, inputs)  # the first block has no cached calls
    check_body(f, inputs, body=False)


def test_random_ops_are_drawn_for_each_instance() -> None:
    @ab.cell
    def f(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.5) * 2

    leaves = [torch.ones(64, requires_grad=True) for _ in range(4)]
    with ab.batch():
        results = [f(x * 1) for x in leaves]
    values = {tuple(r.tolist()) for r in results}
    assert len(values) == 4
    assert set(torch.stack(results).unique().tolist()) == {0.0, 8.0}
    torch.stack(results).sum().backward()
    for x, result in zip(leaves, results, strict=True):  # the result is linear in x, and x is 1
        torch.testing.assert_close(x.grad, result.detach())


# ---------------------------------------------------------------- errors


def test_an_error_within_is_the_members_own() -> None:
    table = nn.Embedding(4, 3)

    @ab.cell
    def f(index: Tensor) -> Tensor:
        return table(index).tanh() * 2

    with pytest.raises(IndexError, match="out of range"):  # noqa: SIM117
        with ab.batch():
            results = [f(torch.tensor([k])) for k in (0, 1, 9, 2)]
    for k, result in ((0, results[0]), (1, results[1]), (2, results[3])):
        torch.testing.assert_close(result, table.weight[k : k + 1].tanh() * 2)
    with pytest.raises(RuntimeError, match=r"never computed: index out of range .*autobatch::cell"):
        results[2].sum()
