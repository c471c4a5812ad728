"""The HTML page of a report: verdict, findings, timeline and table, in one self-contained file.

``_report_page.html`` is the template, with style and script. This module computes the data that the
script draws.
"""

import collections
import html
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from torch_autobatch._report_advice import findings, verdict
from torch_autobatch._report_flushes import cause_of_row, is_planned
from torch_autobatch._report_groups import groups, name_of, short, traced_flushes
from torch_autobatch._report_source import source_line

if TYPE_CHECKING:
    from torch_autobatch._report import Report, TraceReport

MOST_EXAMPLE_NODES = 150


def page(report: "Report") -> str:
    """Returns the text of the HTML file."""
    # `</script>` or `<!--` in a source line must not end the script.
    data = json.dumps(page_data(report)).replace("<", "\\u003c")
    return _template().replace("/*DATA*/null", data)


def notebook(report: "Report") -> str:
    """Returns HTML for a notebook cell: the page in an ``<iframe>``."""
    height = 720 if report.trace is not None else 420
    return (
        f'<iframe srcdoc="{html.escape(page(report))}" style="width:100%;height:{height}px;'
        'border:0" title="torch_autobatch report"></iframe>'
    )


@cache
def _template() -> str:
    return resources.files("torch_autobatch").joinpath("_report_page.html").read_text("utf-8")


def page_data(report: "Report") -> dict[str, Any]:
    """Returns the data that the script draws, as plain objects. Times are in microseconds."""
    rows = groups(report)
    lanes = [
        {
            "op": name_of(group.op),
            "line": short(group.site),
            "source": source_line(group.site),
            "rule": group.rule,
            "ops": group.instances,
            "launches": group.launches,
            "largest": group.largest,
            "forward": group.seconds * 1e6,
            "backward": group.backward_seconds * 1e6,
            "bytes": group.bytes,
            "shapes": group.rows[0].shapes,
            "note": next((row.note for row in group.rows if row.note), ""),
        }
        for group in rows
    ]
    found = findings(report)
    data: dict[str, Any] = {
        "verdict": verdict(report, found),
        "findings": [
            {"line": short(f.site), "source": f.source, "what": f.what, "remedy": f.remedy}
            for f in found
        ],
        "lanes": lanes,
        "timeline": None,
    }
    if report.trace is not None:
        lane_of = {row.serial: i for i, group in enumerate(rows) for row in group.rows}
        data["timeline"] = _timeline(report, report.trace, lane_of)
    return data


def _timeline(report: "Report", trace: "TraceReport", lane_of: dict[int, int]) -> dict[str, Any]:
    flushes = []
    for row, start, end in traced_flushes(report, trace):
        cause = None if is_planned(row.reason) else cause_of_row(report, row)
        flushes.append(
            {
                "start": start / 1e3,
                "end": end / 1e3,
                "early": cause is not None,
                "what": cause.what if cause else row.reason,
                "remedy": cause.remedy if cause else "",
                "line": short(row.caller or row.site),
                "source": source_line(row.caller or row.site),
            }
        )
    return {
        "flushes": flushes,
        "stages": [[name, start / 1e3, end / 1e3] for name, start, end in trace.stages],
        "batches": [
            [lane_of.get(serial, -1), start / 1e3, end / 1e3, members, size, int(is_backward)]
            for serial, _, members, size, start, end, is_backward in trace.batches
        ],
        "example": example(trace, lane_of),
        "isCut": trace.is_cut,
    }


def example(trace: "TraceReport", lane_of: dict[int, int]) -> dict[str, Any]:
    """Returns the graph of one instance: the ops that its last op depends on.

    ``lanes`` contains the lane of each op, ``links`` contains pairs of indices into ``lanes``
    (source, reader), and ``more`` is the number of ops that were left out.
    """
    lane_of_batch = {
        number: lane_of.get(serial, -1)
        for serial, number, *_, is_backward in trace.batches
        if not is_backward
    }
    last = _deepest(trace)
    if last is None:
        return {"lanes": [], "links": [], "more": 0}
    chosen, rest = {last: 0}, [last]
    while rest:
        for node in trace.inputs_of_node[rest.pop(0)]:
            if node not in chosen:
                chosen[node] = len(chosen)
                rest.append(node)
    shown = {node: i for node, i in chosen.items() if i < MOST_EXAMPLE_NODES}
    return {
        "lanes": [lane_of_batch.get(trace.batch_of_node[node], -1) for node in shown],
        "links": [
            [shown[source], i]
            for node, i in shown.items()
            for source in trace.inputs_of_node[node]
            if source in shown
        ],
        "more": len(chosen) - len(shown),
    }


def _deepest(trace: "TraceReport") -> int | None:
    """Returns the op with the longest chain of inputs, or the last of several such ops.

    A flush may contain only a part of an instance, so the last op of the trace may have a short
    chain. If some ops ran in batches of several ops, only these ops are considered.
    """
    members = collections.Counter(trace.batch_of_node)
    depths: list[int] = []
    for inputs in trace.inputs_of_node:  # inputs precede their readers
        depths.append(1 + max((depths[source] for source in inputs), default=0))
    together = [n for n, batch in enumerate(trace.batch_of_node) if members[batch] > 1]
    # If all ops ran alone, each flush contains one instance or a part of an instance.
    return max(together or range(len(depths)), key=lambda n: (depths[n], n), default=None)
