"""Tests that no request is lost or mixed up: ``python -m benchmarks.serving --check 100000``.

Of a hundred requests, one fails, one times out and one is cancelled. The others are trees,
sentences and generations of any length. Threads and an event loop submit them concurrently. Every
result is compared with eager mode, the ends of all requests are counted, and memory is measured.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor, nn

from benchmarks.serving.workloads import WORKLOADS, Workload

HIDDEN = 32
KINDS = ("lstm", "tree_lstm", "generate")
KEPT = 300  # number of different requests of each kind; their eager results are kept
THREADS = 32
LIMIT = 300.0  # seconds after which a request counts as lost


class MistakeError(Exception):
    """The error of a request, with its number."""


@dataclasses.dataclass
class Request:
    number: int
    kind: str
    argument: Any = None
    expected: Any = None
    answers: int = 0  # must be 1 when the check ends


class Server(nn.Module):
    """The code for one request of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.workloads: dict[str, Workload] = {name: WORKLOADS[name](HIDDEN) for name in KINDS}
        self.loop = nn.Linear(3, 3)
        self.words = nn.Embedding(4, 3)

    def forward(self, kind: str, argument: Any) -> Any:
        if kind == "raises":
            raise MistakeError(argument)
        if kind == "fails in a batch":
            return self.words(torch.tensor([9]))
        if kind in ("late", "cancelled"):
            x = torch.ones(3)
            while True:  # reads a value at each step; ends only by its time-out
                x = self.loop(x).tanh()
                if x.sum() > 1e9:
                    return x
        return self.workloads[kind].one(argument)


def make_requests(server: Server, count: int) -> list[Request]:
    rng = random.Random(0)
    known = []
    with torch.inference_mode():
        for kind in KINDS:
            for _ in range(KEPT):
                argument = server.workloads[kind].request(rng)
                known.append((kind, argument, server(kind, argument)))
    made = []
    for number in range(count):
        draw = rng.random()
        if draw < 0.01:
            made.append(Request(number, rng.choice(["raises", "fails in a batch"]), number))
        elif draw < 0.02:
            made.append(Request(number, "late"))
        elif draw < 0.03:
            made.append(Request(number, "cancelled"))
        else:
            made.append(Request(number, *rng.choice(known)))
    return made


def is_same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    return bool(found == expected)


def is_right(request: Request, outcome: Any) -> bool:
    """Returns whether ``outcome`` (the result or the exception) is right."""
    if request.kind == "raises":
        return isinstance(outcome, MistakeError) and outcome.args == (request.number,)
    if request.kind == "fails in a batch":
        return isinstance(outcome, IndexError)
    if request.kind == "late":
        return isinstance(outcome, TimeoutError) and "timed out after" in str(outcome)
    if request.kind == "cancelled":
        return isinstance(outcome, (CancelledError, asyncio.CancelledError))
    return not isinstance(outcome, BaseException) and is_same(outcome, request.expected)


class Clients:
    def __init__(self, engine: ab.Engine[Any]) -> None:
        self.engine = engine
        self.wrong: list[tuple[Request, Any]] = []
        self.refusals: list[float] = []  # duration of each refused submission, in seconds

    def submit(self, request: Request) -> Future[Any]:
        timeout = 0.05 if request.kind == "late" else LIMIT
        while True:
            began = time.perf_counter()
            try:
                future = self.engine.submit(request.kind, request.argument, timeout=timeout)
            except ab.QueueFull as full:
                self.refusals.append(time.perf_counter() - began)
                time.sleep(min(full.retry_after, 0.01))
            else:
                future.add_done_callback(lambda _: self._count(request))
                return future

    def _count(self, request: Request) -> None:
        request.answers += 1

    def check(self, request: Request, outcome: Any) -> None:
        if not is_right(request, outcome):
            self.wrong.append((request, outcome))

    def thread(self, mine: list[Request]) -> None:
        for first in range(0, len(mine), 16):
            sent = [(request, self.submit(request)) for request in mine[first : first + 16]]
            for request, future in sent:
                if request.kind == "cancelled":
                    future.cancel()
            for request, future in sent:
                try:
                    outcome: Any = future.result(LIMIT)
                except BaseException as error:
                    outcome = error
                self.check(request, outcome)

    async def task(self, mine: Iterable[Request]) -> None:
        for request in mine:
            waiting = asyncio.wrap_future(self.submit(request))
            if request.kind == "cancelled":
                asyncio.get_running_loop().call_later(0.005, waiting.cancel)
            try:
                outcome: Any = await waiting
            except (Exception, asyncio.CancelledError) as error:
                outcome = error
            self.check(request, outcome)

    async def tasks(self, mine: list[Request]) -> None:
        await asyncio.gather(*(self.task(mine[i::16]) for i in range(16)))

    def run(self, requests: list[Request]) -> None:
        shares = [requests[i :: THREADS + 1] for i in range(THREADS + 1)]
        threads = [threading.Thread(target=self.thread, args=(share,)) for share in shares[1:]]
        for thread in threads:
            thread.start()
        asyncio.run(self.tasks(shares[0]))
        for thread in threads:
            thread.join()


def resident() -> float:
    """Returns the resident memory of this process, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def check(count: int) -> bool:
    """Prints the results. Returns False if anything is wrong."""
    torch.manual_seed(0)
    server = Server().eval()
    requests = make_requests(server, count)
    with ab.Engine(server, max_live=128, max_queue=256) as engine:
        clients = Clients(engine)
        parts = 5
        memory = []
        began = time.perf_counter()
        for part in range(parts):
            clients.run(requests[part * count // parts : (part + 1) * count // parts])
            memory.append(resident())
            print(f"{(part + 1) * count // parts} requests: {memory[-1]:.0f} MiB", flush=True)
        seconds = time.perf_counter() - began
        stats = engine.stats()
    answers = Counter(request.answers for request in requests)
    kinds = Counter(request.kind for request in requests)
    print(f"{count / seconds:.0f} requests/s; by kind {dict(kinds)}")
    more = count - answers[0] - answers[1]
    print(f"answered once {answers[1]}, never {answers[0]}, more than once {more}")
    waits = sorted(clients.refusals or [0.0])
    half, most = (1e3 * waits[round(p * (len(waits) - 1))] for p in (0.5, 0.99))
    print(
        f"queue full {len(clients.refusals)} times, answers after {half:.2f} ms, p99 {most:.2f} ms"
    )
    counted = {name: stats[name] for name in ("finished", "failed", "cancelled", "timed_out")}
    print(f"the engine counts {counted}; wrong answers {len(clients.wrong)}")
    for request, outcome in clients.wrong[:5]:
        print(f"  {request.kind} {request.argument!r}: {outcome!r}"[:300])
    grown = memory[-1] - memory[0]
    print(f"memory grew by {grown:.0f} MiB from the first fifth to the last")
    wanted = {
        "finished": sum(kinds[kind] for kind in KINDS),
        "failed": kinds["raises"] + kinds["fails in a batch"],
        "cancelled": kinds["cancelled"],
        "timed_out": kinds["late"],
    }
    return not clients.wrong and answers[1] == count and counted == wanted and grown < 50
