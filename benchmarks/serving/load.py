"""Creates load: as many requests as a server can handle, or requests at random times."""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from benchmarks.serving.servers import Server


@dataclasses.dataclass(frozen=True)
class Measured:
    offered: float  # requests per second that are sent
    p50: float  # milliseconds
    p90: float
    p99: float


class Recorder:
    """Measures times of requests, from their scheduled submission to their result."""

    def __init__(self) -> None:
        self.latencies: list[float] = []
        self._all = threading.Condition()

    def watch(self, future: Future[Any], due: float) -> None:
        def note(_: Future[Any]) -> None:
            with self._all:
                self.latencies.append(time.perf_counter() - due)
                self._all.notify()

        future.add_done_callback(note)

    def wait_for(self, count: int) -> None:
        with self._all:
            while len(self.latencies) < count:
                self._all.wait()

    def percentile(self, p: int) -> float:
        ordered = sorted(self.latencies)
        return 1e3 * ordered[round((len(ordered) - 1) * p / 100)]


def peak(server: Server, requests: Sequence[Any], live: int) -> float:
    """Returns requests per second, with `live` requests running at all times."""
    recorder = Recorder()
    began = time.perf_counter()
    for i, request in enumerate(requests):
        recorder.wait_for(i - live)
        recorder.watch(server.submit(request), time.perf_counter())
    recorder.wait_for(len(requests))
    return len(requests) / (time.perf_counter() - began)


def open_loop(
    server: Server, requests: Sequence[Any], rate: float, most_seconds: float, seed: int = 0
) -> Measured:
    """Sends requests at Poisson times, without waiting for results."""
    rng, recorder = random.Random(seed), Recorder()
    began = due = time.perf_counter()
    sent = 0
    for request in requests:
        due += rng.expovariate(rate)
        if due - began > most_seconds:
            break
        if (early := due - time.perf_counter()) > 0:
            time.sleep(early)
        recorder.watch(server.submit(request), due)
        sent += 1
    recorder.wait_for(sent)
    return Measured(rate, *(recorder.percentile(p) for p in (50, 90, 99)))
