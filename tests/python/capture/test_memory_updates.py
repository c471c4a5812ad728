"""In-place ops with pending values on ordinary memory: applied in the order of the program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch_autobatch as ab
from helpers_capture import rand
from torch import Tensor, nn

Mode = Callable[[], AbstractContextManager[Any]]
WEIGHT = rand(3, 3).requires_grad_()
MODES: list[Mode] = [torch.no_grad, torch.inference_mode, torch.enable_grad]


def instances(n: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [rand(2 + i, 3) for i in range(n)]


def hidden(x: Tensor) -> Tensor:
    return (x @ WEIGHT).tanh().detach()


class Buffer:
    """A buffer with a view, so that it can't become pending itself."""

    def __init__(self) -> None:
        self.data = rand(4, 3) * 0
        self.row = self.data[1]
        self.step = torch.zeros((), dtype=torch.long)
        self.single = rand(1) * 0  # has no view


def moving_average(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.row.mul_(0.9).add_(hidden(x).mean(0), alpha=0.1)
    return hidden(x).sum()


def scalars(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.data.mul_(0.5).add_(hidden(x).mean()).clamp_(max=0.7)
    return hidden(x).sum()


def interpolation(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.row.lerp_(hidden(x).mean(0), 0.1)
    return hidden(x).sum()


def copies(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.row.copy_(buffer.row * 0.9 + hidden(x).mean(0) * 0.1)
    return hidden(x).sum()


def read_and_written(buffer: Buffer, x: Tensor) -> Tensor:
    nearest = (hidden(x)[:, None] - buffer.data).square().sum(-1)
    buffer.row.mul_(0.9).add_(hidden(x).mean(0), alpha=0.1)
    return nearest.sum()


def read_after(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.row.mul_(0.9).add_(hidden(x).mean(0), alpha=0.1)
    return (hidden(x) @ buffer.data.t()).sum()


def source_is_written(buffer: Buffer, x: Tensor) -> Tensor:
    mean = hidden(x).mean(0)
    buffer.row.add_(mean)
    mean.mul_(3)
    return mean.sum()


def other_ops(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.data.index_add_(0, torch.tensor([0, 2]), hidden(x)[:2])
    buffer.data[3] = hidden(x)[0]
    buffer.row.zero_()
    return hidden(x).sum()


def several(buffer: Buffer, x: Tensor) -> Tensor:
    h = hidden(x)
    buffer.row.add_(h.mean(0))
    buffer.data[0].add_(h[0])
    total = h.sum() + buffer.data.sum()
    buffer.data[2].add_(total)
    return total


def counted(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.step.add_(1)
    h = hidden(x).mean(0)
    buffer.row.add_((h - buffer.row) / buffer.step)
    return h.sum()


def item(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.single.add_(hidden(x).mean())
    return x.sum() * buffer.single.item()


def clamped(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.single.add_(hidden(x).mean() * 9)
    buffer.single.data.clamp_(-1, 1)
    return x.sum()


def centers(buffer: Buffer, x: Tensor) -> Tensor:
    h = hidden(x)
    labels = torch.arange(len(x)) % 4
    buffer.data[labels] += 0.5 * (h - buffer.data[labels])
    return h.sum()


def replaced(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.data.add_(hidden(x)[0])
    buffer.data.data = buffer.data.detach() * 2
    return x.sum()


def reset(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.data.add_(hidden(x)[0])
    buffer.data.set_(torch.ones(4, 3, dtype=torch.float64))
    return x.sum() + buffer.data.sum()


def own_writes(buffer: Buffer, x: Tensor) -> Tensor:
    buffer.row.mul_(0.5).add_(hidden(x)[0])
    h = hidden(x) * 2
    h.relu_().mul_(2)
    buffer.row.add_(h[-1])
    return h.sum()


PROGRAMS = [
    counted,
    item,
    clamped,
    centers,
    replaced,
    reset,
    own_writes,
    moving_average,
    scalars,
    interpolation,
    copies,
    read_and_written,
    read_after,
    source_is_written,
    other_ops,
    several,
]


def in_loop(program: Any, buffer: Buffer, given: list[Tensor]) -> list[Tensor]:
    return [program(buffer, x) for x in given]


def in_block(program: Any, buffer: Buffer, given: list[Tensor]) -> list[Tensor]:
    with ab.batch(adaptive=False):
        return [program(buffer, x) for x in given]


def in_map(program: Any, buffer: Buffer, given: list[Tensor]) -> list[Tensor]:
    with ab.batch(adaptive=False):
        return ab.map(lambda x: program(buffer, x), given)


@pytest.mark.parametrize("run", [in_block, in_map])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_order_is_that_of_the_loop(program: Any, mode: Mode, run: Any) -> None:
    outcomes = []
    for how in (in_loop, run):
        buffer = Buffer()
        with mode():
            results = how(program, buffer, instances())
        outcomes.append([buffer.data, buffer.row, buffer.single, *results])
    torch.testing.assert_close(outcomes[1], outcomes[0])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", [moving_average, scalars, interpolation])
def test_updates_cause_no_flush(program: Any, mode: Mode) -> None:
    buffer = Buffer()
    with mode(), ab.batch(adaptive=False) as scope:
        results = [program(buffer, x) for x in instances(16)]
        version = buffer.data._version
    report = scope.report()
    assert len(report.flushes) == 1
    assert not report.at_once
    assert len(results) == 16
    eager = Buffer()
    with mode():
        in_loop(program, eager, instances(16))
    assert version == eager.data._version
    torch.testing.assert_close(buffer.data, eager.data)


def test_many_instances_use_one_buffer() -> None:
    """Each instance waits for the previous instance."""
    buffers = []
    for how in (in_loop, in_map):
        buffer = Buffer()
        with torch.no_grad():
            how(other_ops, buffer, instances(100))
        buffers.append(buffer.data)
    torch.testing.assert_close(buffers[1], buffers[0])


def test_an_instance_that_fails_releases_the_memory() -> None:
    buffer = Buffer()

    def one(x: Tensor) -> Tensor:
        other_ops(buffer, x)
        if len(x) == 3:
            raise ValueError("the second instance")
        return x

    with torch.no_grad(), ab.batch(adaptive=False):
        outcomes = ab.map(one, instances(), return_exceptions=True)
        buffer.row.add_(hidden(instances()[0])[0])
        assert buffer.row.sum() != 0
    assert [isinstance(outcome, ValueError) for outcome in outcomes] == [False, True, False, False]


def test_a_flush_of_another_instance_applies_the_updates() -> None:
    """The first instance waits for the sources of its update. The second one flushes the block."""
    buffer = Buffer()
    given = instances(3)
    with torch.no_grad(), ab.batch(adaptive=False) as scope:

        def one(x: Tensor) -> Tensor:
            if len(x) != 2:
                scope.flush()
                return x.sum()
            buffer.row.add_(hidden(x)[0]).mul_(2)
            return x.sum() * buffer.row.sum()

        results = ab.map(one, given)
    expected = 2 * hidden(given[0])[0]
    torch.testing.assert_close(buffer.row, expected)
    torch.testing.assert_close(results[0], given[0].sum() * expected.sum())


def test_exports_see_the_updates() -> None:
    buffer, x = Buffer(), instances()[0]
    with torch.no_grad(), ab.batch(adaptive=False):
        buffer.row.add_(hidden(x)[0])
        shared = torch.from_dlpack(torch.utils.dlpack.to_dlpack(buffer.data))
        array = np.from_dlpack(buffer.data).sum()
    assert array == pytest.approx(float(hidden(x)[0].sum()))
    torch.testing.assert_close(shared, buffer.data)


@pytest.mark.parametrize("mapped", [True, False])
def test_batch_norm_and_in_place_activations_cause_no_flush(mapped: bool) -> None:
    outcomes = []
    for enabled in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True)] * 2
        network = nn.Sequential(*layers).double()
        with ab.batch(enabled=enabled, adaptive=False) as scope:
            given = instances(8)
            results = ab.map(network, given) if mapped else [network(x) for x in given]
        outcomes.append([*results, *network.buffers()])
    torch.testing.assert_close(outcomes[1], outcomes[0])
    assert len(scope.report().flushes) == 1


def test_a_read_sees_the_updates_before_it() -> None:
    reads: dict[str, list[Any]] = {}
    for how in ("loop", "block"):
        buffer = Buffer()
        seen = reads[how] = []
        with torch.no_grad(), ab.batch(enabled=how == "block", adaptive=False):
            for x in instances():
                moving_average(buffer, x)
                seen.append(buffer.data.tolist())
                moving_average(buffer, x)
                seen.append(buffer.row.numpy().copy().tolist())
                moving_average(buffer, x)
                seen.append(buffer.row[0].item())
    torch.testing.assert_close(reads["block"], reads["loop"])


def test_errors_are_raised_by_the_call() -> None:
    buffer = Buffer()
    with torch.no_grad(), ab.batch(adaptive=False):
        mean = hidden(instances()[0]).mean(0)
        with pytest.raises(RuntimeError, match="size"):
            buffer.row.add_(mean[:2])
        with pytest.raises(RuntimeError, match="dtype"):
            buffer.row.lerp_(mean.float(), 0.5)
        buffer.row.add_(mean)
    torch.testing.assert_close(buffer.data[1], hidden(instances()[0]).mean(0))


def test_a_lost_source_leaves_nothing_behind() -> None:
    buffer = Buffer()
    table, index = rand(3, 3).requires_grad_(), torch.tensor([7])

    def update() -> None:
        with torch.no_grad(), ab.batch(adaptive=False):
            rows = torch.nn.functional.embedding(index, table)
            buffer.row.add_(hidden(rows)[0])

    with pytest.raises(IndexError):
        update()
    before = buffer.data.clone()
    with torch.no_grad(), ab.batch(adaptive=False):
        buffer.row.add_(hidden(rand(1, 3))[0])
    assert not torch.equal(buffer.data, before)
