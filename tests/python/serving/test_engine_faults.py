"""An error in a request ends only that request, and its caller gets the original exception."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import itertools
import logging
import os
import random
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from serving import TreeNet, Walker, assert_same, expected, forever, tree
from torch import Tensor, nn
from torch_autobatch._engine_loop import Loop, Options
from torch_autobatch._engine_request import _TOLD, Request
from torch_autobatch._engine_watch import Watchdog
from torch_autobatch._log import logger


def test_exception_of_one() -> None:
    model = Walker().eval()

    def run(first: int, most: int) -> Any:
        if most == 7:
            raise KeyError("seven")
        return model(first, most)

    with ab.Engine(run) as engine:
        futures = [engine.submit(1, most) for most in range(1, 12)]
        for most, future in enumerate(futures, 1):
            if most == 7:
                with pytest.raises(KeyError, match="seven"):
                    future.result(10)
            else:
                assert_same(future.result(10), expected(model, 1, most))
        stats = engine.stats()
    assert (stats["finished"], stats["failed"]) == (10, 1)


def test_wrong_shape_fails_at_the_users_line() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()
    with ab.Engine(model) as engine:
        good, bad = engine.submit(torch.ones(4)), engine.submit(torch.ones(5))
        with pytest.raises(RuntimeError, match="shape"):
            bad.result(10)
        assert_same(good.result(10), expected(model, torch.ones(4)))


@pytest.mark.parametrize("depth", [0, 1, 40])
def test_error_of_autograds_engine(depth: int) -> None:
    """The error walks the C++ stack, which ends at the outermost frame of the request."""
    layer = nn.Linear(3, 3)

    def run(x: Tensor, level: int = depth) -> Any:
        if level:
            return next(map(run, [x], [level - 1]))
        return torch.autograd.grad(layer(x).sum(), layer.weight)

    with ab.Engine(run) as engine:
        futures = [engine.submit(torch.ones(n, 3)) for n in range(1, 9)]
        for future in futures:
            with pytest.raises(RuntimeError, match="does not require grad"):
                future.result(10)


def test_error_of_an_op_that_runs_later() -> None:
    """An index out of range raises its error when the batch runs, which other requests share."""
    model, rng = TreeNet().eval(), random.Random(4)
    trees = [tree(rng, rng.randint(2, 12)) for _ in range(40)]
    trees[13] = ((1, 999), 2)
    with ab.Engine(model) as engine:
        futures = [engine.submit(one) for one in trees]
        for i, (one, future) in enumerate(zip(trees, futures, strict=True)):
            if i == 13:
                with pytest.raises(IndexError, match="out of range"):
                    future.result(10)
            else:
                assert_same(future.result(10), expected(model, one))


def test_error_of_an_op_in_a_loop_of_reads() -> None:
    table, layer = nn.Embedding(10, 4).eval(), nn.Linear(4, 4).eval()

    def walk(index: int, steps: int) -> Tensor:
        h = torch.zeros(4)
        for _ in range(steps):
            h = layer(h + table(torch.tensor(index))).tanh()
            if h.sum() > 1e9:
                break
        return h

    with ab.Engine(walk) as engine:
        futures = [engine.submit(77 if i == 5 else i % 10, 20) for i in range(20)]
        for i, future in enumerate(futures):
            if i == 5:
                with pytest.raises(IndexError):
                    future.result(10)
            else:
                assert_same(future.result(10), expected(walk, i % 10, 20))


def test_timeout_of_one_that_runs() -> None:
    with ab.Engine(forever) as engine:
        future = engine.submit(torch.ones(3), timeout=0.1)
        with pytest.raises(TimeoutError, match=r"timed out after .* running"):
            future.result(10)
        assert engine.stats()["timed_out"] == 1


def test_timeout_of_one_that_waits() -> None:
    with ab.Engine(forever, max_live=1) as engine:
        running = engine.submit(torch.ones(3))
        waiting = engine.submit(torch.ones(3), timeout=0.05)
        with pytest.raises(TimeoutError, match="waiting to start"):
            waiting.result(10)
        assert running.cancel()


def test_cancel_of_one_that_runs() -> None:
    ended = threading.Event()

    def run(x: Tensor) -> Tensor:
        try:
            return forever(x)
        finally:
            ended.set()

    with ab.Engine(run) as engine:
        future = engine.submit(torch.ones(3))
        engine.stats()  # waits for the engine's thread
        assert future.cancel()
        assert ended.wait(10)
        concurrent.futures.wait([future], timeout=10)
        assert future.cancelled()
        assert engine.stats()["cancelled"] == 1
        assert engine.stats()["live"] == 0


def test_cancel_of_a_task() -> None:
    async def main(engine: ab.Engine[Any]) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine(torch.ones(3)), timeout=0.05)

    with ab.Engine(forever) as engine:
        asyncio.run(main(engine))
        for _ in range(100):
            if engine.stats()["cancelled"] == 1:
                break
            time.sleep(0.05)
        assert engine.stats()["cancelled"] == 1


def test_cancel_of_a_task_that_waits_for_an_item() -> None:
    def items(ends: bool) -> Iterator[Any]:
        yield 1 if ends else forever(torch.ones(3))

    async def read(engine: ab.Engine[Any]) -> None:
        async for _ in engine.stream(False):
            pass

    async def main(engine: ab.Engine[Any]) -> None:
        task = asyncio.create_task(read(engine))
        await asyncio.sleep(0)  # the task now waits for the first item
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with ab.Engine(items) as engine:
        asyncio.run(main(engine))
        assert engine.submit(True).result(10) == [1]
        assert engine.stats()["cancelled"] == 1


def test_reader_that_goes_away() -> None:
    def count() -> Iterator[int]:
        yield from itertools.count()

    with ab.Engine(count) as engine:
        for item in engine.stream(buffer=4):
            if item == 10:
                break
        gc.collect()
        for _ in range(100):
            if engine.stats()["cancelled"] == 1:
                break
            time.sleep(0.05)
        assert engine.stats()["live"] == 0


def test_code_that_catches_what_ends_it() -> None:
    def stubborn(x: Tensor) -> Any:
        try:
            return forever(x)
        except BaseException:
            return "late"

    with ab.Engine(stubborn) as engine:
        future = engine.submit(torch.ones(3), timeout=0.05)
        with pytest.raises(TimeoutError):
            future.result(10)
        assert engine.stats()["live"] == 0


def test_queue_full_is_told_at_once() -> None:
    with ab.Engine(forever, max_live=1, max_queue=2) as engine:
        futures = [engine.submit(torch.ones(3))]
        engine.stats()  # the request has been started
        futures += [engine.submit(torch.ones(3)) for _ in range(2)]
        with pytest.raises(ab.QueueFull, match="max_queue=2") as caught:
            engine.submit(torch.ones(3))
        assert (caught.value.queued, caught.value.limit) == (2, 2)
        assert caught.value.retry_after > 0
        assert engine.stats()["rejected"] == 1
        futures[1].cancel()
        engine.stats()
        futures.append(engine.submit(torch.ones(3)))  # its place is free
        engine.shutdown(cancel=True)
    assert all(future.cancelled() for future in futures)


def test_costs() -> None:
    seen: list[int] = []

    def run(size: int) -> int:
        x = torch.ones(3) * size
        seen.append(engine._loop.num_live)
        return int(x.sum())

    with ab.Engine(run, max_live=10, max_queue=20, cost=lambda size: size) as engine:
        futures = [engine.submit(6) for _ in range(3)]
        assert [future.result(10) for future in futures] == [18, 18, 18]
        assert max(seen) == 1  # 6 + 6 is more than 10
        assert engine.submit(50).result(10) == 150  # allowed as the only request


def test_priority() -> None:
    order: list[str] = []
    started, gate = threading.Event(), threading.Event()

    def run(name: str) -> None:
        if name == "first":
            started.set()
            assert gate.wait(10)
        order.append(name)

    with ab.Engine(run, max_live=1) as engine:
        futures = [engine.submit("first")]
        assert started.wait(10)
        futures += [engine.submit(f"low {i}", priority=-1) for i in range(3)]
        futures += [engine.submit(f"high {i}", priority=1) for i in range(3)]
        gate.set()
        concurrent.futures.wait(futures, timeout=10)
    assert order == ["first", "high 0", "high 1", "high 2", "low 0", "low 1", "low 2"]


def test_shutdown_drains() -> None:
    model = Walker().eval()
    engine = ab.Engine(model, max_live=4)
    futures = [engine.submit(i % 11, 10) for i in range(40)]
    engine.shutdown()
    for i, future in enumerate(futures):
        assert_same(future.result(0), expected(model, i % 11, 10))
    with pytest.raises(RuntimeError, match="shut down"):
        engine.submit(1, 1)


def test_shutdown_that_cancels() -> None:
    engine = ab.Engine(forever, max_live=4)
    futures = [engine.submit(torch.ones(3)) for _ in range(20)]
    engine.shutdown(cancel=True)
    assert all(future.cancelled() for future in futures)


def test_exit_by_ctrl_c_cancels() -> None:
    futures: list[Any] = []

    def interrupted() -> None:
        with ab.Engine(forever) as engine:
            futures.append(engine.submit(torch.ones(3)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert futures[0].cancelled()


def test_watchdog_names_what_blocks(caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()

    def waits(_: int) -> None:
        release.wait(30)

    caplog.set_level(logging.WARNING, "torch_autobatch")
    with ab.Engine(waits, watchdog=0.05) as engine:
        future = engine.submit(1)
        for _ in range(200):
            if caplog.records:
                break
            time.sleep(0.02)
        release.set()
        future.result(10)
        assert engine.stats()["stalls"] >= 1
    text = caplog.text
    assert "has blocked all others" in text
    assert "release.wait(30)" in text


class Warned(logging.Handler):
    """Sets an event at the first record."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


