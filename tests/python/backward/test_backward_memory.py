"""Backward through a block: memory, threads, several flushes."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_backward import (
    DOUBLE,
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
from helpers_threads import in_thread
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

# --- memory ---


class Counter:
    """Counts what a block keeps alive, through weak references to the storages of its inputs."""

    def __init__(self, count: int = 4) -> None:
        self.model = nn.Linear(4, 4, dtype=DOUBLE)
        inputs = [rand(1, 4) for _ in range(count)]
        self.storages = [StorageWeakRef(x.untyped_storage()) for x in inputs]
        with ab.batch():
            self.losses = [self.model(x).tanh().sum() for x in inputs]

    def alive(self) -> int:
        gc.collect()
        return sum(not s.expired() for s in self.storages)


def test_freed_when_all_losses_are_dropped() -> None:
    kept = Counter()
    assert kept.alive() == 4
    del kept.losses[1:]
    assert kept.alive() >= 1
    kept.losses.clear()
    assert kept.alive() == 0


def test_freed_when_some_are_differentiated_and_the_others_dropped() -> None:
    kept = Counter()
    kept.losses[0].backward()
    kept.losses[2].backward()
    kept.losses.clear()
    assert kept.alive() == 0


def test_no_cycle_keeps_a_block_alive() -> None:
    """The block is freed without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        kept = Counter()
        backward_each(kept.losses)
        kept.losses.clear()
        assert not any(not s.expired() for s in kept.storages)
    finally:
        gc.enable()


def test_held_values_with_levels_are_freed(instances: list[Tensor]) -> None:
    inputs = [rand(1, 4) for _ in range(3)]
    storages = [StorageWeakRef(x.untyped_storage()) for x in inputs]
    w = nn.Linear(4, 4, dtype=DOUBLE)
    with ab.batch():
        held = [w(x).tanh() for x in inputs]
        losses = [w(h).sum() for h in held]
    del inputs
    backward_sum(losses)
    del losses, held
    gc.collect()
    assert all(s.expired() for s in storages)


@pytest.mark.parametrize("when", ["before", "after"])
def test_memory_that_data_shares_is_freed_by_backward(when: str) -> None:
    """The memory is freed although the loss keeps the record alive."""
    w, x = nn.Linear(4, 4, dtype=DOUBLE), rand(1, 4)
    with ab.batch():
        h = w(x).tanh()
        loss = h.square().sum()
    storage = StorageWeakRef(h.untyped_storage())
    if when == "before":
        h.data.norm()
    loss.backward()
    if when == "after":
        h.data.norm()
    del h
    assert storage.expired()
    assert loss.grad_fn is not None


# --- threads ---


def test_backward_on_other_threads(instances: list[Tensor]) -> None:
    model = Chain()
    losses = losses_in(ab.batch, model, instances * 4)
    failures: list[BaseException] = []

    def run(mine: list[Tensor]) -> None:
        try:
            for loss in mine:
                loss.backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(losses[i::4],)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
    other = Chain()
    other.load_state_dict(model.state_dict())
    backward_each([other(x) for x in instances * 4])
    assert_close(grads_of(model), grads_of(other))


def here(function: Callable[[], Any]) -> Any:
    return function()


@pytest.mark.parametrize("where", ["sum", "sum and backward", "block"])
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_sums_of_losses_on_other_threads(where: str, seed: int) -> None:
    """If a loss arrives after the levels that it depends on, these and lower levels run again."""

    def gradient(enabled: bool) -> Tensor:
        choice = random.Random(seed)
        torch.manual_seed(seed)
        weight = torch.randn(8, 4, dtype=DOUBLE).requires_grad_()
        xs = torch.randn(6, 7, 2, dtype=DOUBLE)
        held = []

        def loss(leaves: Tensor) -> Tensor:
            nodes, results = [(x, x) for x in leaves], []
            while len(nodes) > 1:
                i = choice.randrange(len(nodes) - 1)
                (h1, c1), (h2, c2) = nodes[i : i + 2]
                a, f, o, u = nn.functional.linear(torch.cat([h1, h2]), weight).chunk(4)
                c = torch.sigmoid(a) * torch.tanh(u) + torch.sigmoid(f) * (c1 + c2)
                h = torch.sigmoid(o) * torch.tanh(c)
                nodes[i : i + 2] = [(h, c)]
                results.append(h)
                held.extend([h, c])
            return torch.stack(results).pow(2).sum()

        def block() -> list[Tensor]:
            with ab.batch(enabled=enabled):
                return [loss(x) for x in xs]

        def late_block() -> list[Tensor]:  # later nodes of a thread have higher sequence numbers
            for _ in range(2000):
                weight.sum()
            return block()

        losses = in_thread(late_block) if where == "block" else block()
        total = in_thread(lambda: sum(losses[1:], losses[0]))  # its numbers start at zero
        (in_thread if where == "sum and backward" else here)(total.backward)
        assert weight.grad is not None
        return weight.grad

    torch.testing.assert_close(gradient(True), gradient(False))


