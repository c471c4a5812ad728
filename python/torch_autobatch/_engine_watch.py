"""A watchdog that finds code which blocks an engine's thread."""

import sys
import threading
import traceback
from types import FrameType

from torch_autobatch._engine_loop import Loop
from torch_autobatch._log import logger


class Watchdog:
    """Logs a warning when the loop has made no progress for ``limit`` seconds.

    It warns again after 2 * ``limit``, 4 * ``limit`` seconds and so on. The watchdog's thread ends
    soon after the loop's thread has ended.
    """

    def __init__(self, loop: Loop, thread: threading.Thread, limit: float) -> None:
        self._loop = loop
        self._watched = thread
        self._limit = limit
        self._stop = threading.Event()
        self.warnings = 0
        self._thread = threading.Thread(
            target=self._run, name=f"{thread.name} watchdog", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        turns, stood, next_warning = -1, 0.0, self._limit
        while not self._stop.wait(self._limit / 2) and self._watched.is_alive():
            if self._loop.turns != turns or self._loop.is_idle:
                turns, stood, next_warning = self._loop.turns, 0.0, self._limit
                continue
            stood += self._limit / 2
            if stood >= next_warning:
                next_warning *= 2
                self.warnings += 1
                logger.warning("%s", self._describe(stood))

    def _describe(self, stood: float) -> str:
        frame = sys._current_frames().get(self._watched.ident or 0)
        waiting = f"{self._loop.num_live} running, {len(self._loop.queue)} queued"
        name = self._watched.name
        if frame is None:
            return f"{name}: no progress for {stood:.3g} s; {waiting}"
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        request = _request_of(frame)
        stack = "".join(traceback.format_stack(frame))
        if request is None:
            return f"{name}: no progress for {stood:.3g} s, at {where}; {waiting}\n{stack}"
        return (
            f"{name}: request {request} has blocked all others for {stood:.3g} s, at {where}. Code "
            "that an engine runs must not wait (for a lock, the network, time.sleep). Wait before "
            f"submit(), or in the code that calls it. {waiting}\n{stack}"
        )


def _request_of(frame: FrameType | None) -> int | None:
    while frame is not None:
        if frame.f_code is Loop._run_request.__code__:
            number: int = frame.f_locals["request"].number
            return number
        frame = frame.f_back
    return None