def test_watchdog_sees_the_first_request() -> None:
    """The request blocks the thread before the thread has waited for news once."""
    release, warned = threading.Event(), Warned()
    options = Options(
        max_live=1, max_queue=1, max_delay=0, grad=False, granularity="auto", slice_time=0.001
    )
    loop = Loop(lambda: release.wait(30), False, options)
    loop.queue.put(Request((), None, 0, 1, None))
    loop.closing = True  # the thread ends after the request
    thread = threading.Thread(target=loop.run, name="first", daemon=True)
    logger.addHandler(warned)
    thread.start()
    watchdog = Watchdog(loop, thread, 0.05)
    try:
        assert warned.event.wait(10)
    finally:
        release.set()
        watchdog.stop()
        thread.join(10)
        logger.removeHandler(warned)


def test_watchdog_ends_with_the_thread() -> None:
    engine = ab.Engine(lambda x: x, watchdog=0.05)
    engine.shutdown(wait=False)
    watchdog = engine._watchdog
    assert watchdog is not None
    watchdog._thread.join(10)
    assert not watchdog._thread.is_alive()


def test_stream_that_is_collected_under_the_lock() -> None:
    """Python may collect garbage, such as a stream, in the middle of ``submit``."""

    def count() -> Iterator[int]:
        yield from itertools.count()

    engine = ab.Engine(count)
    streams = [engine.stream(buffer=1)]
    collected = threading.Event()

    def collect() -> None:
        with engine._loop.lock:
            streams.clear()
        collected.set()

    threading.Thread(target=collect, daemon=True).start()
    assert collected.wait(10)
    engine.shutdown()
    assert engine.stats()["cancelled"] == 1


