"""Cells that run as one node: identities and values of tensors, in cases found by fuzzing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_cells import Variant, check_body, compare_with_eager, rows
from torch import Tensor, nn

# ---------------------------------------------------------------- results


def test_one_tensor_at_two_places_of_the_result() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2).tanh()
        return y, y.contiguous(), y[0], x

    check_body(f, [(x,) for x in rows(5, 3)])
    called = ab.cell(f)
    with ab.batch():
        results = [called(x) for x in [x.requires_grad_() for x in rows(3, 3)]]
    assert all(r[0] is r[1] and r[0].data_ptr() == r[2].data_ptr() for r in results)


@pytest.mark.parametrize("like", [True, False])
def test_each_call_makes_tensors_of_its_own(like: bool) -> None:
    @ab.cell
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.full_like(x, 3.0) if like else torch.zeros(2) + 3

    with ab.batch():
        results = [f(x.requires_grad_() * 1) for x in rows(4, 2)]
    results[1][1].mul_(2)
    for k, (_, made) in enumerate(results):
        torch.testing.assert_close(made, torch.full((2,), 6.0 if k == 1 else 3.0))


def test_a_leaf_that_is_made_in_the_block() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        new = torch.ones(3, requires_grad=True)
        return (x * new).tanh() * 2, new

    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(3, 3)]
        called = variant.cell(f)
        with variant.block():
            results = [called(x * 1) for x in leaves]
        torch.stack([r for r, _ in results]).sum().backward()
        return results, [new.grad for _, new in results], [x.grad for x in leaves]

    compare_with_eager(program, bodies=False)


# ---------------------------------------------------------------- accesses that are not ops


def test_the_data_of_an_argument() -> None:
    """`.data` makes another tensor object over the same memory, without an op."""

    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(4, 3)]
        called = variant.cell(lambda x: (x * x.data).tanh() * 2)
        with variant.block():
            results = [called(x) for x in leaves]
        torch.stack(results).sum().backward()
        return results, [x.grad for x in leaves]

    compare_with_eager(program, bodies=False)


def test_a_leaf_whose_values_are_listed() -> None:
    def program(variant: Variant) -> Any:
        leaf = torch.ones(2, requires_grad=True)
        inputs = [torch.full((2,), float(k), requires_grad=True) for k in range(3)]
        called = variant.cell(lambda x: leaf * x.tolist()[0])
        with variant.block():
            results = [called(x) for x in inputs]
        torch.testing.assert_close([r.detach() for r in results], [x.detach() for x in inputs])
        torch.stack(results).sum().backward()
        return leaf.grad, [x.grad for x in inputs]

    compare_with_eager(program, bodies=False)


# ---------------------------------------------------------------- changes between calls


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("change", ["requires_grad", "dtype", "shape"])
def test_a_tensor_from_outside_that_looks_different_by_now(change: str, computed: bool) -> None:
    """Ops on this tensor alone run eagerly, and therefore the cell runs op by op."""

    def program(variant: Variant) -> Any:
        scale = torch.full((3,), 2.0)
        leaves = [x.requires_grad_() for x in rows(4, 3)]
        called = variant.cell(lambda x: x.double() + ((scale * 2).sin() if computed else scale))
        results = []
        with variant.block():
            for k, x in enumerate(leaves):
                if k == 2 and change == "requires_grad":
                    scale.requires_grad_()
                elif k == 2:
                    scale.data = torch.ones(3).double() if change == "dtype" else torch.ones(1)
                results.append(called(x * 1))
        torch.stack(results).sum().backward()
        assert (scale.grad is not None) == (change == "requires_grad")
        return results, [x.grad for x in leaves], scale.grad

    compare_with_eager(program, bodies=not computed)


def test_a_hook_of_a_module_that_was_used_without() -> None:
    def program(variant: Variant) -> Any:
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        called = variant.cell(layer)
        results = []
        with variant.block():
            for k, x in enumerate(rows(4, 3)):
                if k == 2:
                    layer[0].register_forward_hook(lambda module, args, out: out * 2)
                results.append(called(x))
        torch.stack(results).sum().backward()
        return results, [p.grad for p in layer.parameters()]

    compare_with_eager(program)


def test_a_viewed_parameter_that_is_given_other_data() -> None:
    def program(variant: Variant) -> Any:
        weight = nn.Parameter(torch.arange(9.0).sin().view(3, 3))
        called = variant.cell(lambda x: (x @ weight.t()).tanh() * 2)
        results = []
        with variant.block():
            for k, x in enumerate(rows(4, 2, 3)):
                if k == 2:
                    weight.data = weight.data * 3
                results.append(called(x))
        torch.stack(results).sum().backward()
        return results, weight.grad

    compare_with_eager(program)


# ---------------------------------------------------------------- backward


def test_a_second_backward_through_what_keeps_nothing() -> None:
    def program(variant: Variant) -> Any:
        leaves = [x.requires_grad_() for x in rows(3, 3)]
        called = variant.cell(lambda x: (x + x.detach(), (x - 1).sum()))
        with variant.block():
            results = [called(x + 1) for x in leaves]
        for _ in range(2):
            torch.stack([r.sum() for pair in results for r in pair]).sum().backward()
        results[0][1].backward()
        return [x.grad for x in leaves]

    compare_with_eager(program)


def test_held_views_of_one_memory_have_gradients_of_their_own() -> None:
    def program(variant: Variant) -> Any:
        leaf = torch.arange(12.0).sin().view(3, 4).requires_grad_()
        called = variant.cell(lambda x, y: (x @ y + (x * y).sum()).tanh() * y)
        with variant.block():
            whole = leaf * 1
            views = [whole[1] for _ in range(4)]
            results = [called(x * 2, y) for x, y in zip(rows(4, 4), views, strict=True)]
        grads = torch.autograd.grad(torch.stack(results).sum(), [*views[1:], leaf])
        return results, list(grads)

    compare_with_eager(program)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[:2], lambda w: w.chunk(2)[1]])
def test_views_of_weights_that_are_arguments(
    view: Callable[[Tensor], Tensor], recorded: bool
) -> None:
    def program(variant: Variant) -> Any:
        weights = [w.requires_grad_(recorded) for w in rows(3, 4, 4)]
        called = variant.cell(lambda x, w: F.linear(x, view(w)).tanh() * 2)
        found = []
        for _ in range(2):  # in the second block all calls are cached
            leaves = [x.requires_grad_() for x in rows(6, 2, 4)]
            with variant.block():
                results = [called(x * 1, weights[k % 3]) for k, x in enumerate(leaves)]
            torch.stack(results).square().sum().backward()
            found.append([*(r.detach() for r in results), *(t.grad for t in leaves + weights)])
            for w in weights:
                w.grad = None
        return found

    compare_with_eager(program, bodies=recorded)


def test_results_that_need_a_shape_alone_are_read_at_once() -> None:
    """A cell's node without operands is not a factory, so it can't be created alone."""

    @ab.cell
    def states(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(x.shape[0], 2), torch.ones(x.shape[0], 2)

    with ab.batch():
        h, c = states(torch.ones(2, 3))
        c.requires_grad_()
        out = (c * 2 + h).sum()
    torch.autograd.backward(out)
    assert c.is_leaf
    assert torch.equal(h, torch.zeros(2, 2))
    assert c.grad is not None
    assert torch.equal(c.grad, torch.full((2, 2), 2.0))
