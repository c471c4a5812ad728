"""``torch.autograd.grad`` in a block through tensors whose parts were written to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_autobatch as ab
from helpers_gradients import DOUBLE, agree, rows, tensor
from torch import Tensor
from torch.autograd import grad

pytestmark = pytest.mark.own_thread

Fill = Callable[[Tensor, Tensor], Tensor]


def filled_rows(x: Tensor, w: Tensor) -> Tensor:
    chart = torch.zeros(3, 4, dtype=DOUBLE)
    for i in range(3):
        chart[i] = (x[0, i] * w).tanh()
    return chart


def from_what_it_held(x: Tensor, w: Tensor) -> Tensor:
    chart = torch.full((4,), -1.0, dtype=DOUBLE)
    for i in range(3):
        chart[:] = torch.stack([chart, x[0, i] * w], -1).logsumexp(-1)
    return chart


def triangle(x: Tensor, w: Tensor) -> Tensor:
    chart = torch.zeros(4, 4, dtype=DOUBLE)
    chart.diagonal().copy_(x.sum() * w)
    for width in (1, 2):
        for i in range(4 - width):
            chart[i, i + width] = (
                chart[i, i : i + width].sigmoid().sum() + chart[i + width, i + width]
            )
    return chart


def columns(x: Tensor, w: Tensor) -> Tensor:
    chart = torch.zeros(4, 3, dtype=DOUBLE).t()
    for i in range(3):
        chart[i, :] = (x[1, i] * w).sin()
    return chart


def parts_of_a_result(x: Tensor, w: Tensor) -> Tensor:
    """The elements around the written places have their own gradient."""
    h = (x[:, :1] * w).sin()
    h[0, 1:3] = w[:2] * x[1, 1]
    h[1, ::2] *= w[2]
    return h


def the_same_place_again(x: Tensor, w: Tensor) -> Tensor:
    h = (x[:, :1] * w).sin()
    h[0] = w * 2
    h[0] = h[0] * 3
    h[:, 1] = w[:2].exp()
    return h


def other_type(x: Tensor, w: Tensor) -> Tensor:
    h = torch.zeros(2, 4)
    h[1] = x[0, 0] * w
    return h.double()


FILLS: list[Fill] = [
    filled_rows,
    from_what_it_held,
    triangle,
    columns,
    parts_of_a_result,
    the_same_place_again,
    other_type,
]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("fill", FILLS)
def test_no_flush(fill: Fill, create_graph: bool) -> None:
    w = tensor(4).requires_grad_()

    def instance(x: Tensor) -> list[Tensor]:
        filled = fill(x, w)
        (g,) = grad(filled.square().sum(), w, create_graph=create_graph, retain_graph=True)
        return [filled, g * w.detach()]

    agree(instance, rows(), [w], captured=1)


@pytest.mark.parametrize("fill", FILLS)
def test_twice(fill: Fill) -> None:
    w = tensor(4).requires_grad_()

    def instance(x: Tensor) -> Tensor:
        (g,) = grad(fill(x, w).square().sum(), w, create_graph=True)
        (h,) = grad(g.square().sum(), w, create_graph=True)
        return g * h

    # If a write changes a part of a result that needs gradients, autograd runs the second call.
    agree(instance, rows(), [w], captured=None if fill in (triangle, parts_of_a_result) else 2)


@pytest.mark.parametrize("fill", FILLS)
def test_gradients_of_pieces(fill: Fill) -> None:
    """Each instance has an input on the path that no write has changed."""
    w = tensor(4).requires_grad_()

    def instance(x: Tensor) -> list[Tensor]:
        own = w * x[0, 0]
        out = fill(x, own).cos().sum()
        return [out, *grad(out, [own, w], create_graph=True)]

    agree(instance, rows(), [w], captured=1)


def test_a_gradient_that_is_not_finite() -> None:
    """Overwritten values have a zero gradient, for any gradient of their place."""
    w = torch.zeros(4, dtype=DOUBLE, requires_grad=True)

    def instance(x: Tensor) -> Tensor:
        h = x[:, :1] * (w + 1)
        h[0] = w
        return grad(h.sqrt().sum(), w)[0]

    agree(instance, [x.abs() for x in rows()], [], captured=1)


def test_memory_that_overlaps_is_left_to_autograd() -> None:
    w = tensor(4).requires_grad_()

    def instance(x: Tensor) -> Tensor:
        h = (x[0, 0] * w).as_strided((2, 3), (1, 1)) * 1
        h[0] = w[:3] * x[0, 1]
        return grad(h.square().sum(), w)[0]

    agree(instance, rows(), [])


def test_a_leaf_asked_for_before_it_requires_grad() -> None:
    w = tensor(4).requires_grad_()
    with ab.batch() as scope:
        pending = [x.sum() * w.detach() * 1 for x in rows()]
        hidden = [(x.sum() * w).detach() for x in rows()]
        assert all(h.is_leaf and not h.requires_grad for h in pending + hidden)
        assert not any(((x.sum() * w).is_leaf) for x in rows())
        leaves = [h.requires_grad_() for h in hidden]
        assert all(h.is_leaf for h in leaves)
        (g,) = grad(leaves[0].square().sum(), leaves[0])
    torch.testing.assert_close(g, 2 * leaves[0].detach())
    assert len(scope.report().flushes) >= 1
