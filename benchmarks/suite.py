"""Measures a workload: its variants in turn, stages, and batches of each policy."""

from __future__ import annotations

import functools
import gc
import platform
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
import torch_autobatch as ab

from benchmarks import devices, measure, peers
from benchmarks.breakdown import Breakdown, breakdown
from benchmarks.measure import EAGER, HAND, OURS, VARIANTS, Step
from benchmarks.workload import Sources, Workload

WARM_UP = 1_000_000  # first turn number of the minibatches that are not timed
SHORT = 0.01  # seconds; a shorter step runs twice, and only the second run counts
MORE_ROUNDS = 5  # factor for the rounds if all steps are short


@dataclass
class Timing:
    """Times of one variant's steps, in milliseconds."""

    median: float
    least: float
    rounds: int
    stages: dict[str, float]  # medians


@dataclass
class Result:
    """The results of one workload at one hidden size and one minibatch size."""

    workload: str
    title: str
    hidden: int
    minibatch: int
    backward: bool
    target: float | None
    timings: dict[str, Timing] = field(default_factory=dict)
    # For each variant: the median over the rounds of its time divided by our time. Above 1: ours is
    # faster.
    ours_against: dict[str, float] = field(default_factory=dict)
    hand_against_eager: float | None = None
    difference: float = 0.0  # largest difference of losses or gradients from eager mode
    skipped: dict[str, str] = field(default_factory=dict)  # peers that could not run, and why
    counts: dict[str, float] = field(default_factory=dict)  # our ops, batches, launches, ...
    rules: dict[str, int] = field(default_factory=dict)  # launches by rule
    breakdown: Breakdown | None = None  # stages of one of our steps
    slow_ops: list[dict[str, Any]] = field(default_factory=list)  # ops without a native rule

    @property
    def against_hand(self) -> float:
        return self.ours_against.get(HAND, float("nan"))


@dataclass(frozen=True)
class Plan:
    """How much to measure."""

    rounds: int = 9
    eager_rounds: int = 3
    warm_up: int = 3
    peers: bool = True
    backward: bool = True


def environment() -> dict[str, Any]:
    """Returns the versions and hardware on which the figures depend."""
    return {
        "torch": str(torch.__version__),
        "torch_autobatch": ab.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        "time": "processor time" if torch.get_num_threads() == 1 else "wall time",
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.machine()


def compare(
    workload: Workload,
    hidden: int,
    minibatch: int,
    plan: Plan,
    others: Mapping[str, Callable[..., Step]] | None = None,
) -> Result:
    """Runs all variants in turn, with a new minibatch each round. ``others`` are more variants."""
    result = Result(
        workload.name,
        workload.title,
        hidden,
        minibatch,
        plan.backward,
        workload.targets.get(hidden),
    )
    variants = {**measure.variants_of(workload), **(others or {})}
    if plan.peers:
        variants |= peers.available(workload, result.skipped)
    result.difference = _check(variants, workload, minibatch, plan, result.skipped)
    often = [name for name in variants if name != EAGER]
    took: dict[str, float] = {}
    for turn in range(plan.warm_up):
        for name in often if turn else variants:
            step = _run(variants[name], workload, minibatch, WARM_UP + turn, plan)
            took[name] = step.seconds
    gc.collect()

    short = {name for name in variants if took[name] < SHORT}
    steps: dict[str, list[Step]] = {name: [] for name in variants}
    for turn in range(plan.rounds * (MORE_ROUNDS if len(short) == len(variants) else 1)):
        names = often[turn % len(often) :] + often[: turn % len(often)]
        if turn < plan.eager_rounds or EAGER in short:
            names = [EAGER, *names]
        for name in names:
            # In real use, a step follows a step of the same variant and finds its memory in the
            # CPU's caches. After another variant, this is so only if malloc gives both variants the
            # same memory.
            if name in short:
                _run(variants[name], workload, minibatch, WARM_UP + turn, plan)
            step = _run(variants[name], workload, minibatch, turn, plan)
            step.gradients, step.own_gradients = {}, None
            steps[name].append(step)
    for name, done in steps.items():
        result.timings[name] = _timing(done)
        if name != OURS:
            ratios = [s.seconds / o.seconds for s, o in zip(done, steps[OURS], strict=False)]
            result.ours_against[name] = median(ratios)
    result.hand_against_eager = median(
        e.seconds / h.seconds for e, h in zip(steps[EAGER], steps[HAND], strict=False)
    )
    _count(result, [step.report for step in steps[OURS]])
    one_more = functools.partial(_run, variants[OURS], workload, minibatch, 0, plan)
    result.breakdown = breakdown(one_more)
    return result


def _run(
    variant: Callable[..., Step], workload: Workload, size: int, turn: int, plan: Plan
) -> Step:
    return measure.run_step(variant, workload, workload.minibatch(size, turn), plan.backward)


def _check(
    variants: dict[str, Callable[..., Step]],
    workload: Workload,
    size: int,
    plan: Plan,
    skipped: dict[str, str],
) -> float:
    """Returns the largest difference of a variant from eager. Removes peers that fail."""
    minibatch = workload.minibatch(min(size, 16), WARM_UP)
    expected = measure.run_step(VARIANTS[EAGER], workload, minibatch, plan.backward)
    worst = 0.0
    own = measure.variants_of(workload)
    for name in list(variants):
        what, variant = f"{workload.name}, {name}", variants[name]
        if name in own:
            difference = measure.check_variant(
                variant, expected, workload, minibatch, plan.backward, what
            )
        else:
            try:
                difference = _check_peer(variant, workload, len(minibatch), plan, what)
            except Exception as error:
                skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0]
                del variants[name]
                continue
        worst = max(worst, difference)
    return worst


