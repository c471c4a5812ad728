"""Backward inside the block, scope.backward, and training loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_backward import (
    SIZES,
    Block,
    Chain,
    assert_close,
    backward_each,
    backward_sum,
    grads_of,
    losses_in,
    rand,
    same,
)
from torch import Tensor, nn

# --- inside the block ---


def in_block_backward(losses: list[Tensor], parameters: list[Tensor]) -> Any:
    for loss in losses:
        loss.backward()


def in_block_autograd_backward(losses: list[Tensor], parameters: list[Tensor]) -> Any:
    torch.autograd.backward(losses)


def in_block_sum(losses: list[Tensor], parameters: list[Tensor]) -> Any:
    sum(losses).backward()


def in_block_grad(losses: list[Tensor], parameters: list[Tensor]) -> Any:
    return [torch.autograd.grad(loss, parameters) for loss in losses]


@pytest.mark.parametrize(
    "backward", [in_block_backward, in_block_autograd_backward, in_block_sum, in_block_grad]
)
def test_backward_in_the_block(backward: Callable[..., Any], instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            losses = [model(x) for x in instances]
            found = backward(losses, list(model.parameters()))
            inside = [None if g is None else g.clone() for g in grads_of(model)]
            more = [model(x) for x in instances[:2]]
        backward_sum(more)
        return losses, found, inside, grads_of(model)

    same(scenario)


def test_backward_in_the_block_of_each_instance(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            for x in instances:
                model(x).backward()
        return grads_of(model)

    same(scenario)


def test_backward_in_the_block_of_a_root_from_before(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        before = model(instances[0])
        with block():
            pending = model(instances[1])
            before.backward()
            later = pending + 1
        later.backward()
        return grads_of(model)

    same(scenario)


def test_gradients_read_in_the_block(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            model(instances[0]).backward()
            norm = model.cell.weight.grad.norm()
            scaled = [model.cell.weight.grad * i for i in range(3)]
            (gradient,) = torch.autograd.grad(model(instances[1]), model.scale)
            product = gradient * model.scale.detach()
        return norm, scaled, product

    same(scenario)


def test_full_training_step_in_the_block(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with block():
            for _ in range(3):
                optimizer.zero_grad()
                loss = sum(model(x) for x in instances)
                loss.backward()
                optimizer.step()
        return loss, list(model.parameters())

    same(scenario)


# --- scope.backward ---


def test_scope_backward(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        calls: list[int] = []
        model.cell.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
        with block() as scope:
            for x in instances:
                scope.backward(model(x))
            assert model.cell.weight.grad is None
        assert len(calls) == 1
        return grads_of(model)

    values = same(scenario)
    model = Chain()
    torch.manual_seed(1)
    model = Chain()
    backward_each([model(x) for x in instances])
    assert_close(values, grads_of(model))


def test_scope_backward_is_one_backward(instances: list[Tensor]) -> None:
    model = Chain()
    with ab.batch() as scope:
        for x in instances:
            scope.backward(model(x))
    assert scope.report().findings == []
    assert len(scope.report().flushes) == 1


def test_scope_backward_with_gradients(instances: list[Tensor]) -> None:
    weights = [rand(1, 4) for _ in range(len(SIZES))]

    def in_eager(model: Chain) -> list[Tensor]:
        return [model.states(x)[-1] for x in instances]

    def scenario(block: Block) -> Any:
        model = Chain()
        with block() as scope:
            roots = in_eager(model)
            scope.backward(roots[0], weights[0])
            scope.backward([roots[1], roots[2]], weights[1:3])
            scope.backward([roots[3], roots[3].sum()], [weights[3], None])
            scope.backward((roots[0].sum(), roots[1].sum()))
        return grads_of(model)

    values = same(scenario)
    torch.manual_seed(1)
    model = Chain()
    roots = in_eager(model)
    total = sum((r * w).sum() for r, w in zip(roots, weights, strict=True))
    (total + roots[3].sum() + roots[0].sum() + roots[1].sum()).backward()
    assert_close(values, grads_of(model))


def test_scope_backward_errors(instances: list[Tensor]) -> None:
    model = Chain()
    with ab.batch() as scope:
        state = model.states(instances[0])[-1]
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
            scope.backward(state)
        with pytest.raises(ValueError, match="1 tensors but 2 gradients"):
            scope.backward([state], [torch.ones_like(state)] * 2)
    assert grads_of(model) == [None] * 5


def test_scope_backward_after_the_block(instances: list[Tensor]) -> None:
    model = Chain()
    with ab.batch() as scope:
        loss = model(instances[0])
    scope.backward(loss)
    other = Chain()
    other.load_state_dict(model.state_dict())
    other(instances[0]).backward()
    assert_close(grads_of(model), grads_of(other))


def test_scope_backward_is_dropped_when_the_block_raises(instances: list[Tensor]) -> None:
    model = Chain()
    scope = ab.batch()

    def fail() -> None:
        with scope:
            scope.backward(model(instances[0]))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert grads_of(model) == [None] * 5
    with scope:
        scope.backward(model(instances[1]))
    other = Chain()
    other.load_state_dict(model.state_dict())
    other(instances[1]).backward()
    assert_close(grads_of(model), grads_of(other))


def test_scope_backward_in_a_nested_block(instances: list[Tensor]) -> None:
    model = Chain()
    with ab.batch() as outer:
        outer.backward(model(instances[0]))
        with ab.batch() as inner:
            inner.backward(model(instances[1]))
    other = Chain()
    other.load_state_dict(model.state_dict())
    (other(instances[0]) + other(instances[1])).backward()
    assert_close(grads_of(model), grads_of(other))


# --- training ---


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.05),
    ],
    ids=["SGD", "Adam"],
)
@pytest.mark.parametrize("to_none", [False, True])
def test_optimizers(optimizer: Callable[..., Any], to_none: bool, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        steps = optimizer(model.parameters())
        history = []
        for step in range(6):
            steps.zero_grad(set_to_none=to_none)
            chosen = instances[step % 2 :]
            losses = losses_in(block, model, chosen)
            (backward_each if step % 2 else backward_sum)(losses)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            history.append([loss.item() for loss in losses])
        return torch.tensor([v for h in history for v in h]), list(model.parameters())

    same(scenario)


@pytest.mark.parametrize("to_none", [False, True])
def test_zero_grad_between_losses(to_none: bool, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        losses = losses_in(block, model, instances)
        found = []
        for loss in losses:
            model.zero_grad(set_to_none=to_none)
            loss.backward()
            found.append([g.clone() for g in grads_of(model) if g is not None])
        return found

    same(scenario)


def test_gradients_accumulate_over_blocks(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        first = losses_in(block, model, instances[:2])
        backward_sum(first)
        second = losses_in(block, model, instances[2:])
        backward_each(second)
        return grads_of(model)

    same(scenario)


def test_two_blocks_one_backward(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        first = losses_in(block, model, instances)
        second = losses_in(block, model, instances[::-1])
        (torch.stack(first) * torch.stack(second)).sum().backward()
        return grads_of(model)

    same(scenario)


def test_gradients_own_their_memory(instances: list[Tensor]) -> None:
    """Later backwards do not change a gradient."""
    model = Chain()
    losses = losses_in(ab.batch, model, instances)
    losses[0].backward()
    kept = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in kept if g is not None]
    model.zero_grad(set_to_none=True)
    backward_each(losses[1:])
    assert_close(kept, copies)
    assert len({g.data_ptr() for g in kept if g is not None}) == len(copies)
