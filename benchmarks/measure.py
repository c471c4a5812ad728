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
LOOP = "loop"  # for workloads that read values: the eager loop in a block
TOLERANCE = 1e-3  # times the largest magnitude; the order of summation has a smaller effect


def clock() -> float:
    """Returns the CPU time of this process, which other processes do not affect.

    If there are several threads, returns wall time instead.
    """
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def prepare(device: torch.device) -> None:
    """Prepares measurements: one thread and CPU time for the CPU, wall time for other devices."""
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    elif torch.get_num_threads() == 1:
        torch.set_num_threads(2)  # makes clock() return wall time


@dataclass
class Step:
    """One step of one variant: its total seconds, the seconds of each stage, and the results."""

    seconds: float
    losses: Tensor
    gradients: dict[str, Tensor | None]
    stages: dict[str, float] = field(default_factory=dict)
    report: Any = None
    # Gradients, if a library has separate parameters. None: the gradients are read from the
    # workload's parameters.
    own_gradients: dict[str, Tensor | None] | None = None


class MismatchError(AssertionError):
    """The losses or gradients of a variant differ from eager mode."""


def eager_losses(workload: Workload, minibatch: Sequence[Any]) -> list[Tensor]:
    """Runs the loop that a user writes."""
    return [workload.loss(example) for example in minibatch]


def finish(losses: Tensor, backward: bool) -> float:
    """Runs backward if ``backward`` is true. Waits for the device. Returns the time."""
    if backward:
        torch.autograd.backward(losses.sum())
    devices.synchronize(losses.device)
    return clock()


def eager(workload: Workload, minibatch: Sequence[Any], backward: bool) -> Step:
    """Runs the eager loop."""
    start = clock()
    losses = torch.stack(eager_losses(workload, minibatch))
    forward = clock()
    end = finish(losses, backward)
    return Step(end - start, losses, {}, {"forward": forward - start, "backward": end - forward})


def hand(workload: Workload, minibatch: Sequence[Any], backward: bool) -> Step:
    """Runs the hand-batched code of an expert, including collation."""
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
    """Runs the eager loop in a block, or with ``ab.map`` if the workload reads values."""
    mapped = workload.reads
    return _captured(workload, minibatch, backward, policy, mapped, granularity)


def loop(
    workload: Workload, minibatch: Sequence[Any], backward: bool, granularity: str = "auto"
) -> Step:
    """Runs the eager loop in a block, even if it reads values."""
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
        # Only one tensor remains after the block. Each remaining tensor has an autograd node.
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
    """Returns the variants of a workload, with ``LOOP`` if it reads values."""
    return VARIANTS | {LOOP: loop} if workload.reads else VARIANTS


def run_step(
    run: Callable[[Workload, Sequence[Any], bool], Step],
    workload: Workload,
    minibatch: Sequence[Any],
    backward: bool,
) -> Step:
    """Resets gradients, runs one step, and stores losses and gradients in the result."""
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
    """Returns the largest difference, relative to the largest expected magnitude.

    ``least`` is a lower limit for that magnitude. NaN gives infinity.
    """
    if expected is None or value is None:
        other = value if expected is None else expected
        return 0.0 if other is None or not bool(other.any()) else float("inf")
    scale = max(expected.abs().max().item(), least)
    distance = (expected - value).abs().max().item() / (scale or 1.0)
    return float("inf") if distance != distance else distance


def check(expected: Step, step: Step, what: str, tolerance: float = TOLERANCE) -> float:
    """Returns the largest difference. Raises MismatchError if it exceeds ``tolerance``."""
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
    """Returns a copy of an example with all floating-point tensors in double precision."""
    return devices.with_tensors(value, lambda t: t.double() if t.is_floating_point() else t)


def check_in_double(
    run: Callable[..., Step],
    workload: Workload,
    minibatch: Sequence[Any],
    backward: bool,
    what: str,
) -> float:
    """Repeats the check in double precision, with a much smaller tolerance.

    In single precision, rounding may change which elements `relu` or `max_pool` selects. Then
    gradients differ by more than rounding.
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
    """Returns the largest difference between a variant and the eager step on the minibatch.

    Raises MismatchError if the difference also exceeds rounding in double precision.
    """
    step = run_step(run, workload, minibatch, backward)
    try:
        return check(expected, step, what)
    except MismatchError:
        return check_in_double(run, workload, minibatch, backward, what)


def schedule_seconds(capture: Callable[[], object]) -> float:
    """Returns the seconds of the schedule of a block that runs ``capture`` and keeps its results.

    PyTorch's profiler measures the time. The profiler starts after capture, because it would slow
    capture down. It records no other events within a schedule.
    """
    profiler = profile(activities=[ProfilerActivity.CPU])
    with ab.batch():
        kept = capture()
        profiler.start()
    profiler.stop()
    del kept
    events = profiler.key_averages()
    return sum(e.self_cpu_time_total for e in events if e.key == "torch_autobatch::schedule") / 1e6


def keep_freed_memory() -> None:
    """Makes glibc's allocator keep freed memory.

    By default, the allocator returns the memory of large gradients to the system after some steps.
    When this happens depends on the rest of the heap. The next step then has a page fault for each
    page, and takes 50 % longer.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        trim_threshold, most_maps = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
        adjust(trim_threshold, 2**31 - 1)
        adjust(most_maps, 0)


def timed_losses(losses: Callable[[Workload, Sequence[Any]], Tensor]) -> Callable[..., Step]:
    """Makes a variant of a function that computes the losses with PyTorch's autograd."""

    def run(workload: Workload, minibatch: Sequence[Any], backward: bool) -> Step:
        start = clock()
        values = losses(workload, minibatch)
        forward = clock()
        end = finish(values, backward)
        stages = {"forward": forward - start, "backward": end - forward}
        return Step(end - start, values, {}, stages)

    return run
