"""Hooks of pending tensors cause no flush, and autograd calls the hooks as in eager."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_rules import DOUBLE, assert_same, assert_same_outcome, gradient_or_error, rand
from torch import Tensor, nn

Program = Callable[[Tensor, list[Any]], Tensor]


def reversal(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.tanh()
    y.register_hook(lambda g: -0.5 * g)
    return y * h


def observer(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.tanh()
    y.register_hook(lambda g: seen.append(tuple(g.shape)))
    return y * 2


def several(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.tanh()
    y.register_hook(lambda g: g * 2)
    removed = y.register_hook(lambda g: g * 100)
    y.register_hook(lambda g: g + 1)
    removed.remove()
    return y + y.sin()


def of_several_readers(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.tanh()
    y.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return y * 3 + y.exp() + y[:1]


def after_a_reader(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.tanh()
    z = y * 3
    y.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return y * z


def of_a_view(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.tanh()
    y[:1].register_hook(lambda g: g * 2)
    v = y[:1]
    v.register_hook(lambda g: g * 3)
    return y * v


def reading(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.tanh()
    y.register_hook(lambda g: g * 2 if g.sum() > 0 else g * 3)
    return y * h


def chain(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.tanh()
    y.register_hook(lambda g: g * 2)
    z = y.sin()
    z.register_hook(lambda g: g * y.detach())
    return z * h


def retained(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.tanh()
    y.retain_grad()
    y.register_hook(lambda g: (seen.append(y.grad is None), g * 2)[1])
    return y * h


def removed(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.tanh()
    y.register_hook(lambda g: g * 100).remove()
    return y * h


def of_several_results(h: Tensor, seen: list[Any]) -> Tensor:
    a, b = h.split(2, dim=1)
    b.register_hook(lambda g: g * 2)
    return a.sin() * b


def of_a_detached_leaf(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.detach().requires_grad_()
    y.register_hook(lambda g: seen.append(tuple(g.shape)))
    return h * y


def written_before(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.sin()
    y.mul_(2)
    y.register_hook(lambda g: g * 2)
    return y * h


def written_later(h: Tensor, seen: list[Any]) -> Tensor:
    y = h.sin()
    y.register_hook(lambda g: seen.append(tuple(g.shape)))
    y[:1].mul_(2)
    return y * h


FLUSHES = (of_a_view, of_several_results, of_a_detached_leaf, written_before, written_later)
PROGRAMS: list[Program] = [
    reversal,
    observer,
    several,
    of_several_readers,
    after_a_reader,
    of_a_view,
    reading,
    chain,
    retained,
    removed,
    of_several_results,
    of_a_detached_leaf,
    written_before,
    written_later,
]


def run(program: Program, enabled: bool) -> Any:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, dtype=DOUBLE)
    xs = [rand(n, 4).requires_grad_() for n in (3, 1, 4, 3)]
    seen: list[Any] = []
    with ab.batch(enabled=enabled) as scope:
        results = [program(layer(x), seen) for x in xs]
        losses = [r.square().sum() for r in results]
    leaves = [*xs, *layer.parameters()]
    grads = torch.autograd.grad(sum(losses), leaves)
    values = [*results, *grads]
    return values, sorted(seen), scope.report()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_hook_is_called(program: Program) -> None:
    values, seen, report = run(program, True)
    expected, saw, _ = run(program, False)
    for k, (value, other) in enumerate(zip(values, expected, strict=True)):
        assert_same(f"tensor {k}", value, other)
    assert seen == saw
    if program not in FLUSHES:
        assert len(report.flushes) == 1, str(report)


@pytest.mark.parametrize("retain", [False, True])
def test_the_tensor_is_held(retain: bool) -> None:
    """Then autograd itself calls the hook, and the gradient of the tensor is the hook's result."""

    def outcome(enabled: bool) -> list[Any]:
        torch.manual_seed(0)
        x, seen, held = rand(3).requires_grad_(), [], []
        with ab.batch(enabled=enabled):
            losses = []
            for k in (1, 2):
                h = x * k
                h.register_hook(lambda g: (seen.append(1), g * 3)[1])
                held.append(h)
                losses.append(h.sin().sum())
        held[0].register_hook(lambda g: g + 1)
        if retain:
            held[1].retain_grad()
        grads = torch.autograd.grad(sum(losses), [held[0], x], retain_graph=True)
        sum(losses).backward()
        return [len(seen), *grads, x.grad, held[1].grad if retain else None]

    for value, other in zip(outcome(True), outcome(False), strict=True):
        if isinstance(other, Tensor):
            assert_same("gradient", value, other)
        else:
            assert value == other


def test_gradients_inside_an_instance() -> None:
    """Tests hooks on captured gradients, which optimizers of meta-learning use."""

    def function(x: Tensor) -> Tensor:
        w = x.detach().sin().requires_grad_() if not x.requires_grad else x * 1
        loss = (w * x).square().sum()
        (g,) = torch.autograd.grad(loss, w, create_graph=True)
        g.register_hook(lambda h: h * 2)
        return (g * w).sum()

    def outcome(mapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        p = rand(3).requires_grad_()
        xs = [rand(3) for _ in range(3)]
        run_one: Callable[[Tensor], Tensor] = lambda x: function(x * p)  # noqa: E731
        results = ab.map(run_one, xs) if mapped else [run_one(x) for x in xs]
        return [*results, *torch.autograd.grad(sum(results), p)]

    for value, other in zip(outcome(True), outcome(False), strict=True):
        assert_same("value", value, other)


def test_through_the_hook_inside_an_instance() -> None:
    def function(x: Tensor, p: Tensor) -> Tensor:
        h = x * p
        h.register_hook(lambda g: g * 2)
        (g,) = torch.autograd.grad(h.sin().sum(), p, create_graph=True)
        return g.square().sum()

    def outcome(mapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        p = rand(3).requires_grad_()
        xs = [rand(3) for _ in range(3)]
        run_one: Callable[[Tensor], Tensor] = lambda x: function(x, p)  # noqa: E731
        results = ab.map(run_one, xs) if mapped else [run_one(x) for x in xs]
        return [*results, *torch.autograd.grad(sum(results), p)]

    for value, other in zip(outcome(True), outcome(False), strict=True):
        assert_same("value", value, other)


@pytest.mark.parametrize(
    "hook", [lambda g: 3.0, lambda g: g.sum(), lambda g: g.float(), lambda g: 1 / 0]
)
def test_what_a_hook_may_not_return(hook: Any) -> None:
    def outcome(enabled: bool) -> Any:
        x = torch.ones(3, dtype=DOUBLE, requires_grad=True)
        with ab.batch(enabled=enabled):
            losses = []
            for k in (1, 2):
                h = x * k
                h.register_hook(hook)
                losses.append(h.sin().sum())
            del h
        return gradient_or_error(sum(losses), x)

    assert_same_outcome(outcome)


@pytest.mark.parametrize("fails", [False, True])
def test_a_hook_does_not_keep_its_tensor(fails: bool) -> None:
    """The tensor is freed when the block has ended, also if the tensor was never computed."""
    w = rand(3).requires_grad_()
    with contextlib.suppress(ValueError), ab.batch(adaptive=False):
        h = w * 2
        h.register_hook(lambda g: g * 2)
        h.retain_grad()
        tensor = weakref.ref(h)
        loss = h.sum()
        del h
        assert tensor() is not None
        if fails:
            raise ValueError
    if not fails:
        loss.backward()
        torch.testing.assert_close(w.grad, torch.full_like(w, 4))
    gc.collect()
    assert tensor() is None
