"""Measures the variants of a case in turn, and records the reasons of their flushes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.measure import clock
from benchmarks.real import answers, case, makers, version
from benchmarks.real.answers import BLOCK, OURS, what
from benchmarks.real.case import Case, Maker

MOST_ROUNDS, LEAST_ROUNDS = 15, 3
# Maximum and minimum number of warm-up steps of a variant within the time for a phase. The library
# times the first blocks of a place in both modes, deferred and eager (docs/guide.md).
MOST_WARM_UP, LEAST_WARM_UP = 16, 12
# Number of consecutive steps of a variant in a round. Only the last step counts. With gradients,
# the library times a step from the start of one block to the start of the next block. With only one
# step per round, this time would include the other variants. The number is odd, because the library
# may alternate deferred and eager blocks of a variant. So the last step of a round alternates too.
IN_A_ROW = 3
MANY, FEW = 8, 4  # ops with MANY batches of fewer than FEW calls are reported


@dataclass
class Phase:
    """A training step, or inference."""

    milliseconds: dict[str, float] = field(default_factory=dict)  # median time of each variant
    # Median over the rounds: a variant's time divided by the block's, and by the map's.
    speed: dict[str, dict[str, float]] = field(default_factory=dict)
    flushes: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, dict[str, int]] = field(default_factory=dict)  # number of flushes by reason
    stages: dict[str, dict[str, float]] = field(default_factory=dict)  # median milliseconds
    # In a block: numbers of calls and batches of each op whose batches have only few calls.
    small_batches: dict[str, list[int]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    difference: float = 0.0


@dataclass
class Row:
    """All results of one case."""

    package: str
    version: str
    model: str
    examples: int = 0
    phases: dict[str, Phase] = field(default_factory=dict)
    failed: str = ""

    def as_data(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_data(data: dict[str, Any]) -> Row:
        phases = {name: Phase(**phase) for name, phase in data.pop("phases").items()}
        return Row(**data, phases=phases)


def measure(package: str, model: str, seconds: float) -> Row:
    """Checks one model, and times it for about ``seconds``. The row records failures."""
    row = Row(package, version(package), model)
    try:
        make = makers(package)[model]
        made = case.build(make, torch.float32)
        row.examples = len(made.examples)
        phases = answers.phases(made)
        for phase in phases:
            row.phases[phase] = _measure(make, made, phase, seconds / len(phases))
    except Exception as error:
        row.failed = what(error)
    return row


def _measure(make: Maker, made: Case, phase: str, seconds: float) -> Phase:
    result = Phase()
    variants = answers.variants(made)
    for variant in list(variants):
        if variant == answers.EAGER:
            continue
        try:
            difference = answers.check_both(make, made, variant, phase)
            result.difference = max(result.difference, difference)
        except Exception as error:
            result.failed[variant] = what(error)
            variants.remove(variant)
    for variant in variants:
        _warm_up(made, variant, phase, seconds, result)
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    stages: dict[str, dict[str, list[float]]] = {variant: {} for variant in variants}
    end = clock() + seconds
    for turn in range(MOST_ROUNDS):
        for variant in variants:
            for _ in range(IN_A_ROW):
                step = answers.run(made, variant, phase)
            times[variant].append(step.seconds)
            for stage, taken in step.stages.items():
                stages[variant].setdefault(stage, []).append(taken)
            del step
        if turn + 1 >= LEAST_ROUNDS and clock() > end:
            break
    for variant, taken in times.items():
        result.milliseconds[variant] = 1e3 * median(taken)
        result.stages[variant] = {s: 1e3 * median(t) for s, t in stages[variant].items()}
        if variant in OURS:
            result.speed[variant] = {
                other: median(o / t for o, t in zip(times[other], taken, strict=True))
                for other in times
                if other not in OURS
            }
    return result


def _warm_up(made: Case, variant: str, phase: str, seconds: float, result: Phase) -> None:
    end = clock() + seconds
    for turn in range(MOST_WARM_UP):
        step = answers.run(made, variant, phase)
        if step.report is not None and not result.flushes.get(variant):
            _count(result, variant, step.report)  # from the first deferred step
        del step
        if turn + 1 >= LEAST_WARM_UP and clock() > end:
            break


def _count(result: Phase, variant: str, report: Any) -> None:
    reasons: Counter[str] = Counter()
    for flush in report.flushes:
        reasons[f"{flush.reason} at {_short(flush.site)}"] += flush.count
    for op in report.at_once:
        reason = f"{op.op}: {op.reason} at {_short(op.site)}"
        if reason not in reasons:
            reasons[f"(no flush) {reason}"] += op.count
    result.flushes[variant] = sum(flush.count for flush in report.flushes)
    result.reasons[variant] = dict(reasons.most_common())
    if variant == BLOCK:
        calls: Counter[str] = Counter()
        batches: Counter[str] = Counter()
        for row in report.signatures:
            calls[row.op] += row.instances
            batches[row.op] += row.launches
        for op, count in batches.most_common():
            if count >= MANY and calls[op] < FEW * count:
                result.small_batches[op] = [calls[op], count]


def _short(site: str) -> str:
    """Returns a file's path, starting with its package."""
    path, _, line = site.rpartition(":")
    parts = Path(path).parts
    if "site-packages" in parts:
        parts = parts[parts.index("site-packages") + 1 :]
    return f"{'/'.join(parts[-3:])}:{line}"
