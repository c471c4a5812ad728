"""Greenlets that instances create, and objects whose destructors read values."""

from __future__ import annotations

import contextvars
import gc
from typing import Any

import greenlet
import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

DOUBLE = torch.float64


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 3, dtype=DOUBLE)


def start(i: int) -> Tensor:
    return torch.full((3,), float(i), dtype=DOUBLE)


@pytest.mark.parametrize("reads", [False, True])
def test_a_greenlet_that_is_dropped(layer: nn.Linear, reads: bool) -> None:
    """The `finally` of the greenlet runs when the instance drops the greenlet, and not later."""

    def function(i: int) -> list[Any]:
        log: list[Any] = []
        h = layer(start(i))
        main = greenlet.getcurrent()

        def producer() -> None:
            try:
                main.switch(layer(h).sum().item())
            finally:
                log.append(round((layer(h) * 3).sum().item(), 9) if reads else "closed")

        h.sum().item()
        own = greenlet.greenlet(producer)
        own.switch()
        del own
        log.append("after")
        layer(h * 2).sum().item()
        return log

    assert ab.map(function, range(5)) == [function(i) for i in range(5)]


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_greenlets_in_greenlets(layer: nn.Linear, depth: int) -> None:
    def function(i: int) -> list[float]:
        log: list[float] = []
        h = layer(start(i))

        def nest(level: int) -> None:
            if level == 0:
                log.extend((h * k).sum().item() for k in range(3))
                return
            main = greenlet.getcurrent()

            def body() -> None:
                nest(level - 1)
                main.switch()

            own = greenlet.greenlet(body)
            own.switch()
            log.append((h * 3 + len(log)).sum().item())
            own.switch()

        nest(depth)
        return log

    for found, i in zip(ab.map(function, range(4)), range(4), strict=True):
        assert found == pytest.approx(function(i), abs=1e-12)


def test_a_map_that_is_left_and_entered_again(layer: nn.Linear) -> None:
    """A greenlet runs the map, and its stack is elsewhere while an instance continues."""

    def function(i: int) -> list[float]:
        h = layer(start(i))
        main = greenlet.getcurrent()
        left: list[greenlet.greenlet] = []

        def inner(j: int) -> float:
            value = (h * (j + 1)).sum().item()
            if j == 1:
                left.append(greenlet.getcurrent())
                main.switch()
                value += (h * 7).sum().item()
            return value

        log: list[float] = []
        own = greenlet.greenlet(lambda: log.extend(ab.map(inner, range(3))))
        own.switch()
        found = (h * 2).sum().item()
        left[0].switch()
        return [*log, found]

    for found, i in zip(ab.map(function, range(4)), range(4), strict=True):
        assert found == pytest.approx(function(i), abs=1e-12)


class ReadsAtLast:
    """Reads a tensor when the object is freed, and records the value."""

    def __init__(self, i: int, log: list[tuple[int, float, bool]]) -> None:
        self.i = i
        self.log = log
        self.tensor: Tensor | None = None

    def __del__(self) -> None:
        assert self.tensor is not None
        self.log.append((self.i, round(self.tensor.sum().item(), 9), torch.is_grad_enabled()))


def test_an_instance_that_reads_when_it_is_freed(layer: nn.Linear) -> None:
    log: list[tuple[int, float, bool]] = []

    def function(instance: ReadsAtLast) -> int:
        instance.tensor = layer(start(instance.i))
        if instance.i % 3 == 2:
            instance.tensor.sum().item()
        return instance.i

    expected = [function(ReadsAtLast(i, log)) for i in range(6)]
    gc.collect()
    wanted = sorted(log)
    log.clear()
    found = ab.map(function, (ReadsAtLast(i, log) for i in range(6)))
    gc.collect()
    assert found == expected
    assert sorted(log) == wanted


def test_what_a_context_holds_dies_with_its_instance(layer: nn.Linear) -> None:
    """This also holds if destruction reads a value, and while other instances continue."""
    variable: contextvars.ContextVar[ReadsAtLast] = contextvars.ContextVar("variable")
    log: list[tuple[int, float, bool]] = []
    alive: list[int] = []

    def function(i: int) -> float:
        h = layer(start(i))
        value = ReadsAtLast(i, log)
        value.tensor = layer(h)
        variable.set(value)
        del value
        for _ in range(8 if i == 0 else 1 + i % 2):
            h = layer(h)
            h.sum().item()
        alive.append(len(log))
        return h.sum().item()

    found = ab.map(function, range(5))
    assert alive[-1] == 4  # instance 0 ends last
    gc.collect()
    assert [i for i, _, _ in sorted(log)] == list(range(5))
    for i, value in enumerate(found):
        h = layer(start(i))
        assert sorted(log)[i][1] == pytest.approx(layer(h).sum().item(), abs=1e-8)
        for _ in range(8 if i == 0 else 1 + i % 2):
            h = layer(h)
        assert value == pytest.approx(h.sum().item(), abs=1e-12)
