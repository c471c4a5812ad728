"""requires_grad_() makes pending tensors leaves, in loops of gradient steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

SIZES = (2, 1, 3, 2)


def network(activation: type[nn.Module] = nn.SiLU) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), activation(), nn.Linear(8, 1)).double()


def examples() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(n, 3).double() for n in SIZES]


Program = Callable[[nn.Module, Tensor], Tensor]


def langevin(energy: nn.Module, x: Tensor) -> Tensor:
    z = x.clone().requires_grad_()
    for _ in range(3):
        (g,) = torch.autograd.grad(energy(z).sum(), z)
        z = (z - 0.1 * g).detach().requires_grad_()
    return (energy(x) - energy(z.detach())).sum()


def attack(model: nn.Module, x: Tensor) -> Tensor:
    delta = torch.zeros_like(x, requires_grad=True)
    for _ in range(3):
        (g,) = torch.autograd.grad(model(x + delta).sum(), delta)
        delta = (delta + 0.1 * g.sign()).clamp(-0.15, 0.15).detach().requires_grad_()
    return model(x + delta.detach()).sum()


def through_the_last_step(model: nn.Module, x: Tensor) -> Tensor:
    """The loss depends on the leaf, which no one holds after the block."""
    z = (x * model[0].bias[:3]).detach().requires_grad_()
    return (model(z) * z.mean()).sum()


def of_a_view(model: nn.Module, x: Tensor) -> Tensor:
    z = (x * model[0].bias[:3]).detach().requires_grad_()
    (g,) = torch.autograd.grad(model(z.t().t())[:1].sum(), z)
    return model(g).sum()


def second_order(model: nn.Module, x: Tensor) -> Tensor:
    z = (x * model[0].bias[:3]).detach().requires_grad_()
    (g,) = torch.autograd.grad(model(z).sum(), z, create_graph=True)
    return g.square().sum()


PROGRAMS: list[Program] = [langevin, attack, through_the_last_step, of_a_view, second_order]


def run(program: Program, model: nn.Module, how: str) -> tuple[list[Tensor], int]:
    """Returns losses and gradients, and the number of flushes."""
    model.zero_grad()
    with ab.batch(enabled=how != "eager", adaptive=False) as scope:
        loop = ab.map if how == "map" else lambda f, xs: [f(x) for x in xs]
        losses = loop(lambda x: program(model, x), examples())
        loss = torch.stack(losses).sum()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients], sum(f.count for f in scope.report().flushes)


@pytest.mark.parametrize("how", ["block", "map"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_eagers_with_one_flush(program: Program, how: str) -> None:
    model = network()
    expected, _ = run(program, model, "eager")
    found, flushes = run(program, model, how)
    torch.testing.assert_close(found, expected)
    assert flushes == 1


def test_a_leaf_that_is_held_gets_its_gradient() -> None:
    model = network()

    def program() -> list[Tensor]:
        leaves, losses = [], []
        for x in examples():
            z = (x * model[0].bias[:3]).detach().requires_grad_()
            losses.append(model(z).square().sum() + (z * z).sum())
            leaves.append(z)
        return [torch.stack(losses).sum(), *leaves]

    found: list[list[Tensor | None]] = []
    for enabled in (True, False):
        model.zero_grad()
        with ab.batch(enabled=enabled, adaptive=False) as scope:
            loss, *leaves = program()
            assert all(z.requires_grad for z in leaves)
        assert not enabled or len(scope.report().flushes) == 1
        loss.backward()
        assert all(z.is_leaf and z.grad_fn is None for z in leaves)
        found.append(
            [loss.detach(), *(z.grad for z in leaves), *(p.grad for p in model.parameters())]
        )
        loss = program()[0]  # a second graph adds to fresh leaves
        del loss
    torch.testing.assert_close(found[0], found[1])


def test_gradients_with_respect_to_a_held_leaf_after_the_block() -> None:
    model = network()

    def program() -> tuple[Tensor, Tensor]:
        z = (examples()[0] * model[0].bias[:3]).detach().requires_grad_()
        return z, model(z).square().sum()

    with ab.batch(adaptive=False):
        z, loss = program()
    found = torch.autograd.grad(loss, [z, *model.parameters()], create_graph=True)
    z, loss = program()
    expected = torch.autograd.grad(loss, [z, *model.parameters()], create_graph=True)
    torch.testing.assert_close(found, expected)


def hook_before(z: Tensor, seen: list[Tensor]) -> None:
    z.register_hook(lambda g: seen.append(g.clone()))


def hook_after_accumulation(z: Tensor, seen: list[Tensor]) -> None:
    z.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))  # type: ignore[union-attr]


@pytest.mark.parametrize("register", [hook_before, hook_after_accumulation])
@pytest.mark.parametrize("used", [False, True])
def test_a_hook_of_a_leaf_is_called_after_its_death(
    register: Callable[[Tensor, list[Tensor]], None], used: bool
) -> None:
    model, seen = network(), []

    def program() -> Tensor:
        z = (examples()[0] * model[0].bias[:3]).detach().requires_grad_()
        if not used:
            register(z, seen)
        loss = model(z).sum()
        if used:
            register(z, seen)
        return loss

    with ab.batch(adaptive=False):
        loss = program()
    loss.backward()
    program().backward()
    torch.testing.assert_close(seen[0], seen[1])


def test_the_version_of_a_leaf() -> None:
    model = network()

    def program() -> int:
        h = examples()[0] * model[0].bias[:3]
        h.mul_(2)
        float(h.sum().detach())
        z = h.detach().requires_grad_()
        model(z)
        return z._version

    with ab.batch(adaptive=False):
        found = program()
    assert found == program()


def written(z: Tensor, _: Tensor) -> None:
    with torch.no_grad():
        z.add_(1)


def written_through_a_view(z: Tensor, _: Tensor) -> None:
    with torch.no_grad():
        z[0] = 2


def base_written(_: Tensor, base: Tensor) -> None:
    base.add_(1)


def stopped(z: Tensor, _: Tensor) -> None:
    z.requires_grad_(False)


@pytest.mark.parametrize("change", [written, written_through_a_view, base_written, stopped])
@pytest.mark.parametrize("used", [False, True])
def test_a_leaf_that_changes_later(change: Callable[[Tensor, Tensor], None], used: bool) -> None:
    model = network()

    def program() -> list[Tensor]:
        base = examples()[0] * model[0].bias[:3]
        z = base.detach().requires_grad_()
        before = F.relu(z).sum() if used else z.detach().sum()
        change(z, base)
        after = (z * 3).sum() + base.sum()
        return [before, after, z]

    results = []
    for enabled in (True, False):
        model.zero_grad()
        with ab.batch(enabled=enabled, adaptive=False):
            before, after, z = program()
        (after * 2).backward()
        results.append(
            [before.detach(), after.detach(), z.detach(), z.grad, model[0].bias.grad, z.is_leaf]
        )
    for mine, eagers in zip(*results, strict=True):
        if isinstance(mine, Tensor):
            torch.testing.assert_close(mine, eagers)
        else:
            assert mine == eagers


@pytest.mark.parametrize("name", ["SiLU", "Mish", "GELU", "Softplus", "Tanh", "ELU"])
def test_gradients_of_activations_are_captured(name: str) -> None:
    model = network(getattr(nn, name))
    expected, _ = run(langevin, model, "eager")
    found, flushes = run(langevin, model, "block")
    torch.testing.assert_close(found, expected)
    assert flushes == 1
