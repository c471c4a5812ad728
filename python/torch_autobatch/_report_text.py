"""The printed report: at most 25 lines."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_autobatch._report_advice import Finding, findings, verdict
from torch_autobatch._report_groups import groups, name_of, short

if TYPE_CHECKING:
    from torch_autobatch._report import Report

MOST_LINES = 25
_WIDTH = 110


def text(report: "Report", found: Sequence[Finding] | None = None) -> str:
    """Returns the verdict, findings with remedies, and as many rows of the table as fit.

    If ``found`` is given, it replaces the findings of the report.
    """
    found = findings(report) if found is None else found
    lines = verdict(report, found)
    rows = table(report)
    room = MOST_LINES - len(lines) - 1
    shown = min(len(found), max((room - min(len(rows), 8)) // 2, 1))
    for number, finding in enumerate(found[:shown], 1):
        lines.append(f"{number:2}. {short(finding.site)}  {_cut(finding.what)}")
        lines.append(f"    -> {finding.remedy}")
    if shown < len(found):
        lines[-1] += f"  ({len(found) - shown} more: report.findings)"
    room = MOST_LINES - len(lines)
    if len(rows) > room:
        rest = len(rows) - room + 1
        rows = [*rows[: room - 1], f"  ... {rest} more lines: report.table()"]
    return "\n".join([*lines, *rows]).rstrip()


def _cut(line: str) -> str:
    return line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"


def table(report: "Report") -> list[str]:
    """Returns a heading, a row for each op and source line, and a line about passes."""
    found = groups(report)
    if not found:
        return []
    heading = ["op", "line", "ops", "launches", "largest", "rule"]
    cells = [
        [
            name_of(group.op),
            short(group.site),
            f"{group.instances:,}",
            f"{group.launches:,}",
            f"{group.largest:,}",
            group.rule,
        ]
        for group in found
    ]
    if report.trace is not None:
        heading += ["forward ms", "backward ms", "MiB"]
        for group, line in zip(found, cells, strict=True):
            line += [
                f"{1e3 * group.seconds:.2f}",
                f"{1e3 * group.backward_seconds:.2f}",
                f"{group.bytes / 2**20:.2f}",
            ]
    widths = [max(len(line[i]) for line in [heading, *cells]) for i in range(len(heading))]
    rows = ["  " + _row(line, widths) for line in [heading, *cells]]
    if report.passes:
        rows.append("  passes: " + ", ".join(f"{p} {n:,}" for p, n in report.passes.items()))
    return rows


def _row(cells: list[str], widths: list[int]) -> str:
    """Formats a row: names are left-aligned, numbers right-aligned."""
    left = (0, 1, 5)
    padded = (
        cell.ljust(width) if i in left else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "  ".join(padded).rstrip()
