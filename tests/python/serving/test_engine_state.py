"""Weights that change, seeds, statistics."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from serving import Walker, assert_same, expected
from torch import Tensor, nn


def scaled(model: nn.Module, factor: float) -> dict[str, Any]:
    return {name: factor * value for name, value in model.state_dict().items()}


class Chain(nn.Module):
    """Reads a value at each step. Signals in the middle, and waits there for permission."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.half_way, self.go_on = threading.Event(), threading.Event()
        self.starts = 0

    def forward(self, x: Tensor, stops: bool = False) -> Tensor:
        self.starts += 1
        for i in range(10):
            x = self.layer(x).tanh()
            if x.sum() > 1e9:
                break
            if i == 5 and stops:
                self.half_way.set()
                assert self.go_on.wait(10)
        return x


@pytest.mark.parametrize("in_flight", ["finish", "restart"])
def test_update_is_seen_as_a_whole(in_flight: Any) -> None:
    model, x = Chain().eval(), torch.randn(4)
    old = expected(model, x)
    weights = scaled(model, 2)
    with ab.Engine(model) as engine:
        running = engine.submit(x, True)
        assert model.half_way.wait(10)
        updated = engine.update(weights, in_flight=in_flight)
        after = engine.submit(x)
        model.go_on.set()
        updated.result(10)
        new = expected(model, x)
        assert_same(after.result(10), new)
        assert_same(running.result(10), old if in_flight == "finish" else new)
    assert not torch.allclose(old, new)


def test_update_that_does_not_fit() -> None:
    model = nn.Linear(3, 3).eval()
    with ab.Engine(model) as engine:
        with pytest.raises(RuntimeError, match="size mismatch"):
            engine.update({"weight": torch.ones(2, 2)}, strict=False).result(10)
        assert_same(engine.submit(torch.ones(3)).result(10), expected(model, torch.ones(3)))


def test_update_waits_for_a_reader_without_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose reader takes nothing holds up the update. The thread sleeps meanwhile."""
    model = nn.Linear(3, 3).eval()

    def states(x: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            x = model(x)
            yield x

    x = torch.ones(3)
    with ab.Engine(states) as engine, engine.stream(x, buffer=1) as stream:
        loop, slept = engine._loop, threading.Event()
        wait = loop.news.wait

        def note(timeout: float | None) -> bool:
            if loop.between:
                slept.set()
            return wait(timeout)

        monkeypatch.setattr(loop.news, "wait", note)
        old = expected(lambda: list(states(x)))
        items = [next(stream)]
        updated = engine.update(scaled(model, 2))
        after = engine.submit(x)
        assert slept.wait(10)
        assert not updated.done()
        items += stream
        updated.result(10)
        assert_same(items, old)
        assert_same(after.result(10), expected(lambda: list(states(x))))


def test_update_that_is_cancelled() -> None:
    model = Chain().eval()
    with ab.Engine(model) as engine:
        running = engine.submit(torch.ones(4), True)
        assert model.half_way.wait(10)
        updated = engine.update(scaled(model, 2))
        assert updated.cancel()
        model.go_on.set()
        running.result(10)
        engine.between(lambda: None).result(10)
        old = expected(model, torch.ones(4))
        assert_same(engine.submit(torch.ones(4)).result(10), old)
        assert_same(running.result(10), old)


def test_update_of_an_engine_that_fails() -> None:
    """An error of the thread itself ends all futures."""
    model = Chain().eval()
    engine = ab.Engine(model)
    running = engine.submit(torch.ones(4), True)
    assert model.half_way.wait(10)
    updated = engine.update(scaled(model, 2))

    def fail() -> None:
        raise MemoryError("no memory")

    engine._loop.post(fail)
    model.go_on.set()
    for future in (running, updated):
        with pytest.raises(MemoryError, match="no memory"):
            future.result(10)
    with pytest.raises(RuntimeError, match="was shut down"):
        engine.between(lambda: None)
    engine.shutdown()


def test_update_needs_to_know_the_module() -> None:
    one, other = nn.Linear(3, 3).eval(), nn.Linear(3, 3).eval()
    with ab.Engine(lambda x: one(other(x))) as engine:
        with pytest.raises(ValueError, match="2 modules"):
            engine.update(one.state_dict())
        engine.update(one.state_dict(), other).result(10)
        assert_same(engine.submit(torch.ones(3)).result(10), expected(one, one(torch.ones(3))))


def test_seeds() -> None:
    model = Walker().eval()

    def sample(first: int, most: int) -> list[int]:
        generator = ab.generator()
        h, symbol, seen = torch.zeros(1, 16), first, []
        for _ in range(most):
            h = model.cell(model.symbols(torch.tensor([symbol])), h)
            p = model.out(h).softmax(-1)
            symbol = int(torch.multinomial(p[0], 1, generator=generator))
            seen.append(symbol)
        return seen

    with ab.Engine(sample) as engine:
        alone = engine.submit(1, 12, seed=7).result(10)
        crowd = [engine.submit(i % 11, 15, seed=i) for i in range(20)]
        again = engine.submit(1, 12, seed=7).result(10)
        others = {tuple(engine.submit(1, 12).result(10)) for _ in range(3)}
        for future in crowd:
            future.result(10)
    assert alone == again
    assert len(others) == 3


def test_generator_outside() -> None:
    with pytest.raises(RuntimeError, match="works only in a function that an ab"):
        ab.generator()


def test_stats() -> None:
    with ab.Engine(Walker().eval(), name="walker") as engine:
        for i in range(10):
            engine.submit(i % 11, 5).result(10)
        stats = engine.stats()
    assert stats["name"] == "walker"
    assert stats["submitted"] == stats["finished"] == 10
    assert stats["live"] == stats["queued"] == 0
    latency = stats["latency"]
    assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["max"]
    assert sum(stats["time_share"].values()) == pytest.approx(1, abs=0.05)
    assert stats["batch_width"]["aten::gru_cell"] == 1


def test_prometheus() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    with ab.Engine(Walker().eval(), name="walker") as engine:
        registry.register(engine.collector())
        engine.submit(1, 5).result(10)
        text = client.generate_latest(registry).decode()
    assert 'autobatch_requests_total{engine="walker",outcome="finished"} 1.0' in text
    assert 'autobatch_latency_seconds{engine="walker",quantile="0.99"}' in text


def test_max_delay_waits_for_company() -> None:
    widths: list[int] = []

    def run(x: Tensor) -> Tensor:
        widths.append(engine._loop.num_live)
        return x * 2

    with ab.Engine(run, max_delay=5.0, max_live=3) as engine:
        futures = [engine.submit(torch.ones(2)) for _ in range(3)]  # enough to begin
        for future in futures:
            future.result(4)
    assert widths == [1, 2, 3]