@pytest.mark.parametrize("seed", range(4))
def test_a_node_in_two_halves_whose_losses_are_summed_on_another_thread(seed: int) -> None:
    """c is held, so h of each step is differentiated separately, and either half may come late."""

    def gradients(enabled: bool) -> list[Tensor]:
        choice = random.Random(seed)
        torch.manual_seed(seed)
        cell = nn.LSTMCell(3, 4, dtype=DOUBLE)
        held = []

        def loss(xs: Tensor) -> Tensor:
            h, c = torch.zeros(1, 4, dtype=DOUBLE), torch.zeros(1, 4, dtype=DOUBLE)
            terms = [h.sum()]
            for x in xs:
                h, c = cell(x[None], (h, c))
                if choice.random() < 0.6:
                    held.append(c)
                terms.append(choice.choice([h, c, h * c]).pow(2).sum())
            return torch.stack(terms).sum()

        with ab.batch(enabled=enabled):
            losses = [loss(torch.randn(n, 3, dtype=DOUBLE)) for n in (5, 2, 7, 1, 4)]
        in_thread(lambda: sum(losses[1:], losses[0]).backward())
        return [p.grad for p in cell.parameters() if p.grad is not None]

    torch.testing.assert_close(gradients(True), gradients(False))


def test_grad_on_other_threads(instances: list[Tensor]) -> None:
    """No ``.grad`` is shared, so results are exact in any order."""
    model = Chain()
    many = instances * 4
    losses = losses_in(ab.batch, model, many)
    parameters = list(model.parameters())
    found: dict[int, Any] = {}

    def run(i: int) -> None:
        found[i] = torch.autograd.grad(losses[i], parameters)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(losses))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == len(losses)
    for i, x in enumerate(many):
        assert_close(found[i], torch.autograd.grad(model(x), parameters))


# --- several flushes ---


def test_values_used_across_flushes(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block() as scope:
            states = [model.states(x) for x in instances]
            middle = [s[0] for s in states]
            scope.flush()
            further = [
                model.cell(torch.cat([m, s[-1]], 1)) for m, s in zip(middle, states, strict=True)
            ]
            scope.flush()
            scope.flush()
            losses = [(f * s[-1]).sum() for f, s in zip(further, states, strict=True)]
        losses[3].backward()
        (found,) = torch.autograd.grad(losses[0], middle[0], retain_graph=True)
        backward_sum(losses[:3])
        return losses, found, grads_of(model)

    same(scenario)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_pending(limit: int, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        enabled = block()._enabled
        with ab.batch(enabled=enabled, max_pending=limit):
            losses = [model(x) for x in instances]
        backward_each(losses)
        return losses, grads_of(model)

    same(scenario)


def test_values_read_in_the_middle(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            losses = []
            for x in instances:
                state = model.states(x)[-1]
                if state.sum().item() > 0:
                    state = model.cell(torch.cat([state, state], 1))
                losses.append(state.square().sum())
        backward_each(losses)
        return losses, grads_of(model)

    same(scenario)


@pytest.mark.parametrize("policy", ab.policy_names())
def test_policies(policy: str, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with ab.batch(policy, enabled=block()._enabled):
            states = [model.states(x) for x in instances]
            losses = [s[-1].sum() * s[0].sum() for s in states]
        states[0][0].register_hook(lambda g: g * 2)
        backward_each(losses)
        return losses, grads_of(model)

    same(scenario)


# --- errors for unsupported use ---