def test_nothing_of_a_request_stays() -> None:
    model = TreeNet().eval()
    with ab.Engine(model) as engine:
        result: Any = engine.submit(((1, 2), 3), timeout=1000)
        kept = weakref.ref(result.result(10))
        engine.between(lambda: None).result(10)
        del result
        gc.collect()
        assert kept() is None


def test_no_callbacks_stay() -> None:
    """A request may end before ``submit`` returns."""
    with ab.Engine(lambda x: x) as engine:
        for i in range(1000):
            engine.submit(i)
    assert not _TOLD._done_callbacks  # type: ignore[attr-defined]


def test_fork() -> None:
    with ab.Engine(TreeNet().eval()) as engine:
        engine.submit((1, 2)).result(10)
        child = os.fork()
        if child == 0:
            try:
                engine.submit((1, 2))
            except RuntimeError as error:
                os._exit(0 if "another process" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_map_waits_for_room_and_raises_the_first_error() -> None:
    def run(i: int) -> int:
        x = torch.ones(2) * i
        if i in (5, 9):
            raise ValueError(f"no {i}")
        return int(x.sum())

    with ab.Engine(run, max_live=2, max_queue=3) as engine:
        with pytest.raises(ValueError, match="no 5"):
            engine.map(range(12))
        results = engine.map(range(12), return_exceptions=True)
    assert [str(r) if isinstance(r, ValueError) else r for r in results] == [
        f"no {i}" if i in (5, 9) else 2 * i for i in range(12)
    ]
