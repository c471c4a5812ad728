"""Where a step of ours spends its time, by the ranges that it shows to torch.profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

PREFIX = "torch_autobatch::"


@dataclass
class Breakdown:
    """Milliseconds of one step, with the profiler's own cost: of each call some microseconds."""

    schedule: float = 0.0  # order of batches and members, places
    gather: float = 0.0  # of operands that do not lie side by side, in forward
    calls: float = 0.0  # the rest of running batches
    materialize: float = 0.0  # tensors of what is held, and autograd's nodes
    back_gather: float = 0.0  # in backward: operands and gradients gathered, gradients scattered
    back_calls: float = 0.0  # the rest of backward's batches
    weights: float = 0.0  # gradients of weights that waited for the end
    gathers: int = 0
    scatters: int = 0


def breakdown(step: Callable[[], object]) -> Breakdown:
    """Runs ``step`` under the profiler."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name().startswith(PREFIX)]
    stages = _sorted(events, "execute"), _sorted(events, "backward")
    moved = _sorted(events, "gather") + _sorted(events, "scatter")
    forward, back = (_within(moved, stage) for stage in stages)
    running, differentiating = (sum(map(_length, stage)) for stage in stages)
    return Breakdown(
        schedule=sum(map(_length, _sorted(events, "schedule"))),
        gather=forward,
        calls=running - forward,
        materialize=sum(map(_length, _sorted(events, "materialize"))),
        back_gather=back,
        back_calls=differentiating - back,
        weights=sum(map(_length, _sorted(events, "weight_gradients"))),
        gathers=len(_sorted(events, "gather")),
        scatters=len(_sorted(events, "scatter")),
    )


def _sorted(events: list[Any], name: str) -> list[Any]:
    found = [e for e in events if e.name() == PREFIX + name]
    return sorted(found, key=lambda event: event.start_ns())


def _length(event: Any) -> float:
    return float(event.duration_ns()) / 1e6


def _within(events: list[Any], stages: list[Any]) -> float:
    """Of those that begin in one of the stages, which do not overlap."""
    total = 0.0
    for event in events:
        start = event.start_ns()
        if any(s.start_ns() <= start < s.start_ns() + s.duration_ns() for s in stages):
            total += _length(event)
    return total
