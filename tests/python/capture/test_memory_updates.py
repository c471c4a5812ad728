"""In-place ops with pending values on ordinary memory: applied in the order of the program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_capture import rand
from torch import Tensor

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


PROGRAMS = [
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
        outcomes.append([buffer.data, *results])
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
