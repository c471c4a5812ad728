"""``Engine``: batches ops across requests that arrive at any time."""

import asyncio
import atexit
import functools
import inspect
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack

from torch import nn

from torch_autobatch._cell import _modules_behind
from torch_autobatch._engine_loop import Loop, Options
from torch_autobatch._engine_request import Channel, QueueFull, Request, Stream
from torch_autobatch._engine_stats import Collector
from torch_autobatch._engine_watch import Watchdog
from torch_autobatch._options import is_async
from torch_autobatch._scope import Granularity

_P = ParamSpec("_P")
_R = TypeVar("_R")

_engines: "weakref.WeakSet[Engine[Any]]" = weakref.WeakSet()
_BUFFERED = 64  # default number of items that a request may be ahead of its reader
_PATIENCE = 0.5  # maximum seconds that `stats` waits for the engine's thread


class Settings(TypedDict, total=False):
    """Keyword arguments of ``Engine``."""

    max_live: float
    max_queue: float
    max_delay: float
    cost: Callable[..., float] | None
    grad: bool
    granularity: Granularity
    slice_time: float
    watchdog: float | None
    name: str | None


class Engine(Generic[_R]):
    """Serves calls of a function that is written for one request, and batches ops across calls.

    One thread runs all requests in fibers, like the instances of ``map``. Captured ops run in
    slices of about a millisecond. Between two slices, new requests start, requests whose values
    have been computed continue, and finished requests deliver their results. So a new request can
    join the batches of running requests at any op, and need not wait for their end.

    Args:
        fn: the code for one request. Its arguments are the arguments of ``submit``. It may read
            values (``item()``, ``if x > 0``) and call any number of models. It must not wait for
            anything else. A generator function yields parts of the result: see ``stream``.
        max_live: maximum sum of the costs of running requests (without ``cost``, their number).
            Each request has a separate stack. One request may always run, whatever its cost.
        max_queue: maximum sum of the costs of waiting requests. Further requests are refused.
        max_delay: seconds that a request waits for other requests if none is running. 0 is usually
            best, because running requests form batches.
        cost: computes the cost of a request from its arguments (tokens, nodes). None: all cost 1.
        grad: whether gradients are recorded. False: requests run under ``inference_mode``.
        granularity: as for ``batch``.
        slice_time: intended duration of a slice, in seconds. A single batch may take longer.
        watchdog: if the thread makes no progress for this many seconds, the log names the request
            and its current line. None: never.
        name: name of the thread in logs and metrics. None: the name of ``fn``.

    Modules that ``fn`` uses should be in eval mode. The engine warns about a module in training
    mode if the module is ``fn``, is the object of the method ``fn``, or is in the closure, defaults
    or globals of ``fn``. Modules in other objects are not found.

    Raises:
        ValueError: if a number is out of range.
        TypeError: if ``fn`` is an async function.

    Example::

        with ab.Engine(encode) as engine:
            future = engine.submit(sentence)  # from any thread
            vector = future.result()
            vectors = engine.map(sentences)

        vector = await engine(sentence)  # in a coroutine

    Source: Gao et al., "Low Latency RNN Inference with Cellular Batching", EuroSys 2018.
    """

    def __init__(
        self,
        fn: Callable[..., _R],
        *,
        max_live: float = 256,
        max_queue: float = 1024,
        max_delay: float = 0.0,
        cost: Callable[..., float] | None = None,
        grad: bool = False,
        granularity: Granularity = "auto",
        slice_time: float = 0.001,
        watchdog: float | None = 5.0,
        name: str | None = None,
    ) -> None:
        for what, value in (("max_live", max_live), ("max_queue", max_queue)):
            if value < 1:
                raise ValueError(f"Engine({what}={value}): expected at least 1")
        if max_delay < 0 or slice_time <= 0:
            raise ValueError(
                f"Engine(max_delay={max_delay}, slice_time={slice_time}): max_delay "
                "must be at least 0 s, and slice_time must be more than 0 s"
            )
        if watchdog is not None and watchdog <= 0:
            raise ValueError(f"Engine(watchdog={watchdog}): expected more than 0 s, or None")
        if is_async(_underlying(fn)):
            raise TypeError(
                f"Engine: {fn!r} is an async function. Pass a function without async, and await "
                "engine(x)"
            )
        self.fn = fn
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        self._cost = cost
        self._yields = _is_generator(fn)
        self._process = os.getpid()
        options = Options(
            max_live=max_live,
            max_queue=max_queue,
            max_delay=max_delay,
            grad=grad,
            granularity=granularity,
            slice_time=slice_time,
        )
        _warn_of_training(fn)
        self._loop = Loop(fn, self._yields, options)
        self._thread = threading.Thread(
            target=self._loop.run, name=f"ab.Engine {self.name}", daemon=True
        )
        self._thread.start()
        self._watchdog = None if watchdog is None else Watchdog(self._loop, self._thread, watchdog)
        _engines.add(self)

    # --- requests ---

    def submit(
        self,
        *args: Any,
        timeout: float | None = None,
        priority: int = 0,
        cost: float | None = None,
        seed: int | None = None,
    ) -> "Future[_R]":
        """Queues the call ``fn(*args)`` and returns immediately. May be called from any thread.

        Args:
            args: arguments of ``fn``. Their tensors must not change before the request ends.
            timeout: seconds from now after which the request ends with a ``TimeoutError``.
            priority: waiting requests of higher priority start first.
            cost: cost of the request, instead of the engine's ``cost``.
            seed: seed of ``ab.generator()`` in ``fn``.

        Returns:
            A future. Its result contains ordinary tensors, with the values of eager mode. An
            exception of the request becomes the future's exception. ``cancel()`` ends the request,
            even if the request is running. Callbacks of the future run on the engine's thread, so
            they must not wait.

        Raises:
            QueueFull: if ``max_queue`` requests are waiting.
            RuntimeError: if the engine was shut down, or was made in another process.
        """
        request = self._new_request(args, timeout, priority, cost, seed)
        future: Future[_R] = request.future
        self._put(request)
        return future

    async def __call__(self, *args: Any, **options: Any) -> _R:
        """Submits a request from a coroutine. Cancelling the waiting task cancels the request."""
        return await asyncio.wrap_future(self.submit(*args, **options))

    def map(self, instances: Iterable[Any], *, return_exceptions: bool = False) -> list[Any]:
        """Returns ``[fn(x) for x in instances]``. Waits while the queue is full.

        Raises:
            Exception: the exception of the first instance that failed, after all instances have
                ended. With ``return_exceptions``, exceptions are items of the list instead.
        """
        futures: list[Future[Any]] = []
        ended = 0
        for instance in instances:
            while True:
                try:
                    futures.append(self.submit(instance))
                    break
                except QueueFull as full:
                    if ended < len(futures):
                        futures[ended].exception()
                        ended += 1
                    else:
                        time.sleep(min(full.retry_after, 0.01))
        errors = [future.exception() for future in futures]
        if not return_exceptions:
            for error in errors:
                if error is not None:
                    raise error
        return [
            future.result() if error is None else error
            for future, error in zip(futures, errors, strict=True)
        ]

    def stream(
        self,
        *args: Any,
        timeout: float | None = None,
        priority: int = 0,
        cost: float | None = None,
        seed: int | None = None,
        buffer: int = _BUFFERED,
    ) -> Stream:
        """Returns a stream of the items that ``fn(*args)`` yields, for ``for`` and ``async for``.

        Args:
            args, timeout, priority, cost, seed: as for ``submit``.
            buffer: number of items that ``fn`` may be ahead of the reader. When the buffer is full,
                the request is suspended, and other requests continue.

        Raises:
            TypeError: if ``fn`` is not a generator function.
            ValueError: if ``buffer`` is less than 1.
            QueueFull, RuntimeError: as for ``submit``.
        """
        if not self._yields:
            raise TypeError(
                f"Engine.stream(): {self.name!r} is not a generator function. Call submit() "
                "instead, or let the function yield the parts of its result"
            )
        if buffer < 1:
            raise ValueError(f"Engine.stream(buffer={buffer}): expected at least 1")
        request = self._new_request(args, timeout, priority, cost, seed)
        channel = request.channel = Channel(buffer)
        channel.wake = lambda: self._loop.post(lambda: self._loop.wake(request))
        stream = Stream(request, channel)
        self._put(request)
        return stream

    def _new_request(
        self,
        args: tuple[Any, ...],
        timeout: float | None,
        priority: int,
        cost: float | None,
        seed: int | None,
    ) -> Request:
        if cost is None:
            cost = 1 if self._cost is None else self._cost(*args)
        return Request(args, timeout, priority, cost, seed)

    def _put(self, request: Request) -> None:
        loop = self._loop
        if os.getpid() != self._process:
            raise RuntimeError(
                f"Engine {self.name!r} was created in another process, and its thread does not run "
                "in this process. Create an engine in each process, after the fork"
            )
        with loop.lock:
            if loop.closing:
                raise RuntimeError(f"Engine {self.name!r} was shut down") from loop.failure
            if loop.queue.cost + request.cost > loop.options.max_queue and len(loop.queue):
                loop.stats.rejected += 1
                raise QueueFull(
                    loop.queue.cost,
                    loop.options.max_queue,
                    len(loop.queue) * loop.stats.seconds_each(),
                )
            loop.stats.submitted += 1
            loop.queue.put(request)
            # Called with the lock held, because the request may end as soon as the lock is
            # released.
            request.note_cancelled(loop.note_cancelled)
            loop.news.notify_all()

    # --- the engine ---

    def update(
        self,
        state_dict: Mapping[str, Any],
        module: nn.Module | None = None,
        *,
        in_flight: Literal["finish", "restart"] = "finish",
        strict: bool = True,
    ) -> "Future[None]":
        """Loads other weights while the engine runs. No request sees both old and new weights.

        Args:
            state_dict: argument of ``module.load_state_dict``.
            module: the module to update. None: the only module that ``fn`` uses.
            in_flight: how running requests proceed. "finish": they finish with the old weights, and
                waiting requests start after them. "restart": they start again with the new weights,
                except requests that stream, which finish.
            strict: as for ``load_state_dict``.

        Returns:
            A future. Its result is None, or its exception is that of ``load_state_dict``.

        Raises:
            ValueError: if ``in_flight`` is invalid, or if ``module`` is None and ``fn`` uses no
                module or several modules.
            RuntimeError: if the engine was shut down.
        """
        if in_flight not in ("finish", "restart"):
            raise ValueError(
                f"Engine.update(in_flight={in_flight!r}): expected 'finish' or 'restart'"
            )
        if module is None:
            found = _roots(_modules_behind(self.fn))
            if len(found) != 1:
                raise ValueError(
                    f"Engine.update(): found {len(found)} modules in {self.name!r}, expected one. "
                    "Pass the module: update(state_dict, module)"
                )
            module = found[0]
        return self.between(
            functools.partial(module.load_state_dict, state_dict, strict=strict),
            restart=in_flight == "restart",
        )

    def between(self, action: Callable[[], object], *, restart: bool = False) -> "Future[None]":
        """Calls ``action`` on the engine's thread while no request is running.

        Args:
            action: a function that must not run in the middle of a request.
            restart: end running requests, except streams, and restart them after the action.

        Returns:
            A future. Its result is None, or its exception is the one that ``action`` raised.

        Raises:
            RuntimeError: if the engine was shut down.
        """
        done: Future[None] = Future()
        loop = self._loop
        with loop.lock:
            if loop.closing:
                raise RuntimeError(f"Engine {self.name!r} was shut down") from loop.failure
            loop.between.append((action, restart, done))
            loop.news.notify_all()
        return done

    def stats(self) -> dict[str, Any]:
        """Returns statistics since the engine was made.

        Returns:
            "name"; "live" and "queued": numbers of running and waiting requests; "submitted",
            "rejected" (QueueFull), "finished", "failed", "cancelled", "timed_out": numbers of
            requests; "slices": number of slices; "queue_wait" and "latency": seconds, as "p50",
            "p90", "p99" and "max" of the last 4096 finished requests; "time_share": shares of
            "slices", "code", "idle" and "loop"; "batch_width": by op, the mean number of calls in a
            batch; "stalls": number of warnings of the watchdog.
        """
        loop = self._loop
        self._take_report()
        ran: dict[str, list[int]] = {}
        for row in loop.report.signatures:
            sums = ran.setdefault(row.op, [0, 0])
            sums[0] += row.instances
            sums[1] += row.batches
        return {
            "name": self.name,
            "live": loop.num_live,
            "queued": len(loop.queue),
            **loop.stats.counts(),
            **loop.stats.times(),
            "time_share": loop.stats.time_share(),
            "batch_width": {op: nodes / max(batches, 1) for op, (nodes, batches) in ran.items()},
            "stalls": self._watchdog.warnings if self._watchdog is not None else 0,
        }

    def _take_report(self) -> None:
        """Updates the report on the engine's thread, unless the thread is busy."""
        taken = threading.Event()

        def take() -> None:
            self._loop.take_report()
            taken.set()

        if self._thread.is_alive():
            self._loop.post(take)
            taken.wait(_PATIENCE)

    def collector(self) -> Any:
        """Returns a collector for ``prometheus_client``: ``REGISTRY.register(engine.collector())``.

        Raises:
            ModuleNotFoundError: if prometheus_client is not installed.
        """
        return Collector(self)

    def shutdown(self, wait: bool = True, *, cancel: bool = False) -> None:
        """Shuts down the engine, which then accepts no more requests.

        Args:
            wait: return only after all requests and the thread have ended.
            cancel: cancel running and waiting requests. Otherwise they finish.
        """
        loop = self._loop
        with loop.lock:
            loop.closing = True
            loop.news.notify_all()
        if cancel:
            loop.post(loop.end_all)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()
            if self._watchdog is not None:
                self._watchdog.stop()
        _engines.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown(cancel=error is not None and not isinstance(error, Exception))

    def __repr__(self) -> str:
        state = "" if self._thread.is_alive() else ", shut down"
        live, queued = self._loop.num_live, len(self._loop.queue)
        return f"<ab.Engine {self.name!r}: {live} live, {queued} queued{state}>"


