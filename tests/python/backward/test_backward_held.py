"""Backward through a block, compared with eager: held values and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_backward import (
    DOUBLE,
    Block,
    Chain,
    backward_each,
    backward_sum,
    grads_of,
    losses_in,
    rand,
    same,
)
from torch import Tensor, nn

# --- held values ---


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_result_that_another_is_computed_from_under_autocast(
    hooked: bool, create_graph: bool
) -> None:
    """Tests h' and c' of LSTMCell under autocast, where the native rule is not used."""

    def run(enabled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        cell = nn.LSTMCell(4, 3, dtype=torch.float32)
        inputs = [torch.randn(2, 4, dtype=torch.float32, requires_grad=True) for _ in range(4)]
        states = []
        with ab.batch(enabled=enabled), torch.autocast("cpu", dtype=torch.bfloat16):
            for x in inputs:
                h, c = cell(x, (torch.full((2, 3), 0.1), torch.full((2, 3), 0.2)))
                if hooked:
                    c.register_hook(lambda g: g * 2)
                states.append((h, c))
        total = torch.stack([h.float().sum() for h, _ in states]).sum()
        wanted = [*(c for _, c in states), *inputs, cell.bias_hh]
        grads = torch.autograd.grad(total, wanted, create_graph=create_graph)
        # Some ops run in bfloat16, so compare with the tolerance of bfloat16.
        return [t.bfloat16() for t in [*(h.detach() for h, _ in states), *grads]]

    torch.testing.assert_close(run(True), run(False))


def test_grad_of_held_intermediates(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
            losses = [s[-1].square().sum() for s in states]
        found = [
            torch.autograd.grad(losses[0], states[0][0], retain_graph=True),
            torch.autograd.grad(losses[0], states[0][-1], retain_graph=True),
            torch.autograd.grad(losses[2], [model.cell.weight, states[2][1]], retain_graph=True),
            torch.autograd.grad(losses[2], [*states[2], *model.cell.parameters()]),
            torch.autograd.grad(losses[1], states[0][0], allow_unused=True, retain_graph=True),
            torch.autograd.grad(losses[1], states[1][0]),
            torch.autograd.grad(states[3][1].sum(), [states[3][0], model.scale]),
        ]
        assert grads_of(model) == [None] * 5
        return found

    same(scenario)


def test_grad_of_several_losses_and_held(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
            losses = [s[-1].square().sum() for s in states]
        firsts = [s[0] for s in states]
        return torch.autograd.grad(losses, [*firsts, *model.parameters()])

    same(scenario)


def test_grad_of_held_views() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 6, dtype=DOUBLE)
        inputs = [rand(2, 4) for _ in range(3)]
        with block():
            h = [w(x) for x in inputs]
            parts = [t.chunk(3, 1) for t in h]
            rows = [t[0] for t in h]
            losses = [
                (a * b.sin()).sum() + c.square().sum() + r.exp().sum() + t.cos().sum()
                for (a, b, c), r, t in zip(parts, rows, h, strict=True)
            ]
        found = []
        for i in range(3):
            found += torch.autograd.grad(losses[i], [h[i], w.weight], retain_graph=True)
            found += torch.autograd.grad(losses[i], parts[i], retain_graph=True)
            found += torch.autograd.grad(losses[i], [rows[i], h[i]], retain_graph=True)
        backward_each(losses)
        return found, grads_of(w)

    same(scenario)


def test_held_views_of_views() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 6, dtype=DOUBLE)
        with block():
            kept = []
            losses = []
            for x in [rand(2, 4) for _ in range(3)]:
                h = w(x)
                v = h.view(2, 3, 2)
                t = v.transpose(0, 1)
                u = t[1]
                losses.append((u * u).sum() + v.sin().sum())
                kept.append((h, v, t, u))
        found = []
        for loss, all_held in zip(losses, kept, strict=True):
            for held in all_held:
                found += torch.autograd.grad(loss, held, retain_graph=True, allow_unused=True)
            found += torch.autograd.grad(loss, [*all_held[:2], w.weight], retain_graph=True)
        return found

    same(scenario)


def test_view_held_but_not_its_base() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 6, dtype=DOUBLE)
        with block():
            views = [w(x).tanh()[:, 1:4] for x in [rand(2, 4) for _ in range(3)]]
            losses = [(v * 2).exp().sum() for v in views]
        found = [torch.autograd.grad(losses[i], views[i], retain_graph=True) for i in range(3)]
        losses[1].backward()
        return found, grads_of(w)

    same(scenario)


def test_gradient_of_a_held_value_itself(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
        h = states[2][3]
        h.backward(torch.arange(4, dtype=DOUBLE).view(1, 4))
        (found,) = torch.autograd.grad(states[0][-1].sum(), states[0][-1])
        return found, grads_of(model)

    same(scenario)


def test_all_steps_held(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
            losses = [torch.stack(s).square().sum() for s in states]
        for s in states:
            for h in s:
                h.retain_grad()
        backward_each(losses)
        return [[h.grad for h in s] for s in states], grads_of(model)

    same(scenario)


def test_backward_from_several_held_levels(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
        roots = [h for s in states for h in s]
        torch.autograd.backward(roots, [torch.full_like(h, i + 1.0) for i, h in enumerate(roots)])
        return grads_of(model)

    same(scenario)


def test_is_leaf_grad_fn_and_requires_grad(instances: list[Tensor]) -> None:
    model = Chain()
    with ab.batch():
        state = model.states(instances[0])[0]
        assert state.requires_grad
        detached = state.detach() * 2
        assert not detached.requires_grad
    assert not state.is_leaf
    assert state.grad_fn is not None
    assert detached.grad_fn is None
    assert detached.is_leaf


# --- hooks ---


def test_hooks_on_held_values(instances: list[Tensor]) -> None:
    """A hook is called once, with the whole gradient, and only for differentiated values."""

    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
            losses = [s[-1].square().sum() + s[0].sum() for s in states]
        seen: dict[int, list[Tensor]] = {i: [] for i in range(len(states))}
        for i, s in enumerate(states):
            s[0].register_hook(lambda g, i=i: seen[i].append(g.clone()))
        (losses[0] + losses[2]).backward()
        assert [len(seen[i]) for i in range(4)] == [1, 0, 1, 0]
        losses[3].backward()
        assert [len(seen[i]) for i in range(4)] == [1, 0, 1, 1]
        return [seen[i] for i in range(4)], grads_of(model)

    same(scenario)


def test_hooks_that_change_the_gradient(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
            losses = [s[-1].square().sum() for s in states]
        for i, s in enumerate(states):
            s[0].register_hook(lambda g, i=i: g * (i + 2))
            s[-1].register_hook(lambda g: g.clamp(-0.5, 0.5))
        backward_each(losses)
        return grads_of(model)

    same(scenario)


def test_hook_that_zeroes_stops_an_instance(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x)[-1] for x in instances]
            losses = [s.square().sum() for s in states]
        states[1].register_hook(torch.zeros_like)
        backward_sum(losses)
        return grads_of(model)

    same(scenario)


def test_hooks_registered_in_the_block(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        seen: list[Tensor] = []
        losses = []
        with block():
            for x in instances:
                state = model.states(x)[0]
                state.register_hook(lambda g: seen.append(g.clone()))
                losses.append(state.exp().sum())
        backward_each(losses)
        assert len(seen) == len(instances)
        return seen, grads_of(model)

    same(scenario)


def test_removed_hook_is_not_called(instances: list[Tensor]) -> None:
    model = Chain()
    seen: list[Tensor] = []
    with ab.batch():
        states = [model.states(x)[-1] for x in instances]
        losses = [s.sum() for s in states]
    handle = states[0].register_hook(seen.append)
    handle.remove()
    backward_sum(losses)
    assert seen == []


@pytest.mark.parametrize("in_block", [False, True])
def test_retain_grad(in_block: bool, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x)[0] for x in instances]
            if in_block:
                for s in states:
                    s.retain_grad()
            losses = [(s * s.sin()).sum() for s in states]
        if not in_block:
            for s in states:
                s.retain_grad()
        (losses[0] + 2 * losses[3]).backward()
        assert states[0].retains_grad
        return [s.grad for s in states], grads_of(model)

    same(scenario)


@pytest.mark.parametrize("backward", [backward_sum, backward_each])
def test_hooks_on_parameters(
    backward: Callable[[list[Tensor]], None], instances: list[Tensor]
) -> None:
    """A hook is called once per backward, with the whole gradient."""

    def scenario(block: Block) -> Any:
        model = Chain()
        seen: list[Tensor] = []
        accumulated: list[Tensor] = []
        for p in (model.cell.weight, model.scale, model.table.weight):
            p.register_hook(lambda g: seen.append(g.clone()))
            p.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
        losses = losses_in(block, model, instances)
        backward(losses)
        calls = 1 if backward is backward_sum else len(losses)
        assert len(seen) == 3 * calls
        assert len(accumulated) == 3 * calls
        key = [t.shape for t in seen]
        ordered = [t for shape in sorted(set(key)) for t in seen if t.shape == shape]
        return ordered, grads_of(model)

    same(scenario)


def test_parameter_hooks_that_change_the_gradient(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.1, 0.1))
        backward_sum(losses_in(block, model, instances))
        return grads_of(model)

    same(scenario)


def test_hooks_on_nodes(instances: list[Tensor]) -> None:
    model = Chain()
    seen = []
    losses = losses_in(ab.batch, model, instances)
    losses[0].grad_fn.register_hook(lambda *_: seen.append("after"))
    losses[0].grad_fn.register_prehook(lambda _: seen.append("before"))
    backward_each(losses)
    assert seen == ["before", "after"]


DETACHING: dict[str, Callable[[Tensor], Tensor]] = {
    "a factor": lambda x: x.detach() * x,
    "a pending factor": lambda x: (x * 2).detach() * (x * 2).tanh(),
    "straight-through": lambda x: x + (x.round() - x).detach(),
    "a part": lambda x: x.tanh()[1:].detach() * x[1:],
}


@pytest.mark.parametrize("name", DETACHING)
def test_create_graph_stops_at_what_is_detached(name: str) -> None:
    def scenario(block: Block) -> Any:
        leaves = [(rand(4) * 3).requires_grad_() for _ in range(3)]
        with block():
            losses = [DETACHING[name](x).sum() for x in leaves]
        first = torch.autograd.grad(sum(losses), leaves, create_graph=True)
        squares = [g.square().sum() for g in first if g.requires_grad]
        if squares:
            torch.stack(squares).sum().backward()
        return first, [x.grad for x in leaves]

    same(scenario)
