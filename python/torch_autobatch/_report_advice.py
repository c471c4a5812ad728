"""What a report advises: the verdict, and findings with remedies, from the facts alone."""

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch_autobatch._report_reasons import cause_of, is_planned, place_of, source_line

if TYPE_CHECKING:
    from torch_autobatch._report import FlushReport, Report, SignatureReport

MOST_FINDINGS = 10


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that keeps ops from running together.

    Attributes:
        what: in a sentence: "float(): 40 early flushes".
        remedy: what to do about it.
        site: the line of the program: "/home/me/train.py:30".
        launches: an estimate of how many calls it costs.
    """

    what: str
    remedy: str
    site: str
    launches: int = 0

    @property
    def source(self) -> str:
        """The text of the line, or "" where the file is not found."""
        return source_line(self.site)


@dataclasses.dataclass
class Group:
    """All ops of one name that one line captured."""

    op: str
    site: str
    rows: list["SignatureReport"] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # of forward's batches
    backward_seconds: float = 0.0
    bytes: int = 0  # of results

    @property
    def instances(self) -> int:
        return sum(row.instances for row in self.rows)

    @property
    def launches(self) -> int:
        return sum(row.launches for row in self.rows)

    @property
    def alone(self) -> int:
        return sum(row.alone for row in self.rows)

    @property
    def largest(self) -> int:
        return max(row.largest for row in self.rows)

    @property
    def rule(self) -> str:
        return ", ".join(sorted({row.rule for row in self.rows if row.rule}))


def groups(report: "Report") -> list[Group]:
    """The rows of a report by op and line, those with the most launches first."""
    found: dict[tuple[str, str], Group] = {}
    by_serial: dict[int, Group] = {}
    for row in report.signatures:
        group = found.setdefault((row.op, row.site), Group(row.op, row.site))
        group.rows.append(row)
        by_serial.setdefault(row.serial, group)
    for serial, _, _, size, start, end, is_backward in report.trace.batches if report.trace else []:
        if (ran := by_serial.get(serial)) is None:
            continue
        ran.bytes += size
        if is_backward:
            ran.backward_seconds += (end - start) * 1e-9
        else:
            ran.seconds += (end - start) * 1e-9
    return sorted(found.values(), key=lambda g: (-g.launches, -g.instances))


def short(site: str) -> str:
    """A line's place as people write it: relative, or in its package."""
    path, number = place_of(site)
    _, package, inside = path.rpartition("-packages/")
    if package:
        path = inside
    elif os.path.isabs(path):
        relative = os.path.relpath(path)
        path = relative if not relative.startswith("..") else os.path.join(*path.split("/")[-2:])
    return f"{path}:{number}" if number else path


def name_of(op: str) -> str:
    """ "linear" of "aten::linear"."""
    return op.removeprefix("aten::").split(".")[0] if op.startswith("aten::") else op


def percent(part: float, whole: float) -> str:
    """Whole percents, and never 0 or 100 % of what is some and not all."""
    if whole == 0:
        return "0 %"
    share = 100 * part / whole
    return f"{min(max(round(share), 1 if part else 0), 99 if part < whole else 100)} %"