def serve(**settings: Unpack[Settings]) -> Callable[[Callable[..., _R]], Engine[_R]]:
    """Returns a decorator that makes an ``Engine`` of a function: ``@ab.serve(max_live=64)``.

    Args:
        settings: keyword arguments of ``Engine``.

    Example::

        @ab.serve()
        def encode(tree): ...


        vector = encode.submit(tree).result()
    """

    def decorate(fn: Callable[..., _R]) -> Engine[_R]:
        engine = Engine(fn, **settings)
        functools.update_wrapper(engine, fn)
        return engine

    return decorate


def _underlying(fn: Any) -> Any:
    fn = inspect.unwrap(fn)
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn if inspect.isroutine(fn) else getattr(fn, "forward", type(fn).__call__)


def _is_generator(fn: Any) -> bool:
    return inspect.isgeneratorfunction(_underlying(fn))


def _roots(modules: list[nn.Module]) -> list[nn.Module]:
    """Returns the modules that are submodules of no other module."""
    inner = {id(m) for root in modules for m in root.modules() if m is not root}
    return [module for module in modules if id(module) not in inner]


def _warn_of_training(fn: Any) -> None:
    training = [m for m in _roots(_modules_behind(fn)) if any(x.training for x in m.modules())]
    if training:
        names = ", ".join(sorted({type(module).__name__ for module in training}))
        warnings.warn(
            f"ab.Engine: {names} is in training mode, so dropout and batch norm behave as in "
            "training. Call eval() before you create the engine",
            UserWarning,
            stacklevel=3,
        )


@atexit.register
def _end_all() -> None:
    for engine in list(_engines):
        engine.shutdown(cancel=True)
