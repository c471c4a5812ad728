"""Files of a report: an HTML page, a Perfetto trace, a Graphviz graph of batches, text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_autobatch._report_flushes import cause_of_row, is_planned
from torch_autobatch._report_groups import groups, name_of, short, traced_flushes
from torch_autobatch._report_page import page

if TYPE_CHECKING:
    from torch_autobatch._report import Report, TraceReport


def save(report: "Report", path: Path) -> None:
    """Implements ``Report.save``."""
    path.write_text(check_name(path)(report), encoding="utf-8")


def check_name(path: Path) -> "Callable[[Report], str]":
    """Returns the function that makes the text of a file with this suffix.

    Raises:
        ValueError: if the suffix is not supported.
    """
    writers: dict[str, Callable[[Report], str]] = {
        ".html": page,
        ".json": perfetto,
        ".dot": dot,
        ".txt": str,
    }
    if path.suffix not in writers:
        raise ValueError(
            f"report.save({str(path)!r}): expected a name that ends in {', '.join(writers)}"
        )
    return writers[path.suffix]


def _trace_of(report: "Report", what: str) -> "TraceReport":
    if report.trace is None:
        raise ValueError(f"{what} needs a profile; open the block with batch(profile=True)")
    return report.trace


def _labels(report: "Report") -> dict[int, str]:
    """Returns a dict from a signature's serial to its op and line."""
    return {
        row.serial: f"{name_of(group.op)} {short(group.site)}"
        for group in groups(report)
        for row in group.rows
    }


def perfetto(report: "Report") -> str:
    """Returns trace events in JSON: one track for stages, one for flushes, one for each op.

    Raises:
        ValueError: if the report has no trace.
    """
    trace = _trace_of(report, "a Perfetto trace")
    labels = _labels(report)
    tracks: dict[str, int] = {}

    def event(track: str, name: str, start: int, end: int, **details: Any) -> dict[str, Any]:
        tid = tracks.setdefault(track, len(tracks) + 1)
        times = {"ts": start / 1e3, "dur": (end - start) / 1e3}
        return {"ph": "X", "pid": 1, "tid": tid, "name": name, **times, "args": details}

    events = []
    for row, start, end in traced_flushes(report, trace):
        is_early = not is_planned(row.reason)
        name = f"early: {cause_of_row(report, row).what}" if is_early else row.reason
        events.append(event("flushes", name, start, end, line=row.site))
    events += [event("stages", name, start, end) for name, start, end in trace.stages]
    for serial, _, members, size, start, end, is_backward in trace.batches:
        label = labels.get(serial, "(others)")
        name = f"{label.split(' ')[0]} x {members}" + (", backward" if is_backward else "")
        events.append(event(label, name, start, end, instances=members, bytes=size))
    names = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": track}}
        for track, tid in tracks.items()
    ]
    return json.dumps({"traceEvents": [*names, *events]})


def dot(report: "Report") -> str:
    """Returns the graph of batches in the DOT language. An edge points from a batch to its reader.

    Raises:
        ValueError: if the report has no trace.
    """
    trace = _trace_of(report, "the graph of batches")
    labels = _labels(report)
    lines = ["digraph batches {", "  node [shape=box];"]
    for serial, number, members, *_, is_backward in trace.batches:
        if not is_backward:
            label = labels.get(serial, "(others)").replace('"', "'")
            lines.append(f'  b{number} [label="{label}\\n{members} ops"];')
    links = {
        (trace.batch_of_node[source], batch)
        for batch, inputs in zip(trace.batch_of_node, trace.inputs_of_node, strict=True)
        for source in inputs
    }
    lines += [f"  b{source} -> b{batch};" for source, batch in sorted(links)]
    return "\n".join([*lines, "}", ""])
