"""The advice of a report: the verdict, and findings with remedies, derived from the facts."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_autobatch._report_find_obstacles import ONE_BLOCK, is_lost, obstacles
from torch_autobatch._report_flushes import OF_EAGER
from torch_autobatch._report_groups import groups, name_of, percent, plural, short
from torch_autobatch._report_obstacle import Obstacle
from torch_autobatch._report_source import source_line

if TYPE_CHECKING:
    from torch_autobatch._report import Report

MOST_FINDINGS = 10


@dataclasses.dataclass(frozen=True)
class Finding:
    """A cause that prevents ops from running together.

    Attributes:
        what: a description: "float(): 40 early flushes".
        remedy: what to do about the cause.
        site: the source line: "/home/me/train.py:30".
        launches: estimated number of additional launches due to the cause.
    """

    what: str
    remedy: str
    site: str
    launches: int = 0

    @property
    def source(self) -> str:
        """The text of the line, or "" if the file is not found."""
        return source_line(self.site)


def findings(report: "Report") -> list[Finding]:
    """Returns at most ten findings, in descending order of launches."""
    return findings_of(obstacles(report))


def findings_of(found: Sequence[Obstacle]) -> list[Finding]:
    """Returns the findings for obstacles that are sorted by launches."""
    return [Finding(str(one), one.remedy, one.site, one.launches) for one in found[:MOST_FINDINGS]]


def verdict(report: "Report", found: Sequence[Finding]) -> list[str]:
    """Returns up to three lines: launches, the share of batched ops, and the worst source line."""
    if report.nodes == 0 and report.pauses and report.pauses[0].measured:
        return [_of_measured(report.pauses[0].site), ""]
    others = sum(row.count for row in report.at_once if is_lost(row))
    paused = sum(pause.calls for pause in report.pauses)  # approximates the number of paused ops
    if report.nodes == 0:
        return [_of_nothing(report, others), "", *(_worst(finding) for finding in found[:1])]
    alone = sum(row.alone for row in report.signatures)
    ops, launches = report.nodes + others + paused, report.launches + others + paused
    ratio = ops / max(launches, 1)
    saved = f"{ratio:.1f} times fewer than" if ratio >= 1.05 else "about as many as"
    rest = [f"{alone:,} ran alone"]
    if others:
        rest.append(f"{others:,} without being captured")
    if paused:
        rest.append(f"about {paused:,} ran eagerly while deferring was paused")
    return [
        f"{'About ' if paused else ''}{plural(ops, 'op')} ran in {plural(launches, 'launch')}: "
        f"{saved} without batching.",
        f"{percent(report.nodes - alone, ops)} of the ops ran together with others; "
        f"{_listed(rest)}.",
        _third_line(report, found, launches),
    ]


def _listed(parts: list[str]) -> str:
    """Joins parts: "a", "a, and b", "a, b, and c"."""
    return ", and ".join([", ".join(parts[:-1]), parts[-1]]) if parts[1:] else parts[0]


def _third_line(report: "Report", found: Sequence[Finding], launches: int) -> str:
    # The ops of a chain can't run together, even if the user follows the advice.
    is_chain = report.depth >= 0.8 * launches
    if found and not (is_chain and found[0].launches < 0.2 * launches):
        return _worst(found[0])
    return _without_findings(report, is_chain)


def _of_measured(site: str) -> str:
    return (
        f"All ops ran eagerly: blocks at {short(site)} were measured, and batching was slower. "
        "With batch(adaptive=False), the ops are always deferred, and the report shows the cost."
    )


def _of_nothing(report: "Report", others: int) -> str:
    if report.ops and report.is_open:
        return (
            f"No op has run yet: {plural(report.ops, 'op')} captured. Ops run when the block "
            "ends, if the program keeps their results."
        )
    if report.ops:
        return (
            f"No op ran: {plural(report.ops, 'op')} captured. The program kept none of their "
            "results until the end of the block, or an error ended the block."
        )
    if not report.is_enabled:
        return "No op was captured: the block was not enabled (enabled=False)."
    if others:
        return f"No op was captured: {plural(others, 'op')} ran eagerly."
    if report.pauses:
        return f"No op was captured: the block was paused, at {short(report.pauses[0].site)}."
    return (
        "No op was captured: no op in the block reads a parameter or another tensor that requires "
        "grad."
    )


def _worst(finding: Finding) -> str:
    return f"Worst line: {short(finding.site)}: {finding.what}."


def _without_findings(report: "Report", is_chain: bool) -> str:
    most = groups(report)[0]
    what = f"{name_of(most.op)}: {most.launches:,} of {report.launches:,}"
    where = f"Most launches: {short(most.site)} ({what})."
    if any(flush.reason.endswith(OF_EAGER) for flush in report.flushes):
        return f"Only reads in ab.eager() or batch(enabled=False) prevent larger batches. {where}"
    is_one_block = sum(flush.count for flush in report.flushes) <= 1
    if report.nodes >= 8 and report.lower_bound >= 0.8 * report.nodes and is_one_block:
        is_chain = True
    if is_chain:
        return (
            "A chain: each op reads the result of the previous op, in one example or a few; "
            f"{ONE_BLOCK}. {where}"
        )
    if report.launches == report.nodes > 1:
        return f"The block has one example, or only a few: {ONE_BLOCK}. {where}"
    return f"No obstacle to larger batches was found. {where}"
