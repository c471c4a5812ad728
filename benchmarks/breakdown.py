"""Breaks down the time of a batched step by the ranges that it reports to torch.profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

PREFIX = "torch_autobatch::"


@dataclass
class Breakdown:
    """Milliseconds of one step. Includes the profiler's cost: some microseconds per call."""

    schedule: float = 0.0  # finds the order of batches and members, and the places of results
    gather: float = 0.0  # forward: gathering of operands
    calls: float = 0.0  # forward: the rest of running batches
    materialize: float = 0.0  # creates autograd nodes, and tensors that the program holds
    back_gather: float = 0.0  # backward: gathering of operands and gradients, scattering
    back_calls: float = 0.0  # backward: the rest of running batches
    weights: float = 0.0  # weight gradients that are computed at the end
    gathers: int = 0
    scatters: int = 0


def breakdown(step: Callable[[], object]) -> Breakdown:
    """Runs ``step`` under the profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()

    def named(name: str) -> list[Any]:
        return [e for e in events if e.name() == PREFIX + name]

    running, differentiating, gathers, scatters = map(
        named, ("execute", "backward", "gather", "scatter")
    )
    forward, back = (_within(gathers + scatters, stage) for stage in (running, differentiating))
    return Breakdown(
        schedule=_total(named("schedule")),
        gather=forward,
        calls=_total(running) - forward,
        materialize=_total(named("materialize")),
        back_gather=back,
        back_calls=_total(differentiating) - back,
        weights=_total(named("weight_gradients")),
        gathers=len(gathers),
        scatters=len(scatters),
    )


def _total(events: Iterable[Any]) -> float:
    return sum(event.duration_ns() for event in events) / 1e6


def _within(events: list[Any], stages: list[Any]) -> float:
    """Returns the total time of the events that begin in a stage. Stages must not overlap."""
    spans = [(stage.start_ns(), stage.start_ns() + stage.duration_ns()) for stage in stages]
    return _total(e for e in events if any(a <= e.start_ns() < b for a, b in spans))
