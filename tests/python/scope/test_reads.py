"""Reads in the middle of a block: nodes that run, values that stay pending, and memory use."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_capture import is_pending
from torch import Tensor, nn

from benchmarks.memory import tensor_peak

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def flushes(scope: ab.batch) -> int:
    return sum(flush.count for flush in scope.report().flushes)


def leaf(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*sizes, dtype=torch.double))


@pytest.mark.parametrize("mode", MODES)
def test_a_number_leaves_all_else_pending(mode: str) -> None:
    w = leaf(4, 4)
    xs = [torch.randn(2, 4, dtype=torch.double) for _ in range(6)]
    with MODES[mode]():
        expected = [(x @ w).tanh() for x in xs]
        number = expected[2].sum().item()
        with ab.batch() as scope:
            held = [x @ w for x in xs]
            deep = [h.tanh() for h in held]
            assert deep[2].sum().item() == pytest.approx(number)
            assert all(is_pending(h) for h in held + deep)  # although all of them are computed
            assert [f.nodes for f in scope.report().flushes] == [13]
            further = [(d * 2) @ w for d in deep]  # reads them in place
        assert (flushes(scope), scope.report().batches) == (2, 5)
        for d, f, e in zip(deep, further, expected, strict=True):
            torch.testing.assert_close(d, e)
            torch.testing.assert_close(f, (e * 2) @ w)
            assert d.is_inference() == e.is_inference()


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_only_what_is_read_becomes_real_without_gradients(mode: str) -> None:
    w = leaf(4, 4)
    with MODES[mode](), ab.batch():
        held = [torch.randn(2, 4, dtype=torch.double) @ w for _ in range(4)]
        values = [h.tanh() for h in held]
        values[1].numpy()
        assert [is_pending(v) for v in values] == [True, False, True, True]
        assert all(is_pending(h) for h in held)
        values[3] += values[1]
        total = values[3].sum().item()
    assert total == pytest.approx((held[3].tanh() + held[1].tanh()).sum().item())


@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_memory_goes_with_the_last_reader(mode: str) -> None:
    """A loop that reads at each step needs the memory of one step, for any number of steps."""
    w = torch.randn(64, 64)

    def decode(steps: int) -> None:
        with MODES[mode](), ab.batch():
            states = [torch.ones(16, 64) @ w for _ in range(8)]
            for _ in range(steps):
                states = [(s @ w).tanh() for s in states]
                assert states[0].isfinite().all().item()

    decode(3)
    short, long = (tensor_peak(lambda n=n: decode(n)) for n in (4, 40))
    assert long <= short + 16 * 64 * 4


def test_what_waits_keeps_the_memory_it_reads() -> None:
    w = leaf(3, 3)
    with torch.no_grad(), ab.batch():
        first = [torch.full((1, 3), float(i), dtype=torch.double) @ w for i in range(4)]
        waits = [f * 3 for f in first]
        first[0].exp().sum().item()  # runs only the products
        del first
        for i in range(5):
            (torch.full((1, 3), float(i), dtype=torch.double) @ w).exp().sum().item()
    for i, value in enumerate(waits):
        expected = torch.full((1, 3), float(i), dtype=torch.double) @ w * 3
        torch.testing.assert_close(value, expected.detach())


def program(seed: int, steps: int, w: nn.Parameter, batched: bool) -> tuple[list[Any], int]:
    """Applies random ops to a few values, and reads some of them in all possible ways."""
    choose = random.Random(seed)
    read: list[Any] = []
    held: list[Tensor] = []
    with ab.batch(enabled=batched) as scope:
        values = [w[i : i + 1] * 1.5 for i in range(4)]
        for _ in range(steps):
            i, j = choose.randrange(len(values)), choose.randrange(len(values))
            kind = choose.randrange(12)
            if kind < 3:
                values[i] = (values[i] @ w).tanh()
            elif kind < 5:
                values[i] = values[i] * 0.5 + values[j]
            elif kind == 5:
                values[i] = torch.cat([values[i][:, :2], values[j][:, 2:]], 1).sigmoid()
            elif kind == 6:
                values[i] = values[i].clone()
                values[i][:, 1] = values[j][:, 0]
            elif kind == 7:
                read.append(values[i].sum().item())
            elif kind == 8:
                read.append(values[i].detach().numpy().copy().tolist())
            elif kind == 9:
                values[i].register_hook(lambda g: g * 0.5)
            elif kind == 10:
                held.append(values[i])
            else:
                held.append(values[i].T[1:3])
                read.append(held[-1].detach().sum().item())
    return [read, held, values], flushes(scope)


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_reads(seed: int) -> None:
    torch.manual_seed(seed)
    w = leaf(4, 4)
    found, count = program(seed, 150, w, True)
    expected, _ = program(seed, 150, w, False)
    assert count > 20
    for number, wanted in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(torch.tensor(number), torch.tensor(wanted))
    gradients = []
    for out in (found, expected):
        tensors = out[1] + out[2]
        loss = sum(t.square().sum() for t in tensors)
        gradients.append(torch.autograd.grad(loss, w)[0])
    for a, b in zip(found[1] + found[2], expected[1] + expected[2], strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_numbers_are_given_anew_in_long_blocks() -> None:
    """Nodes that ran are dropped while others wait, and weights keep their identities."""

    def run(batched: bool) -> tuple[list[float], Tensor, int]:
        with ab.batch(enabled=batched) as scope:
            waits = [w[i] * 2.0 for i in range(4)]
            views = [v[1:3] for v in waits]
            value, numbers = (w[:1] @ w).tanh(), []
            for step in range(1500):
                value = (value @ w).tanh() + 0.1
                if step % 2:
                    assert value.grad_fn is not None
                if step % 100 == 0:
                    numbers.append(value.sum().item())
                    waits.append(value.exp())
            total = sum(x.sum() for x in waits + views) + value.sum()
        total.backward()
        gradient, w.grad = w.grad, None
        return numbers, gradient, flushes(scope)

    w = leaf(4, 4)
    w.data *= 0.3
    numbers, gradient, count = run(True)
    expected_numbers, expected, _ = run(False)
    assert count > 700
    assert numbers == pytest.approx(expected_numbers)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("limit", [60, 200])
def test_max_pending_keeps_batches(limit: int) -> None:
    """Ready nodes run in the largest batches, and the rest waits for further nodes."""
    w = leaf(4, 4)
    xs = [torch.randn(1, 4, dtype=torch.double) for _ in range(40)]

    def run(x: Tensor) -> Tensor:
        for _ in range(5):
            x = (x @ w).tanh()
        return x.square().sum()

    with ab.batch(max_pending=limit) as scope:
        losses = [run(x) for x in xs]
    report = scope.report()
    assert report.nodes == 40 * 12
    assert all(f.nodes <= limit for f in report.flushes)
    assert report.nodes / report.batches >= limit / 12 / 2
    torch.stack(losses).sum().backward()
    found, w.grad = w.grad, None
    torch.stack([run(x) for x in xs]).sum().backward()
    torch.testing.assert_close(found, w.grad)
