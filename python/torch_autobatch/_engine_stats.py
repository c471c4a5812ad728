"""Statistics of an engine, for ``Engine.stats``, and a collector for Prometheus."""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_autobatch._engine import Engine
    from torch_autobatch._engine_request import Request

_KEPT = 4096  # number of requests from which percentiles are computed
_PERCENTILES = (50, 90, 99)


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """Returns a dict of "p50", "p90", "p99" and "max"; all are 0 if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys([*(f"p{p}" for p in _PERCENTILES), "max"], 0.0)
    last = len(ordered) - 1
    found = {f"p{p}": ordered[round(last * p / 100)] for p in _PERCENTILES}
    return {**found, "max": ordered[last]}


class Stats:
    """Counters and times of an engine.

    Only the engine's thread writes the fields. The exceptions are ``submitted`` and ``rejected``,
    which any thread may write while it holds the loop's lock.
    """

    def __init__(self) -> None:
        self.submitted = 0
        self.rejected = 0
        self.finished = 0
        self.failed = 0
        self.cancelled = 0
        self.timed_out = 0
        self.slices = 0
        self.idle = self.in_slices = self.in_code = 0.0  # times in seconds
        self.began = time.monotonic()
        self._waits: deque[float] = deque(maxlen=_KEPT)
        self._latencies: deque[float] = deque(maxlen=_KEPT)
        self._ends: deque[float] = deque(maxlen=64)

    def note_end(self, request: "Request", error: BaseException | None) -> None:
        now = time.monotonic()
        if error is None:
            self.finished += 1
            self._latencies.append(now - request.submitted)
            self._waits.append(request.started - request.submitted)
        elif isinstance(error, CancelledError):
            self.cancelled += 1
        elif isinstance(error, TimeoutError):
            self.timed_out += 1
        else:
            self.failed += 1
        self._ends.append(now)

    def seconds_each(self) -> float:
        """Returns the mean seconds between the ends of two requests, from the last 64 ends."""
        if len(self._ends) < 2:
            return 0.1
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)

    def time_share(self) -> dict[str, float]:
        """Returns shares of the time since the start.

        "slices": batches run. "code": the code of requests runs, and its ops are captured. "idle":
        the thread waits. "loop": the remaining time.
        """
        every = max(time.monotonic() - self.began, 1e-9)
        parts = {"slices": self.in_slices, "code": self.in_code, "idle": self.idle}
        shares = {name: seconds / every for name, seconds in parts.items()}
        return {**shares, "loop": max(1 - sum(shares.values()), 0.0)}

    def counts(self) -> dict[str, int]:
        names = ("submitted", "rejected", "finished", "failed", "cancelled", "timed_out", "slices")
        return {name: getattr(self, name) for name in names}

    def times(self) -> dict[str, dict[str, float]]:
        return {
            "queue_wait": percentiles(tuple(self._waits)),
            "latency": percentiles(tuple(self._latencies)),
        }


class Collector:
    """A collector for ``prometheus_client``: ``registry.register(engine.collector())``."""

    def __init__(self, engine: "Engine[Any]") -> None:
        from prometheus_client import metrics_core

        self._engine = engine
        self._core = metrics_core

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        core, stats = self._core, self._engine.stats()
        labels = [stats["name"]]
        requests = core.CounterMetricFamily(
            "autobatch_requests",
            "Requests that have ended, by outcome.",
            labels=["engine", "outcome"],
        )
        for outcome in ("finished", "failed", "cancelled", "timed_out", "rejected"):
            requests.add_metric([*labels, outcome], stats[outcome])
        yield requests
        for name, text in (
            ("queued", "Requests waiting in the queue."),
            ("live", "Requests that are running."),
        ):
            gauge = core.GaugeMetricFamily(f"autobatch_{name}", text, labels=["engine"])
            gauge.add_metric(labels, stats[name])
            yield gauge
        slices = core.CounterMetricFamily(
            "autobatch_slices", "Slices (groups of batches) that ran.", labels=["engine"]
        )
        slices.add_metric(labels, stats["slices"])
        yield slices
        for name, text in (
            ("queue_wait", "Seconds from submission to start."),
            ("latency", "Seconds from submission to result."),
        ):
            gauge = core.GaugeMetricFamily(
                f"autobatch_{name}_seconds", text, labels=["engine", "quantile"]
            )
            for quantile in _PERCENTILES:
                gauge.add_metric([*labels, f"{quantile / 100:g}"], stats[name][f"p{quantile}"])
            yield gauge
        share = core.GaugeMetricFamily(
            "autobatch_time_share",
            "Share of the engine's time, by stage.",
            labels=["engine", "stage"],
        )
        for stage, value in stats["time_share"].items():
            share.add_metric([*labels, stage], value)
        yield share
        width = core.GaugeMetricFamily(
            "autobatch_batch_width", "Mean number of ops in a batch.", labels=["engine", "op"]
        )
        for op, value in stats["batch_width"].items():
            width.add_metric([*labels, op], value)
        yield width
