"""The thread of an engine, which starts requests, runs slices and delivers results."""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future
from typing import Any

import torch
from greenlet import GreenletExit

from torch_autobatch import _C
from torch_autobatch._engine_request import Request, RequestQueue, make_real
from torch_autobatch._engine_stats import Stats
from torch_autobatch._fiber_state import register_known
from torch_autobatch._log import logger
from torch_autobatch._module_attributes import watch_modules
from torch_autobatch._report import Report
from torch_autobatch._scope import Granularity, batch

_IDLE = 1.0  # cached memory is freed after this many seconds without requests
# An iteration starts requests for at least the duration of a slice, and until about 1 / _TURNS of
# the waiting requests have started.
_TURNS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of an engine that its loop uses."""

    max_live: float
    max_queue: float
    max_delay: float
    grad: bool
    granularity: Granularity
    slice_time: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome:
    """The outcome of a request, which the future receives after the fiber has been left."""

    request: Request
    result: Any
    error: BaseException | None


class Loop:
    """The loop of an engine's thread.

    Other threads may use only the methods under "from any thread". While they hold ``lock``, they
    may also use ``news``, ``queue``, ``between`` and ``closing``. They may read statistics.
    """

    def __init__(self, function: Callable[..., Any], yields: bool, options: Options) -> None:
        self.options = options
        self.stats = Stats()
        # Reentrant, because Python may collect a stream as garbage while the current thread holds
        # the lock. The stream then cancels its request, which needs the lock.
        self.lock = threading.RLock()
        self.news = threading.Condition(self.lock)
        self.queue = RequestQueue()  # protected by the lock
        # Actions to run while no request is running. Each entry contains the action, whether
        # running requests are restarted for it, and its future. Protected by the lock.
        self.between: deque[tuple[Callable[[], object], bool, Future[None]]] = deque()
        self.closing = False  # if true, no requests are accepted; protected by the lock
        self.failure: BaseException | None = None  # the error that ended the loop
        self.turns = 0  # number of iterations of the loop, for the watchdog
        self.is_idle = False
        self.report = Report()  # the report that the last `take_report` made
        self._posts: deque[Callable[[], object]] = deque()
        self._function = function
        self._yields = yields
        self._live: dict[int, Request] = {}  # maps the number of a running request to the request
        self._live_cost = 0.0
        self._start_time = 0.0  # mean seconds from a request's start until it waits or ends
        self._outcomes: list[_Outcome] = []
        self._server: _C.Server
        self._scope: batch

    # --- from any thread ---

    def post(self, action: Callable[[], object]) -> None:
        """Makes the engine's thread call ``action`` between two slices."""
        self._posts.append(action)
        with self.lock:
            self.news.notify_all()

    def note_cancelled(self, request: Request) -> None:
        self.post(lambda: self._end(request, CancelledError()))

    # --- the thread ---

    def run(self) -> None:
        try:
            with torch.inference_mode(not self.options.grad):
                register_known()
                self._scope = batch(
                    adaptive=False,
                    defer_checks=False,
                    granularity=self.options.granularity,
                )
                with self._scope:
                    self._server = _C.Server()
                    while self._turn():
                        pass
                    del self._server
        except BaseException as error:
            logger.exception(
                "the thread of an ab.Engine raised an exception; all its requests fail with this "
                "exception"
            )
            self.failure = error
            self._fail_all(error)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def live(self) -> list[Request]:
        return list(self._live.values())

    def _turn(self) -> bool:
        """Runs one iteration. Returns false when the engine is closed and no request is left."""
        self.turns += 1
        while self._posts:
            self._posts.popleft()()
        self._end_late()
        if self.between:
            self._run_between()
        self._admit()
        self._deliver()
        if self._live:
            waits = not self._step()
            self.stats.slices += 1
            self._deliver()
            if waits and self._live:
                self._sleep()  # every request waits for its reader
            return True
        with self.lock:
            if self.closing and not len(self.queue) and not self.between:
                return bool(self._posts)
        self._rest()
        return True

    def _admit(self) -> None:
        """Starts requests for about the duration of a slice, so that running requests continue."""
        began = now = time.monotonic()
        until = began + max(self.options.slice_time, len(self.queue) * self._start_time / _TURNS)
        started = 0
        while now <= until:
            with self.lock:
                if not self._may_start():
                    break
                request = self.queue.take()
            self._start(request)
            started += 1
            now = time.monotonic()
        if started:
            self._start_time += ((now - began) / started - self._start_time) / 8

    def _has_room(self, request: Request) -> bool:
        return not self._live or self._live_cost + request.cost <= self.options.max_live

    def _delays(self) -> bool:
        """Whether the queued requests wait for more requests (``max_delay``) before they start."""
        if self._live or self.options.max_delay <= 0 or self.closing:
            return False
        if self.queue.cost >= self.options.max_live:
            return False
        return time.monotonic() < self.queue.oldest() + self.options.max_delay

    def _start(self, request: Request) -> None:
        request.started = time.monotonic()
        self._live[request.number] = request
        self._live_cost += request.cost
        with watch_modules:
            request.fiber = self._server.start(self._run_request, request)

    def _run_request(self, request: Request) -> None:
        """Runs a request. Called in a separate fiber."""
        request.enter()
        result, error = None, None
        try:
            result = self._function(*request.args)
            if self._yields:
                result = self._run_generator(request, result)
            else:
                make_real(result)
        except GreenletExit:
            return  # the loop has already ended the request
        except BaseException as raised:
            error = raised
        self._outcomes.append(_Outcome(request, result, error))

    def _run_generator(self, request: Request, items: Generator[Any]) -> list[Any] | None:
        channel = request.channel
        if channel is None:
            every = list(items)
            make_real(every)
            return every
        for item in items:
            make_real(item)
            if not channel.put(item):
                _C.wait_in_fiber(request)  # suspends the fiber until the reader takes items
        return None

    def _step(self) -> bool:
        """Runs one slice. Returns false if no request waits for values."""
        with watch_modules:
            return self._server.step(self.options.slice_time)

    # --- the end of requests ---

    def _forget(self, request: Request) -> bool:
        """Removes a request. Returns false if the request has already ended."""
        if request.has_ended:
            return False
        if self._live.pop(request.number, None) is not None:
            self._live_cost = self._live_cost - request.cost if self._live else 0.0
        else:
            with self.lock:
                request.let_go()
                self.queue.leave(request)
        request.let_go()
        return True

    def _deliver(self) -> None:
        if not self._outcomes:
            return
        eager_before = _C.set_eager(True)  # callbacks of futures may run any code
        for outcome in self._outcomes:
            if self._forget(outcome.request):
                self._tell(outcome.request, outcome.result, outcome.error)
        _C.set_eager(eager_before)
        self._outcomes.clear()

    def _tell(self, request: Request, result: Any, error: BaseException | None) -> None:
        self.stats.note_end(request, error)
        request.tell(result, error)

    def _end(self, request: Request, error: BaseException) -> None:
        """Ends a running or waiting request with an error."""
        if request.has_ended:
            return
        started = request.number in self._live
        self._forget(request)
        if started:
            self._server.end(request.fiber)
        self._drop_outcome(request)
        eager_before = _C.set_eager(True)
        self._tell(request, None, error)
        _C.set_eager(eager_before)

    def _drop_outcome(self, request: Request) -> None:
        """Drops the outcome of a request if its code caught the exception that ends the request."""
        self._outcomes = [o for o in self._outcomes if o.request is not request]

    def _end_late(self) -> None:
        now = time.monotonic()
        with self.lock:
            late = self.queue.expired(now)
            self.queue.forget_ended(len(self._live) + len(self.queue))
        for request in late:
            state = "running" if request.number in self._live else "waiting to start"
            after = now - request.submitted
            self._end(
                request,
                TimeoutError(f"request {request.number} timed out after {after:.3g} s, {state}"),
            )

    def end_all(self) -> None:
        """Cancels all requests. Called through ``post``."""
        with self.lock:
            requests = [*self._live.values(), *self.queue.clear()]
        for request in requests:
            self._end(request, CancelledError())

    def _fail_all(self, error: BaseException) -> None:
        with self.lock:
            self.closing = True
            requests = [*self._live.values(), *self.queue.clear()]
        for request in requests:
            request.let_go()
            self._tell(request, None, error)
        for _, _, done in self.between:
            if done.set_running_or_notify_cancel():
                done.set_exception(error)
        self.between.clear()

    # --- between requests ---

    def _run_between(self) -> None:
        """Calls the next action, unless requests are still running."""
        action, restart, done = self.between[0]
        if restart:
            self._restart_live()
        if self._live:
            return
        self._scope.flush()
        self.between.popleft()
        if not done.set_running_or_notify_cancel():
            return
        eager_before = _C.set_eager(True)
        with torch.inference_mode(False):
            try:
                action()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
        _C.set_eager(eager_before)

    def _restart_live(self) -> None:
        """Ends the running requests, except streams, and puts them back into the queue."""
        for request in [r for r in self._live.values() if r.channel is None]:
            del self._live[request.number]
            self._live_cost -= request.cost
            self._server.end(request.fiber)
            self._drop_outcome(request)
            with self.lock:
                self.queue.put_back(request)

    def _rest(self) -> None:
        """Waits while no request is running. Frees cached memory after ``_IDLE`` seconds."""
        self._scope.flush()
        if not self._sleep():
            _C.empty_cache()
            self._sleep(None)

    def _sleep(self, most: float | None = _IDLE) -> bool:
        """Waits until there is something to do, for at most ``most`` seconds.

        Returns false if there was nothing to do in this time.
        """
        with self.lock:
            if self._posts or self._may_start():
                return True
            if (self.between or self.closing) and not self._live:
                return True
            until = self._next_time()
            if until is not None:
                wait = max(until - time.monotonic(), 0.0)
                most = wait if most is None else min(most, wait)
            self.is_idle = True
            began = time.monotonic()
            came = self.news.wait(most)
            self.stats.idle += time.monotonic() - began
            self.is_idle = False
            return came or until is not None

    def _may_start(self) -> bool:
        """Whether the next request may start. Called with the lock held."""
        if self.between:
            return False
        request = self.queue.first()
        return request is not None and self._has_room(request) and not self._delays()

    def _next_time(self) -> float | None:
        """Returns the time of the next deadline or end of a delay. Called with the lock held."""
        times = [self.queue.next_deadline()]
        if self._delays() and len(self.queue):
            times.append(self.queue.oldest() + self.options.max_delay)
        return min((t for t in times if t is not None), default=None)

    def wake(self, request: Request) -> None:
        """Wakes a request that waits for its reader. Called through ``post``."""
        if not request.has_ended:
            with watch_modules:
                self._server.wake(request.fiber)

    def take_report(self) -> None:
        """Updates ``report`` and the times in ``stats``. Called through ``post``."""
        self.report = self._scope.report()
        self.stats.in_slices, self.stats.in_code = self._server.times
