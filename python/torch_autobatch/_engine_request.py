"""A request to an engine: its future, its place in the queue, and the items that it streams."""

import asyncio
import contextvars
import heapq
import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, Self

import torch

from torch_autobatch import _C

_numbers = itertools.count(1)
_TOLD: Future[Any] = Future()
_current: contextvars.ContextVar["Request"] = contextvars.ContextVar("request")


class QueueFull(RuntimeError):  # noqa: N818  (as queue.Full)
    """The queue of an engine is full.

    Attributes:
        queued: number of waiting requests, or the sum of their costs.
        limit: the engine's ``max_queue``.
        retry_after: estimated seconds until the waiting requests have started, computed from the
            rate at which requests ended recently. Suits the HTTP header ``Retry-After``.
    """

    def __init__(self, queued: float, limit: float, retry_after: float) -> None:
        super().__init__(
            f"the engine's queue is full: {queued:g} requests wait, and max_queue={limit:g}. Try "
            f"again in about {retry_after:.2g} s, increase max_queue, or start another engine"
        )
        self.queued = queued
        self.limit = limit
        self.retry_after = retry_after


class Request:
    """A call of the engine's function."""

    __slots__ = (
        "__weakref__",
        "args",
        "channel",
        "cost",
        "deadline",
        "fiber",
        "future",
        "has_ended",
        "number",
        "priority",
        "seed",
        "started",
        "submitted",
    )

    def __init__(
        self,
        args: tuple[Any, ...],
        timeout: float | None,
        priority: int,
        cost: float,
        seed: int | None,
    ) -> None:
        self.number = next(_numbers)
        self.args = args
        self.future: Future[Any] = Future()  # replaced by _TOLD once it has a result
        self.submitted = time.monotonic()
        self.started = 0.0
        self.deadline = None if timeout is None else self.submitted + timeout
        self.priority = priority
        self.cost = cost
        self.seed = seed
        self.channel: Channel | None = None
        self.fiber = 0  # number by which the server identifies the fiber
        self.has_ended = False

    def let_go(self) -> None:
        """Marks the request as ended and drops its arguments.

        The list of deadlines may keep the request itself alive for a long time.
        """
        self.has_ended = True
        self.args = ()

    def note_cancelled(self, told: Callable[["Request"], object]) -> None:
        """Calls ``told`` when the future is cancelled.

        The future holds only a weak reference to the request.
        """
        this = weakref.ref(self)

        def look(future: Future[Any]) -> None:
            request = this()
            if future.cancelled() and request is not None:
                told(request)

        self.future.add_done_callback(look)

    def tell(self, result: Any, error: BaseException | None) -> None:
        """Sets the result or the error of the future, and ends the channel."""
        future, self.future = self.future, _TOLD
        try:
            if isinstance(error, CancelledError):
                future.cancel()
                future.set_running_or_notify_cancel()
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
        except InvalidStateError:  # another thread has just cancelled the future
            future.set_running_or_notify_cancel()
        if self.channel is not None:
            self.channel.end(error)

    def enter(self) -> None:
        """Makes this request the current one for ``generator``, in the current context."""
        _current.set(self)


def generator(device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a new generator with the seed of the current request.

    Call it in code that an engine runs. Random numbers from this generator do not depend on the
    other requests that run at the same time: ``torch.multinomial(p, 1, generator=ab.generator())``.
    Create one generator in a request, and use it for all draws. With a seed, a second generator
    would repeat the same numbers. A request without a seed gets random seeds.

    Args:
        device: device of the generator.

    Raises:
        RuntimeError: if no engine runs this code.
    """
    request = _current.get(None)
    if request is None:
        raise RuntimeError("ab.generator() works only in a function that an ab.Engine runs")
    made = torch.Generator(device)
    if request.seed is None:
        made.seed()
    else:
        made.manual_seed(request.seed)
    return made


class RequestQueue:
    """The requests that wait to start, sorted by priority and then by arrival.

    All methods except ``len`` are called with the loop's lock held.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._num_ended = 0  # number of ended requests in the heap
        self._deadlines: list[tuple[float, int, Request]] = []  # also of running requests
        self.cost = 0.0

    def __len__(self) -> int:
        return len(self._heap) - self._num_ended

    def put(self, request: Request) -> None:
        self.put_back(request)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.number, request))

    def first(self) -> Request | None:
        """Returns the next request to start, without removing the request from the queue."""
        self._drop_ended()
        return self._heap[0][2] if self._heap else None

    def oldest(self) -> float:
        """Returns when the request that has waited longest was submitted; 0 if no request waits."""
        return min((r.submitted for _, _, r in self._heap if not r.has_ended), default=0.0)

    def put_back(self, request: Request) -> None:
        """Inserts a request at its place in the queue. Does not add its deadline again."""
        heapq.heappush(self._heap, (-request.priority, request.number, request))
        self.cost += request.cost

    def take(self) -> Request:
        request = heapq.heappop(self._heap)[2]
        self.cost -= request.cost
        return request

    def leave(self, request: Request) -> None:
        """Removes a request that has ended before it was started."""
        self.cost -= request.cost
        self._num_ended += 1
        if 2 * self._num_ended > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].has_ended]
            heapq.heapify(self._heap)
            self._num_ended = 0

    def _drop_ended(self) -> None:
        while self._heap and self._heap[0][2].has_ended:
            heapq.heappop(self._heap)
            self._num_ended -= 1

    def expired(self, now: float) -> list[Request]:
        """Removes deadlines that have passed. Returns their requests that have not ended."""
        late: list[Request] = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].has_ended):
            request = heapq.heappop(self._deadlines)[2]
            if not request.has_ended:
                late.append(request)
        return late

    def forget_ended(self, most: int) -> None:
        """Drops deadlines of ended requests if there are many more than ``most`` deadlines."""
        if len(self._deadlines) > 2 * most + 1024:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].has_ended]
            heapq.heapify(self._deadlines)

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def clear(self) -> list[Request]:
        waiting = [request for _, _, request in self._heap if not request.has_ended]
        self._heap.clear()
        self._num_ended = 0
        self.cost = 0.0
        return waiting


