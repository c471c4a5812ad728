"""Servers. Each has `submit`, which returns a future, and `close`."""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch_autobatch as ab

from benchmarks.serving.workloads import Workload

Job = tuple[Any, "Future[Any]"]


class Server(abc.ABC):
    name: str

    @abc.abstractmethod
    def submit(self, request: Any) -> Future[Any]: ...
    @abc.abstractmethod
    def close(self) -> None: ...


class EngineServer(Server):
    name = "ab.Engine"

    def __init__(self, workload: Workload, live: int) -> None:
        self.engine = ab.Engine(workload.one, max_live=live, max_queue=10**6)

    def submit(self, request: Any) -> Future[Any]:
        return self.engine.submit(request)

    def close(self) -> None:
        self.engine.shutdown(cancel=True)


class Collecting(Server):
    """A thread runs the requests that have arrived, up to a limit, as one call."""

    def __init__(self, run: Callable[[Sequence[Any]], Sequence[Any]], most: int) -> None:
        self._run = run
        self._most = most
        self._jobs: deque[Job] = deque()
        self._news = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def submit(self, request: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._news:
            self._jobs.append((request, future))
            self._news.notify()
        return future

    def take(self) -> list[Job]:
        """Removes and returns the jobs that run next."""
        return [self._jobs.popleft() for _ in range(min(self._most, len(self._jobs)))]

    def _serve(self) -> None:
        with torch.inference_mode():
            while True:
                with self._news:
                    while not self._jobs and not self._closed:
                        self._news.wait()
                    if self._closed:
                        return
                    jobs = self.take()
                results = self._run([request for request, _ in jobs])
                for (_, future), result in zip(jobs, results, strict=True):
                    future.set_result(result)

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join()


class OneByOne(Collecting):
    name = "one by one"

    def __init__(self, workload: Workload, _: int) -> None:
        super().__init__(lambda requests: [workload.one(requests[0])], 1)


class Windows(Collecting):
    """Graph batching, as with DyNet and TensorFlow Fold: `ab.map` over the waiting requests."""

    name = "ab.map over windows"

    def __init__(self, workload: Workload, most: int) -> None:
        super().__init__(lambda requests: ab.map(workload.one, requests), most)


class Padded(Collecting):
    """Pads requests of similar length. Runs the bucket that contains the oldest request."""

    name = "padded buckets"
    width = 10

    def __init__(self, workload: Workload, most: int) -> None:
        assert workload.padded is not None
        self._size = workload.size
        super().__init__(workload.padded, most)

    def take(self) -> list[Job]:
        bucket = self._size(self._jobs[0][0]) // self.width
        taken = [j for j in self._jobs if self._size(j[0]) // self.width == bucket][: self._most]
        ids = {id(job) for job in taken}
        self._jobs = deque(job for job in self._jobs if id(job) not in ids)
        return taken


SERVERS: dict[str, type[Any]] = {
    "engine": EngineServer,
    "one": OneByOne,
    "windows": Windows,
    "padded": Padded,
}