def plural(count: int, noun: str) -> str:
    ending = "es" if noun.endswith(("sh", "ch")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"


# --- the verdict ---


def verdict(report: "Report") -> list[str]:
    """Three lines: launches, the share of ops that was batched, and the worst line."""
    if report.nodes == 0:
        pending = plural(report.ops, "op")
        return [
            f"No op has run yet: {pending} captured."
            if report.ops
            else "No op was captured: the block was empty, not enabled, or paused.",
            "",
            *(_line_of(f) for f in findings(report)[:1]),
        ]
    alone = sum(row.alone for row in report.signatures)
    others = _ran_at_once(report)
    ratio = (report.nodes + others) / max(report.launches + others, 1)
    saved = f"{ratio:.1f} times fewer than" if ratio >= 1.05 else "about as many as"
    lines = [
        f"{plural(report.nodes, 'op')} ran in {plural(report.launches, 'launch')}: "
        f"{saved} one by one.",
        f"{percent(report.nodes - alone, report.nodes + others)} of the ops ran together with "
        f"others; {alone:,} ran alone"
        + (f", and {plural(others, 'op')} more without being captured." if others else "."),
    ]
    if found := findings(report):
        lines.append(_line_of(found[0]))
    else:
        most = groups(report)[0]
        lines.append(
            f"Nothing keeps ops apart. Most launches: {short(most.site)} "
            f"({name_of(most.op)}: {most.launches:,} of {report.launches:,})."
        )
    return lines


def _line_of(finding: Finding) -> str:
    return f"Worst line: {short(finding.site)}: {finding.what}."


def _ran_at_once(report: "Report") -> int:
    """Ops that were not captured; a read is none."""
    return sum(row.count for row in report.at_once if _is_lost_op(row.reason))


def _is_lost_op(reason: str) -> bool:
    return reason != "needs values" and not reason.startswith("captured op by op")


# --- findings ---


def findings(report: "Report") -> list[Finding]:
    """At most ten, those that cost the most launches first."""
    found = [
        *_early_flushes(report),
        *_small_flushes(report),
        *_not_captured(report),
        *_apart(report),
        *_loops(report),
        *_pauses(report),
    ]
    if report.backward_calls > 1 and not any("backward()" in f.what for f in found):
        found.append(_backward_in_the_loop(report))
    found.sort(key=lambda finding: -finding.launches)
    return found[:MOST_FINDINGS]


def _early_flushes(report: "Report") -> Iterator[Finding]:
    by_cause: dict[tuple[str, str, str], list[FlushReport]] = {}
    for flush in report.flushes:
        if not is_planned(flush.reason):
            cause = cause_of(flush.reason, flush.site, flush.caller)
            place = flush.caller or flush.site
            by_cause.setdefault((cause.what, cause.remedy, place), []).append(flush)
    # As if, but for the early flushes, all batches joined those of the largest flush.
    largest = max((f.batches / f.count for f in report.flushes), default=0)
    early = sum(f.batches for fs in by_cause.values() for f in fs)
    spare = sum(f.batches for f in report.flushes) - largest
    for (what, remedy, place), flushes in by_cause.items():
        batches = sum(f.batches for f in flushes)
        cost = math.ceil(spare * batches / early) if early else 0
        if cost < 1:
            continue
        count = plural(sum(f.count for f in flushes), "early flush")
        yield Finding(f"{what}: {count}, about {plural(cost, 'launch')} more", remedy, place, cost)


def _small_flushes(report: "Report") -> Iterator[Finding]:
    few = 1000
    for reason, remedy in (
        ("max_pending reached", "give max_pending= a larger number"),
        ("scope.flush()", "flush less often"),
    ):
        rows = [f for f in report.flushes if f.reason.startswith(reason)]
        count = sum(f.count for f in rows)
        nodes = sum(f.nodes for f in rows)
        if count >= 4 and nodes < few * count:
            cost = sum(f.batches for f in rows) * (count - 1) // count
            yield Finding(f"{reason}: {count:,} small flushes", remedy, rows[0].site, cost)


def _not_captured(report: "Report") -> Iterator[Finding]:
    for row in report.at_once:
        place = row.caller or row.site
        if row.reason.startswith("captured op by op"):
            yield Finding(
                f"the cell {row.op} is {row.reason}",
                "leave that part out of the cell",
                place,
                row.count,
            )
        elif _is_lost_op(row.reason):
            cause = cause_of(f"{row.op}: {row.reason}", row.site, row.caller)
            yield Finding(
                f"{row.op} ran at once, {plural(row.count, 'time')}: {row.reason}",
                cause.remedy,
                place,
                row.count,
            )


_REMEDY_APART = {
    "sizes": "bring examples of one size together, or use ops that take any length "
    "(docs/ops.md has them)",
    "weights": "stack the weights and pick by index, or call modules of one kind in the same order",
    "constants": "pass what differs as a tensor",
    "modes": "open no_grad or autocast around the whole block",
}


def _apart(report: "Report") -> Iterator[Finding]:
    """Ops of one line that could not join each other."""
    for group in groups(report):
        # A factory reads nothing, and its result costs little.
        rows = [row for row in group.rows if row.rule != "loop" and row.shapes != "()"]
        launches = sum(row.launches for row in rows)
        instances = sum(row.instances for row in rows)
        cost = launches - max((row.launches for row in rows), default=0)
        if len(rows) < 2 or instances >= 8 * launches or cost < 2:
            continue
        differs = list(_differences(rows))
        if not differs:
            continue
        what, detail = differs[0]
        yield Finding(
            f"{what} of {name_of(group.op)} differ{detail}: "
            f"{plural(instances, 'op')} in {plural(launches, 'launch')}",
            _REMEDY_APART[what],
            group.site,
            cost,
        )


def _differences(rows: Iterable["SignatureReport"]) -> Iterator[tuple[str, str]]:
    rows = list(rows)
    if len({row.weights for row in rows}) > 1:
        yield "weights", f" ({len({row.weights for row in rows})})"
    if len(constants := sorted({row.constants for row in rows})) > 1:
        yield "constants", f" ({constants[0] or 'none'} and {constants[-1]})"
    if len({row.context for row in rows}) > 1:
        yield "modes", ""
    if len(shapes := sorted({row.shapes for row in rows})) > 1:
        yield "sizes", f" ({shapes[0]} and {shapes[-1]})"


def _loops(report: "Report") -> Iterator[Finding]:
    for group in groups(report):
        rows = [row for row in group.rows if row.rule == "loop" and row.largest > 1]
        cost = sum(row.launches - row.batches for row in rows)
        if cost < 1:
            continue
        note = next((row.note for row in rows if row.note), "it has no batching rule")
        is_random = "random" in note
        yield Finding(
            f"{name_of(group.op)} ran one by one, {plural(cost + len(rows), 'time')}: {note}",
            "draw for all examples at once, before the block"
            if is_random
            else "use an op that docs/ops.md lists as batched",
            group.site,
            cost,
        )


def _pauses(report: "Report") -> Iterator[Finding]:
    for pause in report.pauses:
        yield Finding(
            f"paused, {plural(pause.count, 'time')}: few ops had others to join, so those after "
            "it ran at once",
            "run the loop as ab.map(function, instances), which batches across instances; "
            "batch(adaptive=False) defers always",
            pause.site,
        )


def _backward_in_the_loop(report: "Report") -> Finding:
    last = report.flushes[-1].site if report.flushes else ""
    return Finding(
        f"backward() ran {report.backward_calls} times inside the block, each on few instances",
        "call scope.backward(loss) in its place: the block's end runs one batched backward of all. "
        "Step the optimizer after the block: where each example needs the step before, leave the "
        "block out",
        last,
        report.backward_calls,
    )
