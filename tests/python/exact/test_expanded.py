"""Gradients of held values whose memory overlaps (expanded tensors)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exactly import Blocks, same, weight
from torch import Tensor

EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x.sum(),
    "by elements": lambda x: (x * torch.arange(12.0).double().view(4, 3)).sum(),
    "by a product": lambda x: (x @ torch.ones(3, 2).double()).sum(),
    "by a function": lambda x: x.cumsum(0).sum(),
    "twice": lambda x: (x * x).sum() + x.cos().mean(),
    "through a view": lambda x: (x[1:] * 2).sum(),
    "through the same view again": lambda x: (x.broadcast_to(4, 3) * x.view(4, 3)).sum(),
    "transposed": lambda x: (x.t() * torch.arange(12.0).double().view(3, 4)).sum(),
    "through several views": lambda x: (x.t()[1:].unsqueeze(0)[0, :, 2] * 3).sum() + x[0, 1],
    "through pieces": lambda x: sum((i * p).sum() for i, p in enumerate(x.split([1, 3]))),
    "as a diagonal": lambda x: x.diagonal().exp().sum(),
    "through a row that is expanded": lambda x: (x[2].expand(5, 3) ** 2).sum(),
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
    """Each element has a separate gradient, through any view."""

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
    """Tests `backward(inputs=[x])`, hooks and `retain_grad` of a result of `broadcast_to`."""

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
    """Two held views of the same elements are one operand in forward, but not in backward."""

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
    """Ops captured before and after the read give each element its own gradient."""

    def program(block: Blocks) -> Any:
        w = weight(3)
        with block():
            x = BASES[base](w)
            before = EXPANDED[use](x)
            other = x.cos()
            READ_FIRST[read](x, other)
            after = EXPANDED[use](x) + other.sum()
        grads = torch.autograd.grad(before + after, [x, w])
        return [g.contiguous() for g in grads], before, after, w

    same(program)
