"""Gradients that are tensors of a functorch transform: vmap, jacobian, hessian, gradcheck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactly import Blocks, rand, same, weight
from torch import Tensor


def block_of(block: Blocks, w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a held value, and a value that was computed from it."""
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
    """Gradients that are tensors of vmap pass through the block as through eager's graph."""

    def program(block: Blocks) -> Any:
        w = weight(3)
        return BATCHED_GRADIENTS[how](w, *block_of(block, w))

    same(program)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian_and_hessian(strategy: str) -> None:
    """Tests torch.autograd.functional with vectorize=True."""

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
    """Tests gradcheck with batched gradients, forward-mode AD and second derivatives."""

    def program(block: Blocks) -> Any:
        w = weight(3)
        f = lambda w: block_of(block, w)  # noqa: E731
        return (
            torch.autograd.gradcheck(f, w, check_batched_grad=True, check_forward_ad=True),
            torch.autograd.gradgradcheck(f, w, check_batched_grad=True, check_fwd_over_rev=True),
        )

    same(program)
