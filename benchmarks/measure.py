"""Runs the variants of a workload in turn, in one process, and checks each against eager."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks import devices
from benchmarks.workload import Workload

EAGER, HAND, OURS = "eager", "hand", "ours"
LOOP = "loop"  # of a workload that reads values: the eager loop in a block, for comparison
TOLERANCE = 1e-3  # relative to the largest magnitude; sums in other orders differ by less


def clock() -> float:
    """On one thread its own seconds, which other processes do not add to; else the wall's."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def prepare(device: torch.device) -> None:
    """For measuring there: on the CPU one thread and its own time, else the wall's."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    elif torch.get_num_threads() == 1:
        torch.set_num_threads(2)  # the clock is the wall's then


@dataclass
class Step:
    """One step of one variant: seconds in all and by stage, and what came out."""

    seconds: float
    losses: Tensor
    gradients: dict[str, Tensor | None]
    stages: dict[str, float] = field(default_factory=dict)
    report: Any = None
    # Of a library whose parameters are its own; else they are those of the workload's parameters.
    own_gradients: dict[str, Tensor | None] | None = None


class MismatchError(AssertionError):
    """A variant's losses or gradients are not eager's."""


def eager_losses(workload: Workload, minibatch: Sequence[Any]) -> list[Tensor]:
    """The loop that a user writes."""
    return [workload.loss(example) for example in minibatch]


def finish(losses: Tensor, backward: bool) -> float:
    """When the step ends: after backward of all losses, if that is part of it, and when their
    device has done all that."""
    if backward:
        torch.autograd.backward(losses.sum())
    devices.synchronize(losses.device)
    return clock()


def eager(workload: Workload, minibatch: Sequence[Any], backward: bool) -> Step:
    """Example by example."""
    start = clock()
    losses = torch.stack(eager_losses(workload, minibatch))
    forward = clock()
    end = finish(losses, backward)
    return Step(end - start, losses, {}, {"forward": forward - start, "backward": end - forward})


def hand(workload: Workload, minibatch: Sequence[Any], backward: bool) -> Step:
    """As an expert writes it, collation included."""
    start = clock()
    plan = devices.sent(workload.collate(minibatch), workload.device)
    collated = clock()
    losses = workload.hand(plan)
    forward = clock()
    end = finish(losses, backward)
    stages = {
        "collate": collated - start,
        "forward": forward - collated,
        "backward": end - forward,
    }
    return Step(end - start, losses, {}, stages)


def ours(
    workload: Workload,
    minibatch: Sequence[Any],
    backward: bool,
    policy: str = "auto",
    granularity: str = "auto",
) -> Step:
    """The eager loop, captured; for a workload that reads values, as ``ab.map``."""
    mapped = workload.reads
    return _captured(workload, minibatch, backward, policy, mapped, granularity)


def loop(
    workload: Workload, minibatch: Sequence[Any], backward: bool, granularity: str = "auto"
) -> Step:
    """The eager loop, captured, even if it reads values."""
    return _captured(workload, minibatch, backward, "auto", mapped=False, granularity=granularity)


def _captured(
    workload: Workload,
    minibatch: Sequence[Any],
    backward: bool,
    policy: str,
    mapped: bool,
    granularity: str = "auto",
) -> Step:
    scope = ab.batch(policy=policy, granularity=granularity)
    start = clock()
    with scope:
        # One result of the block: were each held, it would be a node to autograd's engine.
        stacked = torch.stack(
            ab.map(workload.loss, minibatch) if mapped else eager_losses(workload, minibatch)
        )
        captured = clock()
    flushed = clock()
    end = finish(stacked, backward)
    stages = {
        "capture": captured - start,
        "flush": flushed - captured,
        "backward": end - flushed,
    }
    return Step(end - start, stacked, {}, stages, scope.report())


VARIANTS: dict[str, Callable[[Workload, Sequence[Any], bool], Step]] = {
    EAGER: eager,
    HAND: hand,
    OURS: ours,
}


def variants_of(workload: Workload) -> dict[str, Callable[..., Step]]:
    """Those, and the loop where ours is none."""
    return VARIANTS | {LOOP: loop} if workload.reads else VARIANTS


def run_step(
    run: Callable[[Workload, Sequence[Any], bool], Step],
    workload: Workload,
    minibatch: Sequence[Any],
    backward: bool,
) -> Step:
    """One step from clean gradients, with the results taken out."""
    workload.model.zero_grad(set_to_none=True)
    devices.synchronize(workload.device)
    with torch.set_grad_enabled(backward):
        step = run(workload, minibatch, backward)
    step.losses = step.losses.detach()
    if backward:
        own = step.own_gradients
        step.gradients = {n: p.grad for n, p in workload.parameters()} if own is None else own
    return step


def difference(expected: Tensor | None, value: Tensor | None, least: float = 0.0) -> float:
    """The largest difference, relative to the largest magnitude expected (or to ``least``, where
    that is more); NaN is infinitely far."""
    if expected is None or value is None:
        other = value if expected is None else expected
        return 0.0 if other is None or not bool(other.any()) else float("inf")
    scale = max(expected.abs().max().item(), least)
    distance = (expected - value).abs().max().item() / (scale or 1.0)
    return float("inf") if distance != distance else distance


def check(expected: Step, step: Step, what: str, tolerance: float = TOLERANCE) -> float:
    """The largest difference; raises where it is more than rounding."""
    worst = difference(expected.losses, step.losses)
    where = "losses"
    for name, gradient in expected.gradients.items():
        distance = difference(gradient, step.gradients.get(name))
        if distance > worst:
            worst, where = distance, f"gradient of {name}"
    if worst > tolerance:
        raise MismatchError(f"{what}: {where} differ from eager's by {worst:.1e}")
    return worst


def in_double(value: Any) -> Any:
    """An example with all floating-point tensors in double precision."""
    return devices.with_tensors(value, lambda t: t.double() if t.is_floating_point() else t)


def check_in_double(
    run: Callable[..., Step],
    workload: Workload,
    minibatch: Sequence[Any],
    backward: bool,
    what: str,
) -> float:
    """The check again in double precision, much closer: where two numbers are equal but for
    rounding, `relu` and `max_pool` may choose the other one, and gradients differ by more than it.
    """
    examples = in_double(list(minibatch))
    default = torch.get_default_dtype()
    workload.model.double()
    torch.set_default_dtype(torch.float64)
    try:
        steps = [run_step(variant, workload, examples, backward) for variant in (eager, run)]
        return check(*steps, what, tolerance=1e-9)
    finally:
        torch.set_default_dtype(default)
        workload.model.to(default)


def check_variant(
    run: Callable[..., Step],
    expected: Step,
    workload: Workload,
    minibatch: Sequence[Any],
    backward: bool,
    what: str,
) -> float:
    """The largest difference of a variant from eager's step on the minibatch; raises where it is
    more than rounding in double precision as well."""
    step = run_step(run, workload, minibatch, backward)
    try:
        return check(expected, step, what)
    except MismatchError:
        return check_in_double(run, workload, minibatch, backward, what)


def schedule_seconds(capture: Callable[[], object]) -> float:
    """What the schedule takes of a block in which `capture` runs and whose results are kept. By
    PyTorch's profiler, which would slow down capture, and sees no other events in a schedule."""
    profiler = profile(activities=[ProfilerActivity.CPU])
    with ab.batch():
        kept = capture()
        profiler.start()
    profiler.stop()
    del kept
    events = profiler.key_averages()
    return sum(e.self_cpu_time_total for e in events if e.key == "torch_autobatch::schedule") / 1e6


def keep_freed_memory() -> None:
    """Lets the process keep what it frees, where the allocator is glibc's. That would give the
    memory of large gradients back after some steps and not after others, by what lies above them on
    the heap, and the step that has to fault each page in anew takes half as long again."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        trim_threshold, most_maps = -1, -4  # of malloc.h
        adjust(trim_threshold, 2**31 - 1)
        adjust(most_maps, 0)


def timed_losses(losses: Callable[[Workload, Sequence[Any]], Tensor]) -> Callable[..., Step]:
    """A variant from a function that gives the minibatch's losses, with PyTorch's autograd."""

    def run(workload: Workload, minibatch: Sequence[Any], backward: bool) -> Step:
        start = clock()
        values = losses(workload, minibatch)
        forward = clock()
        end = finish(values, backward)
        stages = {"forward": forward - start, "backward": end - forward}
        return Step(end - start, values, {}, stages)

    return run
