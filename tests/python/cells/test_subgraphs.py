"""Cells that run as one node: results that backward reaches, held results, calls of backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers_cells import Cells, H, Variant, compare_with_eager, states_of
from torch import Tensor

States = list[tuple[Tensor, Tensor]]


def gradients(model: Cells) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


# ---------------------------------------------------------------- results that backward reaches


def compare_gradients(loss: Callable[[States], Tensor]) -> None:
    def program(variant: Variant) -> Any:
        model = variant.model()
        total = loss(states_of(model, variant.block()))
        return total, torch.autograd.grad(total, list(model.parameters()), allow_unused=True)

    compare_with_eager(program)


def test_all_states() -> None:
    compare_gradients(lambda states: torch.stack([h.square() + c for h, c in states]).sum())


def test_some_instances() -> None:
    compare_gradients(lambda states: (states[3][0] * 2).sum() + states[5][0].sum())


def test_different_results_of_different_instances() -> None:
    compare_gradients(
        lambda states: torch.stack([s[k % 2] * (k + 1) for k, s in enumerate(states)]).sum()
    )


def test_weights_of_a_result_that_is_not_used_get_no_gradient() -> None:
    """c of the first step does not depend on the output gate."""

    def program(variant: Variant) -> Any:
        model = variant.model()
        states = states_of(model, variant.block())
        total = states[0][1].sum() + states[6][1].sum()
        total.backward()
        assert model.out.weight.grad is None
        return total, gradients(model)

    compare_with_eager(program)


def test_a_hook_of_weights_that_are_not_reached_does_not_run() -> None:
    def program(variant: Variant) -> Any:
        model = variant.model()
        seen: dict[str, int] = {}
        for name, p in model.named_parameters():
            p.register_hook(lambda _, name=name: seen.update({name: seen.get(name, 0) + 1}))
        states = states_of(model, variant.block(), [1, 1, 1])
        (states[0][1].sum() + states[1][1].sum()).backward()
        assert seen == {"embedding.weight": 1, "gates.weight": 1, "gates.bias": 1}
        assert model.out.weight.grad is None
        return gradients(model)

    compare_with_eager(program)


def test_what_is_not_reached_may_be_infinite() -> None:
    """0 * inf is NaN, so members and results without a gradient must be left out."""

    def program(variant: Variant) -> Any:
        x = [torch.full((2,), v, requires_grad=True) for v in (1.0, 0.0, 2.0, 0.0)]
        called = variant.cell(lambda v: ((v * 2).exp(), (v * 1).log()))
        with variant.block():
            results = [called(v * 1) for v in x]
        # The loss leaves out the logarithm of some instances, whose slope is infinite.
        (results[0][1].sum() + results[1][0].sum() + results[2][0].sum()).backward()
        grads = [v.grad for v in x]
        torch.testing.assert_close(grads[0], torch.ones(2))
        torch.testing.assert_close(grads[1], torch.full((2,), 2.0))
        assert grads[3] is None
        return grads

    compare_with_eager(program)


# ---------------------------------------------------------------- held results


def test_gradient_of_a_held_result_that_another_is_computed_from() -> None:
    def program(variant: Variant) -> Any:
        model = variant.model()
        hs: list[Tensor] = []
        cs: list[Tensor] = []
        hooked: list[Tensor] = []
        with variant.block():
            for k in range(5):
                h = c = torch.full((1, H), 0.1 * k)
                for t in range(3):
                    h, c = model.step(model.word(torch.tensor([t + k])), h, c)
                    cs.append(c)
                if k == 2:
                    c.register_hook(hooked.append)
                hs.append(h)
        grads = torch.autograd.grad(torch.stack(hs).sum(), [*cs, *model.parameters()])
        assert len(hooked) == 1
        return list(grads), hooked

    compare_with_eager(program)


def test_everything_is_held() -> None:
    def program(variant: Variant) -> Any:
        model = variant.model()
        kept: list[Tensor] = []
        with variant.block():
            for k in range(4):
                h = c = torch.full((1, H), 0.1 * k)
                for t in range(k + 1):
                    h, c = model.step(model.word(torch.tensor([t + k])), h, c)
                    kept += [h, c]
        torch.stack([t.square().sum() for t in kept]).sum().backward()
        return kept, gradients(model)

    compare_with_eager(program)


def test_a_read_within_the_block() -> None:
    def program(variant: Variant) -> Any:
        model = variant.model()
        losses, read = [], []
        with variant.block():
            for k in range(6):
                h = c = torch.full((1, H), 0.1 * k)
                for t in range(4):
                    h, c = model.step(model.word(torch.tensor([t + k])), h, c)
                    if t == 2:
                        read.append(c.sum().item())
                losses.append(h.square().sum())
        torch.stack(losses).sum().backward()
        return torch.tensor(read), gradients(model)

    compare_with_eager(program)


# ---------------------------------------------------------------- calls of backward


def sum_of_h(states: States) -> Tensor:
    return torch.stack([h.sum() for h, _ in states]).sum()


def test_twice_with_retain_graph_and_not_a_third_time() -> None:
    def program(variant: Variant) -> Any:
        model = variant.model()
        total = sum_of_h(states_of(model, variant.block()))
        total.backward(retain_graph=True)
        once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        total.backward()
        for p, first in zip(model.parameters(), once, strict=True):
            torch.testing.assert_close(p.grad, first * 2)
        with pytest.raises(RuntimeError, match="second time"):
            total.backward()
        return once

    compare_with_eager(program)


def test_one_instance_after_the_other() -> None:
    def program(variant: Variant) -> Any:
        model = variant.model()
        for h, c in states_of(model, variant.block()):
            (h.sum() + c.square().sum()).backward()
        return gradients(model)

    compare_with_eager(program)


def test_create_graph() -> None:
    def program(variant: Variant) -> Any:
        model = variant.model()
        total = sum_of_h(states_of(model, variant.block()))
        grads = torch.autograd.grad(total, list(model.parameters()), create_graph=True)
        torch.stack([g.square().sum() for g in grads]).sum().backward()
        return grads, gradients(model)

    compare_with_eager(program)


def test_a_weight_that_was_written_to_before_backward() -> None:
    def program(variant: Variant) -> None:
        model = variant.model()
        states = states_of(model, variant.block())
        with torch.no_grad():
            model.gates.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sum_of_h(states).backward()

    compare_with_eager(program)


def test_a_weight_that_needs_no_value_may_be_written_to() -> None:
    def program(variant: Variant) -> Any:
        model = variant.model()
        states = states_of(model, variant.block())
        with torch.no_grad():
            model.gates.bias.mul_(2)
        sum_of_h(states).backward()
        return gradients(model)

    compare_with_eager(program)