class _End:
    """A marker for the end of a stream, used in place of an item."""


class Channel:
    """A buffer of items that a request has yielded and that its reader has not taken yet."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._items: deque[Any] = deque()
        self._waiter: Future[Any] | None = None
        self._ended = False
        self._error: BaseException | None = None
        self._is_paused = False
        self.wake: Callable[[], object] = lambda: None  # called when the request may continue

    def put(self, item: Any) -> bool:
        """Adds an item, on the engine's thread.

        Returns false if the buffer is full. In this case ``wake`` is called when the reader takes
        an item.
        """
        with self._lock:
            waiter, self._waiter = self._waiter, None
            if waiter is None:
                self._items.append(item)
                self._is_paused = len(self._items) >= self._limit
                return not self._is_paused
        waiter.set_result(item)
        return True

    def end(self, error: BaseException | None) -> None:
        """Ends the stream. The error, if any, is raised after the last item."""
        with self._lock:
            self._ended, self._error = True, error
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            self._settle(waiter)

    def _settle(self, waiter: "Future[Any]") -> None:
        error, self._error = self._error, None
        if error is None:
            waiter.set_result(_End)
        else:
            waiter.set_exception(error)

    def next(self) -> "Future[Any]":
        """Returns a future of the next item, or of ``_End`` after the last item."""
        coming: Future[Any] = Future()
        # A cancelled task cancels the future that it waits for. A running future can't be
        # cancelled, so the engine's thread can always give it an item.
        coming.set_running_or_notify_cancel()
        wakes = False
        with self._lock:
            if self._items:
                coming.set_result(self._items.popleft())
                wakes = self._is_paused and len(self._items) < self._limit
                if wakes:
                    self._is_paused = False
            elif self._ended:
                self._settle(coming)
            else:
                self._waiter = coming
        if wakes:
            self.wake()
        return coming


class Stream(Iterator[Any], AsyncIterator[Any]):
    """Iterates over the items that a request yields, with ``for`` or ``async for``.

    ``close()``, or deleting the stream, ends the request. Cancelling a task that waits for an item
    also ends the request.
    """

    def __init__(self, request: Request, channel: Channel) -> None:
        self._future = request.future
        self._channel = channel

    @property
    def future(self) -> "Future[Any]":
        """The future of the request. Its result is None once the request has yielded all items."""
        return self._future

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        item = self._channel.next().result()
        if item is _End:
            raise StopIteration
        return item

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            item = await asyncio.wrap_future(self._channel.next())
        except asyncio.CancelledError:
            self.close()
            raise
        if item is _End:
            raise StopAsyncIteration
        return item

    def close(self) -> None:
        """Ends the request, unless it has already ended."""
        self._future.cancel()

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def tensors_in(result: Any) -> list[torch.Tensor]:
    """Returns the tensors of a result, which must be computed before the user gets the result."""
    if isinstance(result, torch.Tensor):
        return [result]
    if result is None or isinstance(result, (int, float, str, bytes)):
        return []
    from torch.utils import _pytree

    return [x for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def make_real(result: Any) -> None:
    """Computes the tensors of a result. The fiber waits until they are ordinary tensors."""
    tensors = tensors_in(result)
    if tensors:
        _C.compute(tensors)
