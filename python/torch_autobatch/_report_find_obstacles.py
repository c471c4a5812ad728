"""Finds the obstacles of a block: causes that prevent batching, with their costs."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch_autobatch._report_flushes import OF_EAGER, Cause, cause_of, cause_of_row, is_planned
from torch_autobatch._report_groups import name_of, plural
from torch_autobatch._report_obstacle import Obstacle, added
from torch_autobatch._report_unbatched import unbatched_ops

if TYPE_CHECKING:
    from torch_autobatch._report import AtOnceReport, FlushReport, Report


def obstacles(report: "Report") -> list[Obstacle]:
    """Returns the obstacles of one block, in descending order of launches."""
    found = added(
        [
            *_early_flushes(report),
            *_small_flushes(report),
            *_not_captured(report),
            *unbatched_ops(report),
            *_pauses_of_blocks(report),
        ]
    )
    if report.backward_calls > 1 and not any("backward()" in one.what for one in found):
        found.append(_backward_in_the_loop(report))
    # An op that runs eagerly also flushes its operands. The eager op and the flush have the same
    # cause, which is reported only once.
    known: dict[tuple[str, str], Obstacle] = {}
    for one in found:
        known.setdefault((one.cause or one.what, one.site), one)
    return [one for one in known.values() if one.launches > 0 or one.says is _says_pause]


def is_lost(row: "AtOnceReport") -> bool:
    """Whether the ops of the row could have been batched.

    Returns false for reads, ops in ``eager()`` and cells that are captured op by op.
    """
    return row.reason not in ("needs values", OF_EAGER) and not row.reason.startswith(_OP_BY_OP)


_OP_BY_OP = "captured op by op"


# --- flushes ---


def _early_flushes(report: "Report") -> Iterator[Obstacle]:
    by_cause: dict[tuple[Cause, str], list[FlushReport]] = {}
    for flush in report.flushes:
        if not is_planned(flush.reason):
            place = flush.caller or flush.site
            by_cause.setdefault((cause_of_row(report, flush), place), []).append(flush)
    # The estimate assumes that without early flushes, all ops would join the batches of the largest
    # flush. The longest chain is a lower bound, because no batch contains two ops of a chain.
    largest = max((f.batches / f.count for f in report.flushes), default=0)
    early = sum(f.batches for fs in by_cause.values() for f in fs)
    spare = max(sum(f.batches for f in report.flushes) - max(largest, report.depth), 0)
    pauses = {pause.site: pause for pause in report.pauses}
    by_count = sorted(by_cause.items(), key=lambda item: -sum(f.count for f in item[1]))
    for (cause, place), flushes in by_count:
        batches = sum(f.batches for f in flushes)
        cost = math.ceil(spare * batches / early) if early else 0
        count = sum(f.count for f in flushes)
        # Pauses that reads at this line caused. If a line has several causes, the pause is assigned
        # to the most frequent cause.
        paused = [pauses.pop(site) for site in {f.site for f in flushes} if site in pauses]
        calls = sum(pause.calls for pause in paused)
        yield Obstacle(
            cause.what,
            cause.remedy,
            place,
            _says_paused if calls else _says_flush,
            count=count,
            launches=cost + calls,
            ran=calls,
        )


def _says_flush(one: Obstacle) -> str:
    flushes = plural(one.count, "early flush")
    return f"{one.what}: {flushes}, about {plural(one.launches, 'launch')} more"


def _says_paused(one: Obstacle) -> str:
    flushes = plural(one.count, "early flush")
    return (
        f"{one.what}: {flushes} of few ops, so deferring paused and about "
        f"{plural(one.ran, 'call')} ran eagerly"
    )


def _small_flushes(report: "Report") -> Iterator[Obstacle]:
    few = 1000
    for reason, remedy in (
        ("max_pending reached", "use a larger number for max_pending="),
        ("scope.flush()", "call scope.flush() less often"),
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
            what, remedy = f"the cell {row.op}", "move this part out of the cell"
            place = row.caller or row.site
            yield Obstacle(what, remedy, place, _says_cell, row.reason, row.count, row.count)
        elif is_lost(row):
            reason = row.op if row.op.startswith("ops ") else f"{row.op}: {row.reason}"
            cause, place = cause_of_row(report, row, reason), row.caller or row.site
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
    return f"{one.what}: {plural(one.count, 'op')} ran eagerly"


def _says_at_once(one: Obstacle) -> str:
    return f"{name_of(one.what)} ran eagerly, {plural(one.count, 'time')}: {one.detail}"


def _pauses_of_blocks(report: "Report") -> Iterator[Obstacle]:
    """Yields an obstacle for each line where whole blocks ran eagerly.

    These blocks pause at their beginning, because deferring cost more than it saved in earlier
    blocks of the same line.
    """
    read = {flush.site for flush in report.flushes if not is_planned(flush.reason)}
    for pause in report.pauses:
        if pause.site not in read and not pause.measured:
            yield Obstacle(
                "paused",
                ONE_BLOCK,
                pause.site,
                _says_pause,
                count=pause.count,
                launches=pause.calls,
            )


ONE_BLOCK = (
    "put the loop over the examples inside the block, so that ops of several examples share batches"
)


def _says_pause(one: Obstacle) -> str:
    return (
        "deferring paused: blocks that began here had no ops that could share a batch; about "
        f"{plural(one.launches, 'call')} ran eagerly"
    )


def _backward_in_the_loop(report: "Report") -> Obstacle:
    last = report.flushes[-1].site if report.flushes else ""
    cause = cause_of("backward()", "")
    count = report.backward_calls
    return Obstacle("backward()", cause.remedy, last, _says_backward, count=count, launches=count)


def _says_backward(one: Obstacle) -> str:
    return f"backward() ran {one.count} times inside the block, each time for few examples"
