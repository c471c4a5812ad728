"""What keeps ops from running together: each obstacle of a block, with what it costs.

Obstacles of several blocks are those of each, added: what differs from block to block keeps
nothing apart.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from torch_autobatch._report_groups import Group, groups, name_of, plural
from torch_autobatch._report_reasons import OF_EAGER, Cause, cause_of, is_planned

if TYPE_CHECKING:
    from torch_autobatch._report import AtOnceReport, FlushReport, Report, SignatureReport


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """What kind it is, and how often it was met.

    Attributes:
        what: the cause: "float()", "weights of matmul".
        remedy: what to do about it.
        site: the line of the program.
        says: makes a sentence of it.
        detail: of the first that was met: "(16)".
        count: how often: flushes, calls, ops.
        launches: an estimate of how many calls it costs.
        ran: launches made, where the sentence has them.
        cause: what it has in common with others of its line, if that is not ``what``.
    """

    what: str
    remedy: str
    site: str
    says: Callable[["Obstacle"], str]
    detail: str = ""
    count: int = 0
    launches: int = 0
    ran: int = 0
    cause: str = ""

    def __str__(self) -> str:
        return self.says(self)


def added(obstacles: Iterable[Obstacle]) -> list[Obstacle]:
    """One for each cause and line, those that cost the most launches first."""
    found: dict[tuple[object, ...], Obstacle] = {}
    for one in obstacles:
        key = (one.says, one.what, one.remedy, one.site)
        if (before := found.get(key)) is None:
            found[key] = one
        else:
            found[key] = dataclasses.replace(
                before,
                count=before.count + one.count,
                launches=before.launches + one.launches,
                ran=before.ran + one.ran,
            )
    return sorted(found.values(), key=lambda obstacle: -obstacle.launches)


def obstacles(report: "Report") -> list[Obstacle]:
    """Of one block, those that cost the most launches first."""
    found = added(
        [
            *_early_flushes(report),
            *_small_flushes(report),
            *_not_captured(report),
            *_apart(report),
            *_loops(report),
            *_pauses(report),
        ]
    )
    if report.backward_calls > 1 and not any("backward()" in one.what for one in found):
        found.append(_backward_in_the_loop(report))
    # What made an op run at once made what it read be computed as well: one line says it.
    known: dict[tuple[str, str], Obstacle] = {}
    for one in found:
        known.setdefault((one.cause or one.what, one.site), one)
    return [one for one in known.values() if one.launches > 0 or one.says is _says_pause]


def is_lost(row: "AtOnceReport") -> bool:
    """Whether the ops of the row could have been batched: a read is none, nor one in eager()."""
    return row.reason not in ("needs values", OF_EAGER) and not row.reason.startswith(_OP_BY_OP)


_OP_BY_OP = "captured op by op"


# --- flushes ---


def _cause(row: "FlushReport | AtOnceReport", reason: str) -> tuple[Cause, str]:
    return cause_of(reason, row.site, row.caller, row.via), row.caller or row.site


def _early_flushes(report: "Report") -> Iterator[Obstacle]:
    by_cause: dict[tuple[Cause, str], list[FlushReport]] = {}
    for flush in report.flushes:
        if not is_planned(flush.reason):
            by_cause.setdefault(_cause(flush, flush.reason), []).append(flush)
    # As if, but for the early flushes, all batches joined those of the largest flush.
    largest = max((f.batches / f.count for f in report.flushes), default=0)
    early = sum(f.batches for fs in by_cause.values() for f in fs)
    spare = sum(f.batches for f in report.flushes) - largest
    for (cause, place), flushes in by_cause.items():
        batches = sum(f.batches for f in flushes)
        cost = math.ceil(spare * batches / early) if early else 0
        count = sum(f.count for f in flushes)
        yield Obstacle(cause.what, cause.remedy, place, _says_flush, count=count, launches=cost)


def _says_flush(one: Obstacle) -> str:
    flushes = plural(one.count, "early flush")
    return f"{one.what}: {flushes}, about {plural(one.launches, 'launch')} more"


def _small_flushes(report: "Report") -> Iterator[Obstacle]:
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
            yield Obstacle(
                reason, remedy, rows[0].site, _says_small_flush, count=count, launches=cost
            )


def _says_small_flush(one: Obstacle) -> str:
    return f"{one.what}: {one.count:,} small flushes"


# --- what was not captured ---


def _not_captured(report: "Report") -> Iterator[Obstacle]:
    for row in report.at_once:
        if row.reason.startswith(_OP_BY_OP):
            what, remedy = f"the cell {row.op}", "leave that part out of the cell"
            place = row.caller or row.site
            yield Obstacle(what, remedy, place, _says_cell, row.reason, row.count, row.count)
        elif is_lost(row):
            reason = row.op if row.op.startswith("ops ") else f"{row.op}: {row.reason}"
            cause, place = _cause(row, reason)
            is_known = cause.what != reason
            yield Obstacle(
                cause.what if is_known else row.op,
                cause.remedy,
                place,
                _says_known if is_known else _says_at_once,
                "" if is_known else row.reason,
                row.count,
                row.count,
                cause=cause.what,
            )


def _says_cell(one: Obstacle) -> str:
    return f"{one.what} is {one.detail}"


def _says_known(one: Obstacle) -> str:
    return f"{one.what}: {plural(one.count, 'op')} ran at once"


def _says_at_once(one: Obstacle) -> str:
    return f"{name_of(one.what)} ran at once, {plural(one.count, 'time')}: {one.detail}"


def _pauses(report: "Report") -> Iterator[Obstacle]:
    for pause in report.pauses:
        if pause.measured:
            continue
        yield Obstacle(
            "paused",
            "run the loop as ab.map(function, instances), which batches across instances; "
            "batch(adaptive=False) defers always",
            pause.site,
            _says_pause,
            count=pause.count,
        )


def _says_pause(one: Obstacle) -> str:
    return (
        f"paused, {plural(one.count, 'time')}: few ops had others to join, so those after it ran "
        "at once"
    )


def _backward_in_the_loop(report: "Report") -> Obstacle:
    last = report.flushes[-1].site if report.flushes else ""
    cause = cause_of("backward()", "")
    count = report.backward_calls
    return Obstacle("backward()", cause.remedy, last, _says_backward, count=count, launches=count)


def _says_backward(one: Obstacle) -> str:
    return f"backward() ran {one.count} times inside the block, each on few instances"


# --- what was captured, and ran apart ---

_REMEDY_APART = {
    "sizes": "bring examples of one size together, or use ops that take any length "
    "(docs/ops.md has them)",
    "dtypes": "give all of them one dtype",
    "weights": "stack the weights and pick by index, or call modules of one kind in the same order",
    "constants": "pass what differs as a tensor",
    "modes": "open no_grad or autocast around the whole block",
}


def _apart(report: "Report") -> Iterator[Obstacle]:
    """Ops of one line that could not join each other, within a flush."""
    flushes = sum(flush.count for flush in report.flushes)
    largest = max((row.largest for row in report.signatures), default=0)
    for group in groups(report):
        rows = [row for row in group.rows if row.rule != "loop"]
        most = max((row.launches for row in rows), default=0)
        instances = sum(row.instances for row in rows)
        launches = sum(row.launches for row in rows)
        cost = launches - max(most, flushes)
        # The layers of a model that one line calls run one after the other, in full batches.
        is_full = instances >= 2 * launches and instances >= largest / 2 * launches
        if len(rows) < 2 or instances >= 8 * launches or cost < 2 or is_full:
            continue
        for what, detail in _differences(rows):
            yield _obstacle_apart(group, what, detail, instances, launches, cost)
            break


def _obstacle_apart(
    group: Group, what: str, detail: str, instances: int, launches: int, cost: int
) -> Obstacle:
    what, remedy = f"{what} of {name_of(group.op)}", _REMEDY_APART[what]
    return Obstacle(what, remedy, group.site, _says_apart, detail, instances, cost, launches)


def _says_apart(one: Obstacle) -> str:
    ran = f"{plural(one.count, 'op')} in {plural(one.ran, 'launch')}"
    return f"{one.what} differ{one.detail}: {ran}"


def _differences(rows: Sequence["SignatureReport"]) -> Iterator[tuple[str, str]]:
    if len({row.weights for row in rows}) > 1:
        yield "weights", f" ({len({row.weights for row in rows})})"
    if different := _different_constants(rows):
        yield "constants", f" ({' and '.join(different)})"
    if len({row.context for row in rows}) > 1:
        yield "modes", ""
    dtypes = sorted({re.sub(r"\[.*?\]", "", row.shapes) for row in rows})
    if len(dtypes) > 1 and len({text.count(",") for text in dtypes}) == 1:
        yield "dtypes", f" ({dtypes[0]} and {dtypes[-1]})"
    # A factory's sizes are no part of its signature.
    if len(shapes := sorted({row.shapes for row in rows} - {"()"})) > 1:
        yield "sizes", f" ({shapes[0]} and {shapes[-1]})"


def _different_constants(rows: Sequence["SignatureReport"]) -> list[str]:
    """The first and the last value of an argument that has several: ["dim=0", "dim=1"]."""
    each = [dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,]*)", row.constants)) for row in rows]
    for name in dict.fromkeys(name for constants in each for name in constants):
        if name == "size" and rows[0].shapes == "()":
            continue  # of what factories make: it may differ within a batch
        values = list(dict.fromkeys(constants.get(name, "(not given)") for constants in each))
        if len(values) > 1:
            return [f"{name}={values[0]}", f"{name}={values[-1]}"]
    return []


def _loops(report: "Report") -> Iterator[Obstacle]:
    for group in groups(report):
        rows = [row for row in group.rows if row.rule == "loop" and row.largest > 1]
        cost = sum(row.launches - row.batches for row in rows)
        if cost < 1:
            continue
        note = next((row.note for row in rows if row.note), "it has no batching rule")
        remedy = (
            "draw for all examples at once, before the block"
            if "random" in note
            else "use an op that docs/ops.md lists as batched"
        )
        times = cost + len(rows)
        yield Obstacle(name_of(group.op), remedy, group.site, _says_loop, note, times, cost)


def _says_loop(one: Obstacle) -> str:
    return f"{one.what} ran one by one, {plural(one.count, 'time')}: {one.detail}"
