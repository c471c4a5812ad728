"""``torch.func`` in a block and in a map: gradients are captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_gradients import DOUBLE, agree, rows, tensor
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vmap
from torch.nn import functional as F

pytestmark = pytest.mark.own_thread

W = tensor(3, 4)


def energy(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh().square().sum()


FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "of a weight": lambda x: grad(energy, argnums=1)(x, W),
    "of an input": lambda x: grad(energy)(x, W),
    "of both": lambda x: grad(energy, argnums=(0, 1))(x, W),
    "of computed values": lambda x: grad(energy)(x.exp() @ torch.eye(3, dtype=DOUBLE), W),
    "of a dict": lambda x: grad(lambda p: energy(x, p["w"]))({"w": W}),
    "with the value": lambda x: grad_and_value(energy)(x, W),
    "with more": lambda x: grad(lambda x: (energy(x, W), {"x": x * 2}), has_aux=True)(x),
    "of a gradient": lambda x: grad(lambda x: grad(energy)(x, W).square().sum())(x),
    "within a gradient": lambda x: grad(lambda w: energy(x, w - grad(energy, argnums=1)(x, w)))(W),
    "twice": lambda x: grad(lambda w: (grad(energy, argnums=1)(x, W) * w).sum())(W),
    "again": lambda x: [
        g := grad(energy, argnums=1)(x, W),
        grad(lambda w: (g * w).sum())(W),
    ],
    "of what is not used": lambda x: grad(lambda x, w: x.sum(), argnums=1)(x, W),
    "of a constant": lambda x: grad(lambda x: x.detach().sum())(x),
    "vmap of it": lambda x: vmap(grad(lambda r: (r @ W).tanh().sum()))(x),
    "of vmap": lambda x: grad(lambda x: vmap(lambda r: r @ W[:, 0])(x).tanh().sum())(x),
    "vmap": lambda x: vmap(lambda r: torch.dot(r, r))(x @ W).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_agrees(name: str) -> None:
    agree(FUNCTIONS[name], rows(), [])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_agrees_without_gradients(name: str) -> None:
    with torch.no_grad():
        agree(FUNCTIONS[name], rows(), [])


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "vmap" not in name])
def test_batched(name: str) -> None:
    with ab.batch() as scope:
        found = ab.map(FUNCTIONS[name], rows(8))
    assert len(found) == 8
    report = scope.report()
    assert len(report.flushes) == 1
    assert report.gradients >= 8 or name in ("of a constant", "of what is not used")
    assert max(s.largest for s in report.signatures) >= 8


def test_history_outside() -> None:
    """The results can be differentiated with respect to the function's closure variables."""
    w, v = W.clone().requires_grad_(), tensor(3, 4, seed=5).requires_grad_()

    def function(x: Tensor) -> list[Tensor]:
        gx, value = grad_and_value(energy)(x, w)
        gv = grad(energy, argnums=1)(gx, v)
        return [gx, value, gv]

    agree(function, rows(), [w, v])


def test_no_history_outside() -> None:
    w = W.clone().requires_grad_()
    with torch.no_grad(), ab.batch():
        found = [grad(energy)(x, w) for x in rows()]
    assert not any(g.requires_grad for g in found)


def test_no_grad_inside() -> None:
    def function(x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            with torch.no_grad():
                c = x**2
            return (x - c).sum()

        return grad(inner)(x)

    agree(function, rows(), [])


def test_functional_call() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, p, (x,)), torch.tensor([0, 2]))

    agree(lambda x: list(grad(loss)(parameters, x).values()), rows(), [], captured=1)
    trained = dict(net.named_parameters())
    agree(lambda x: functional_call(net, trained, (x,)), rows(), list(net.parameters()))


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda x: grad(lambda x: x * 2)(x), "scalar Tensor"),
        (lambda x: grad(lambda x: 2.0)(x), "return a Tensor"),
        (lambda x: grad(lambda x: x.sum(), has_aux=True)(x), "should be a tuple"),
        (lambda x: grad(lambda x, n: x.sum(), argnums=1)(x, 3), "must be Tensor"),
    ],
)
def test_errors(function: Callable[[Tensor], Any], match: str) -> None:
    for run in (lambda: function(tensor(2)), lambda: ab.map(function, [tensor(2)])):
        with pytest.raises((RuntimeError, ValueError), match=match):
            run()


def test_weights_that_are_trained_in_between() -> None:
    w = W.clone()
    for _ in range(3):
        with ab.batch():
            found = [grad(energy, argnums=1)(x, w) for x in rows()]
            with torch.no_grad():
                expected = [grad(energy, argnums=1)(x, w) for x in rows()]
        torch.testing.assert_close(torch.stack(found), torch.stack(expected))
        w -= 0.1 * sum(found)


def test_a_block_in_the_function_does_not_split_batches() -> None:
    """The end of an inner block must not drop the leaf that the instances share."""

    def batches(helper: Callable[[Tensor], Tensor]) -> int:
        def with_helper(x: Tensor, w: Tensor) -> Tensor:
            return helper(x @ w).square().sum()

        with ab.batch(adaptive=False) as scope:
            found = [grad(with_helper, argnums=1)(x, W) for x in rows(8)]
        expected = [grad(energy, argnums=1)(x, W) for x in rows(8)]
        torch.testing.assert_close(found, expected)
        return sum(row.batches for row in scope.report().signatures)

    assert batches(ab.batch()(torch.tanh)) == batches(torch.tanh)


def test_under_inference_mode() -> None:
    """In inference mode autograd records nothing, but functorch does."""
    x = torch.randn(4)
    gradient = torch.func.grad(lambda t: (t * t).sum())
    with torch.inference_mode():
        expected = gradient(x)  # zeros with PyTorch 2.11
    with ab.batch(), torch.inference_mode():
        found = gradient(x)
    torch.testing.assert_close(found, expected)
    assert found.is_inference() == expected.is_inference()
