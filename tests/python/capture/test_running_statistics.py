"""Batch norm in training, one example at a time: statistics are updated in eager's order."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_capture import DOUBLE, Batch, assert_as_eager, rand
from torch import Tensor, nn


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4)
    ).double()


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
    ).double()


def train(net: nn.Module, instances: list[Tensor], batch: Batch) -> list[Any]:
    with batch():
        results = [net(x) for x in instances]
    sum((r.square().sum() for r in results), torch.zeros((), dtype=DOUBLE)).backward()
    return [*results, *(p.grad for p in net.parameters()), *net.buffers()]


@pytest.mark.parametrize("momentum", [0.1, None, 1.0])
@pytest.mark.parametrize("make", [model, convolutions])
def test_statistics_follow_in_the_order_of_the_program(
    make: Callable[[], nn.Sequential], momentum: float | None
) -> None:
    def program(batch: Batch) -> Any:
        net = make()
        for layer in net:
            if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
                layer.momentum = momentum
        shape = (4 + 1, 3) if make is model else (1, 2, 8, 8)
        torch.manual_seed(1)
        return train(net, [rand(*shape) * (1 + i) + i for i in range(6)], batch)

    assert_as_eager(program)


def test_instances_of_many_sizes_are_one_flush() -> None:
    net = model()
    instances = [rand(3 + i % 4, 3) for i in range(32)]
    with ab.batch() as scope:
        results = [net(x).sum() for x in instances]
    report = scope.report()
    assert len(report.flushes) == 1
    assert not report.at_once
    for op in ("aten::linear", "aten::batch_norm"):
        assert sum(row.batches for row in report.signatures if row.op == op) == 2
    other = model()
    torch.testing.assert_close(results, [other(x).sum() for x in instances])
    torch.testing.assert_close(list(net.buffers()), list(other.buffers()))


READS: dict[str, Callable[[nn.BatchNorm1d], Any]] = {
    "op": lambda norm: norm.running_mean * 2,
    "clone": lambda norm: norm.running_var.clone(),
    "numpy": lambda norm: torch.tensor(norm.running_mean.numpy().copy()),
    "tolist": lambda norm: torch.tensor(norm.running_var.tolist()),
    "item": lambda norm: torch.tensor(norm.running_mean[0].item()),
    "data": lambda norm: torch.tensor(norm.running_mean.data.numpy().copy()),
    "state_dict": lambda norm: list(copy.deepcopy(norm.state_dict()).values()),
    "deepcopy": lambda norm: list(copy.deepcopy(norm).buffers()),
    "save": lambda norm: list(reloaded(norm).values()),
    "storage": lambda norm: torch.tensor([]).double().set_(norm.running_mean.untyped_storage()),
    "repr": lambda norm: repr(norm.running_mean),
    "evaluation": lambda norm: norm.eval()(torch.ones(3, 4, dtype=DOUBLE)),
    "write": lambda norm: norm.running_mean.mul_(2).clone(),
    "reset": lambda norm: norm.reset_running_stats(),
    "filled": lambda norm: norm.running_mean.data.fill_(3).clone(),
    "replaced": lambda norm: setattr(norm.running_mean, "data", torch.ones(4, dtype=DOUBLE)),
    "one_hot of them": lambda norm: F.one_hot(norm.running_mean.abs().long() % 4, 4),
}


def reloaded(norm: nn.Module) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@pytest.mark.parametrize("name", READS)
def test_who_reads_statistics_in_the_block_gets_them(name: str) -> None:
    def program(batch: Batch) -> Any:
        net = model()
        results: list[Any] = []
        with batch():
            for x in [rand(4, 3) for _ in range(3)]:
                y = net(x)
                results += [y, READS[name](net[1])]
                net.train()
        results = [list(r) if isinstance(r, tuple) else r for r in results]
        return [results, list(net.buffers())]

    assert_as_eager(program)


def test_evaluation_before_training_reads_the_old_statistics() -> None:
    def program(batch: Batch) -> Any:
        net = model()
        x = rand(4, 3)
        with batch():
            before = net.eval()(x)
            during = net.train()(x)
            after = net.eval()(x)
        return before, during, after, list(net.buffers())

    assert_as_eager(program)


def test_an_error_keeps_what_eager_had_done_by_then() -> None:
    def program(batch: Batch) -> Any:
        net = model()
        with contextlib.suppress(ZeroDivisionError), batch():
            for i, x in enumerate([rand(4, 3) for _ in range(3)]):
                net(x)
                if i == 1:
                    raise ZeroDivisionError
        return list(net.buffers())

    assert_as_eager(program)


def test_no_statistics_of_one_value() -> None:
    """Eager's error is raised at this line, and the block continues."""
    net = model()
    with ab.batch():
        with pytest.raises(ValueError, match="more than 1 value"):
            net(rand(1, 3))
        result = net(rand(4, 3))
    assert result.shape == (4, 4)


def test_a_read_of_a_value_leaves_statistics_waiting() -> None:
    def program(batch: Batch) -> Any:
        net = model()
        read = []
        with batch():
            for x in [rand(4, 3) for _ in range(4)]:
                read.append(net(x).sum().item())
        return read, list(net.buffers())

    assert_as_eager(program)


def test_in_a_map() -> None:
    net, other = model(), model()
    instances = [rand(4, 3) for _ in range(5)]

    def instance(x: Tensor) -> Tensor:
        return net(x).sum()

    results = ab.map(instance, instances)
    torch.testing.assert_close(list(results), [other(x).sum() for x in instances])
    torch.testing.assert_close(list(net.buffers()), list(other.buffers()))


def test_other_types_of_input() -> None:
    """The statistics of a half-precision input are in float."""

    def program(batch: Batch) -> Any:
        torch.manual_seed(0)
        linear, norm = nn.Linear(3, 4).bfloat16(), nn.BatchNorm1d(4)
        with batch():
            results = [norm(linear(torch.randn(8, 3).bfloat16())).float() for _ in range(3)]
        return results, list(norm.buffers())

    assert_as_eager(program, tolerance=2e-2)
