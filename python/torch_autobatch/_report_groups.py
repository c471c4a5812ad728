"""Groups the rows of a report by op and line, and formats ops, lines and numbers."""

import collections
import dataclasses
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch_autobatch._report_source import place_of

if TYPE_CHECKING:
    from torch_autobatch._report import FlushReport, Report, SignatureReport, TraceReport


@dataclasses.dataclass
class Group:
    """All ops with one name that one line captured."""

    op: str
    site: str
    rows: list["SignatureReport"] = dataclasses.field(default_factory=list)
    seconds: float = 0.0  # total time of the forward batches
    backward_seconds: float = 0.0
    bytes: int = 0  # total size of the results

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
    """Groups the rows of a report by op and line. Sorts groups by launches, descending."""
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


def traced_flushes(
    report: "Report", trace: "TraceReport"
) -> "Iterator[tuple[FlushReport, int, int]]":
    """Yields, for each flush in the trace, its row in the report, its start and its end.

    Flushes that share a row yield the same row. Times are in nanoseconds.
    """
    rows: dict[tuple[str, str], collections.deque[FlushReport]] = {}
    for row in report.flushes:
        rows.setdefault((row.reason, row.site), collections.deque()).append(row)
    for reason, site, start, end in trace.flushes:
        if of_line := rows.get((reason, site)):
            yield (of_line.popleft() if len(of_line) > 1 else of_line[0]), start, end


def short(site: str) -> str:
    """Returns a shorter path of a source line: relative, or within its installed package."""
    path, number = place_of(site)
    _, package, inside = path.rpartition("-packages/")
    if package:
        path = inside
    elif os.path.isabs(path):
        relative = os.path.relpath(path)
        path = relative if not relative.startswith("..") else os.path.join(*path.split("/")[-2:])
    return f"{path}:{number}" if number else path


_NAMES = {"autobatch::assemble": "out[i] = x", "autobatch::cell": "a cell"}


def name_of(op: str) -> str:
    """Returns the name of an op for users: "linear" for "aten::linear"."""
    if op in _NAMES:
        return _NAMES[op]
    return op.removeprefix("aten::").split(".")[0] if op.startswith("aten::") else op


def percent(part: float, whole: float) -> str:
    """Formats a share in whole percent. "0 %" and "100 %" mean exactly nothing and everything."""
    if whole == 0:
        return "0 %"
    share = 100 * part / whole
    return f"{min(max(round(share), 1 if part else 0), 99 if part < whole else 100)} %"


def plural(count: int, noun: str) -> str:
    ending = "es" if noun.endswith(("sh", "ch")) else "s"
    return f"{count:,} {noun}{'' if count == 1 else ending}"
