"""Code that the tutorials share: two pictures, and the time of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch_autobatch as ab


def milliseconds(step: Callable[[], object], rounds: int = 5) -> float:
    """Returns the median time of a step, after a warm-up step."""
    step()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def draw_batches(report: ab.Report) -> None:
    """Draws, for each kind of op, how many ops were captured and how many calls ran them."""
    counts: dict[str, tuple[int, int]] = {}
    for row in report.signatures:
        ops, launches = counts.get(row.op, (0, 0))
        counts[row.op] = ops + row.instances, launches + row.launches
    names = sorted(counts, key=lambda name: counts[name])
    _, axes = plt.subplots(figsize=(7, 0.6 + 0.35 * len(names)), layout="constrained")
    axes.barh(names, [counts[name][0] for name in names], color="#b8c4d6", label="ops captured")
    axes.barh(
        names, [counts[name][1] for name in names], color="#1f5fa8", label="calls that ran them"
    )
    axes.set_xscale("log")
    axes.set_xlabel("number, on a logarithmic scale")
    axes.legend(loc="lower right")


def draw_times(eager: float, ours: float, what: str) -> None:
    """Draws the milliseconds of a loop in eager mode and of the same code batched."""
    _, axes = plt.subplots(figsize=(7, 1.8), layout="constrained")
    bars = axes.barh(["batched", "eager"], [ours, eager], color=["#1f5fa8", "#b8c4d6"])
    axes.bar_label(bars, fmt="%.1f ms", padding=3)
    axes.margins(x=0.15)
    axes.set_title(f"{what}: {eager / ours:.1f} times as fast", loc="left")