def _check_peer(
    variant: Callable[..., Step], workload: Workload, size: int, plan: Plan, what: str
) -> float:
    """Returns the difference of a peer from eager.

    Rounding may change which elements `relu` selects, and a peer can't run in double precision. So
    up to three minibatches are tried.
    """
    for turn in range(3):
        minibatch = workload.minibatch(size, WARM_UP + turn)
        expected, step = (
            measure.run_step(v, workload, minibatch, plan.backward)
            for v in (VARIANTS[EAGER], variant)
        )
        try:
            return measure.check(expected, step, what)
        except measure.MismatchError as error:
            last = error
    raise last


def _timing(steps: Sequence[Step]) -> Timing:
    seconds = [step.seconds for step in steps]
    stages = {
        stage: 1e3 * median(step.stages[stage] for step in steps) for stage in steps[0].stages
    }
    return Timing(1e3 * median(seconds), 1e3 * min(seconds), len(steps), stages)


def _count(result: Result, reports: Sequence[Any]) -> None:
    for name in ("ops", "views", "nodes", "batches", "launches", "lower_bound"):
        result.counts[name] = median(getattr(report, name) for report in reports)
    last = reports[-1]
    launches: Counter[str] = Counter()
    for row in last.signatures:
        launches[row.rule] += row.launches
        if row.rule != "native":
            result.slow_ops.append(
                {
                    "op": row.op,
                    "rule": row.rule,
                    "ops": row.instances,
                    "launches": row.launches,
                    "shapes": row.shapes,
                    "note": row.note,
                }
            )
    result.rules = dict(launches)
    result.slow_ops.sort(key=lambda row: -row["launches"])


# ---------------------------------------------------------------- policies


def count_batches(workload: Workload, minibatch: int, turns: int = 3) -> dict[str, Any]:
    """Returns means over ``turns`` minibatches: batches by policy, the lower bound, and ops."""
    row: dict[str, Any] = {"workload": workload.name, "title": workload.title}
    for policy in ab.policy_names():
        batches, bounds, ops = [], [], []
        for turn in range(turns):
            with torch.no_grad():
                examples = workload.minibatch(minibatch, turn)
                report = measure.ours(workload, examples, backward=False, policy=policy).report
            batches.append(report.batches)
            bounds.append(report.lower_bound)
            ops.append(report.nodes)
        row[policy] = sum(batches) / turns
        row["lower bound"] = sum(bounds) / turns
        row["ops"] = sum(ops) / turns
    return row


def make(
    kind: type[Workload], hidden: int, sources: Sources, device: torch.device = devices.CPU
) -> Workload:
    """Makes a workload on the device, with seed 0."""
    workload = kind(hidden, sources, seed=0)
    return workload if device == devices.CPU else workload.to(device)


def as_data(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Returns the results as dicts, for JSON."""
    return [asdict(result) for result in results]
