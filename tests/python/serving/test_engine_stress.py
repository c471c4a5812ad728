"""Many requests of all kinds at the same time. Some fail, are cancelled, or time out."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from serving import LAYER, TreeNet, Walker, assert_same, expected, forever, tree


class Model:
    """A tree without reads, a loop of reads, or a request that fails."""

    def __init__(self) -> None:
        self.trees, self.walker = TreeNet().eval(), Walker().eval()

    def __call__(self, kind: str, *args: Any) -> Any:
        if kind == "tree":
            return self.trees(*args)
        if kind == "walk":
            return self.walker(*args)
        if kind == "raises":
            raise KeyError(args[0])
        if kind == "wrong shape":
            return LAYER(torch.ones(5))
        if kind == "out of range":
            return self.trees((999, (1, 2)))
        return forever(torch.ones(3))


ERRORS = {"raises": KeyError, "wrong shape": RuntimeError, "out of range": IndexError}


def requests(count: int, seed: int) -> list[tuple[Any, ...]]:
    """Of each hundred requests, one fails, one times out, and one is cancelled."""
    rng = random.Random(seed)
    made: list[tuple[Any, ...]] = []
    for i in range(count):
        draw = rng.random()
        if draw < 0.01:
            made.append((rng.choice(list(ERRORS)), i))
        elif draw < 0.02:
            made.append(("late",))
        elif draw < 0.03:
            made.append(("cancelled",))
        elif draw < 0.5:
            made.append(("walk", rng.randrange(11), rng.randint(1, 12)))
        else:
            made.append(("tree", tree(rng, rng.randint(1, 16))))
    return made


class Clients:
    """Submits requests from threads and from an event loop, and checks each outcome."""

    def __init__(self, engine: ab.Engine[Any], model: Model) -> None:
        self.engine = engine
        self.seen: Counter[str] = Counter()
        self.wrong: list[Any] = []
        self._model = model
        self._lock = threading.Lock()

    def submit(self, request: tuple[Any, ...]) -> Future[Any]:
        timeout = 0.05 if request[0] == "late" else 300
        while True:
            try:
                return self.engine.submit(*request, timeout=timeout)
            except ab.QueueFull as full:
                threading.Event().wait(min(full.retry_after, 0.01))

    def check(self, request: tuple[Any, ...], future: Future[Any]) -> None:
        try:
            outcome: Any = future.result(300)
        except BaseException as error:
            outcome = error
        self.note(request, outcome)

    def note(self, request: tuple[Any, ...], outcome: Any) -> None:
        kind = request[0]
        try:
            if kind == "late":
                assert isinstance(outcome, TimeoutError)
            elif kind == "cancelled":
                assert isinstance(outcome, (CancelledError, asyncio.CancelledError))
            elif kind in ERRORS:
                assert type(outcome) is ERRORS[kind], outcome
                assert kind != "raises" or outcome.args == (request[1],)
            else:
                assert not isinstance(outcome, BaseException), outcome
                assert_same(outcome, expected(self._model, *request))
        except AssertionError as error:
            self.wrong.append((request, error))
        with self._lock:
            self.seen[kind] += 1

    def thread(self, mine: list[tuple[Any, ...]]) -> None:
        for first in range(0, len(mine), 25):
            some = mine[first : first + 25]
            futures = [self.submit(request) for request in some]
            for request, future in zip(some, futures, strict=True):
                if request[0] == "cancelled":
                    future.cancel()
            for request, future in zip(some, futures, strict=True):
                self.check(request, future)

    async def task(self, mine: list[tuple[Any, ...]]) -> None:
        for request in mine:
            try:
                waiting = asyncio.wrap_future(self.submit(request))
                if request[0] == "cancelled":
                    asyncio.get_running_loop().call_later(0.005, waiting.cancel)
                outcome = await waiting
            except (Exception, asyncio.CancelledError) as error:
                outcome = error
            self.note(request, outcome)

    async def tasks(self, mine: list[tuple[Any, ...]]) -> None:
        await asyncio.gather(*(self.task(mine[i::20]) for i in range(20)))


def run(count: int, threads: int, seed: int = 0) -> None:
    made, model = requests(count, seed), Model()
    with ab.Engine(model, max_live=64, max_queue=128) as engine:
        clients = Clients(engine, model)
        shares = [made[i :: threads + 1] for i in range(threads + 1)]
        workers = [threading.Thread(target=clients.thread, args=(s,)) for s in shares[1:]]
        for worker in workers:
            worker.start()
        asyncio.run(clients.tasks(shares[0]))
        for worker in workers:
            worker.join()
        stats = engine.stats()
    assert not clients.wrong, clients.wrong[0]
    wanted = Counter(request[0] for request in made)
    assert clients.seen == wanted
    assert stats["failed"] == sum(wanted[kind] for kind in ERRORS)
    assert stats["timed_out"] == wanted["late"]
    assert stats["cancelled"] == wanted["cancelled"]
    assert stats["finished"] == wanted["tree"] + wanted["walk"]
    assert stats["live"] == stats["queued"] == 0


def test_mixed_requests() -> None:
    run(2000, threads=8)


@pytest.mark.slow
def test_many_mixed_requests() -> None:
    run(10_000, threads=32, seed=1)
