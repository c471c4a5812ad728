"""The report: facts about what a block captured and ran, as plain objects.

Other modules derive the advice (``_report_advice``), the printed text (``_report_text``), the HTML
page (``_report_page``) and files for other programs (``_report_files``) from these facts.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_autobatch._report_advice import Finding


@dataclasses.dataclass(frozen=True)
class SignatureReport:
    """The ops of one signature, which may run as one batch.

    Attributes:
        op: name of the op: "aten::linear".
        shapes: dtypes and shapes of the first op's operands: "(Float[4], Float[3, 4], Float[3])".
        rule: how a batch runs: "native", "functorch" or "loop" (one op at a time).
        note: why no better rule ran the ops, or "".
        site: the line that first captured the signature: "/home/me/model.py:12".
        instances: number of ops that ran.
        batches: number of batches in which the ops ran.
        largest: number of ops in the largest batch.
        launches: number of calls: one for each batch; for the rule "loop", one for each op.
        alone: number of ops that ran alone in a call.
        constants: non-tensor arguments with values other than their defaults: "dim=1".
        position: the expression's position in the line ``site``. It consists of the number of
            further lines, the first column and the last column, with 16 bits for each number. 0 if
            unknown.
        serial, weights, context: numbers that identify the signature, its weights, and its grad
            mode and autocast state. They have no meaning outside this report.
    """

    op: str
    shapes: str = ""
    rule: str = ""
    note: str = ""
    site: str = ""
    instances: int = 0
    batches: int = 0
    largest: int = 0
    launches: int = 0
    alone: int = 0
    constants: str = ""
    position: int = 0
    serial: int = 0
    weights: int = 0
    context: int = 0


@dataclasses.dataclass(frozen=True)
class FlushReport:
    """A flush. If a block has very many flushes, flushes with equal reason and line share a row.

    Attributes:
        reason: what caused the flush: "aten::item: needs values", "the end of the block".
        site: the line that caused the flush: "train.py:30".
        nodes: number of ops that ran, in all flushes of the row.
        count: number of flushes.
        batches: number of batches in which the ops ran.
        caller: if ``site`` is in an installed package, the user's line that called the package;
            else "".
        via: functions of Python and PyTorch that the line at ``site`` called, outermost first:
            "torch._tensor.Tensor.__repr__ torch._tensor_str._str".
        position: position in the source of the user's line, as in ``SignatureReport``.
    """

    reason: str
    site: str = ""
    nodes: int = 0
    count: int = 1
    batches: int = 0
    caller: str = ""
    via: str = ""
    position: int = 0


@dataclasses.dataclass(frozen=True)
class AtOnceReport:
    """An op, function or cell that ran eagerly instead of being captured.

    Attributes:
        op: ``aten::t_``, or the name of a function.
        reason: why the op was not captured: "writes to its arguments".
        site: the line of the first call.
        count: number of calls.
        caller, via, position: as in ``FlushReport``.
    """

    op: str
    reason: str
    site: str = ""
    count: int = 1
    caller: str = ""
    via: str = ""
    position: int = 0


@dataclasses.dataclass(frozen=True)
class PauseReport:
    """A line where a block paused capture, because deferring costs more than it saves there.

    Attributes:
        site: the line.
        count: number of pauses at this line.
        calls: number of calls of functions and modules that ran eagerly until capture resumed.
        measured: the whole block or map ran eagerly, because timing trials showed that this is
            faster.
    """

    site: str
    count: int = 1
    calls: int = 0
    measured: bool = False


@dataclasses.dataclass(frozen=True)
class TraceReport:
    """Times of ``batch(profile=True)``, in nanoseconds since the block opened.

    Attributes:
        flushes: (reason, site, start, end).
        stages: (name, start, end): "schedule", "execute", "materialize", "backward", "weight
            gradients".
        batches: (serial of the signature, number of the forward batch, members, bytes of results,
            start, end, is backward).
        batch_of_node: for each op, the number of its batch. Ops are in the order of capture.
        inputs_of_node: for each op, the ops of the same flush whose results this op read.
        is_cut: the trace reached a size limit and is incomplete.
    """

    flushes: list[tuple[str, str, int, int]] = dataclasses.field(default_factory=list)
    stages: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    batches: list[tuple[int, int, int, int, int, int, bool]] = dataclasses.field(
        default_factory=list
    )
    batch_of_node: list[int] = dataclasses.field(default_factory=list)
    inputs_of_node: list[list[int]] = dataclasses.field(default_factory=list)
    is_cut: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """Facts on what a block captured and ran. ``print`` shows the verdict, advice and a table.

    A report contains only plain Python objects. It can be pickled and compared.

    Attributes:
        ops: number of ops captured.
        views: number of views captured. A view needs no call.
        gradients: number of captured calls of ``autograd.grad``.
        nodes: number of ops that ran. Ops whose results are not needed do not run. A call of a
            cell counts as one op.
        batches: number of batches in which the ops ran.
        passes: number of rewrites by each pass that changed the graph (``"fuse_sums"``).
        checks: number of checks of values that were deferred to a flush.
        inferred: number of calls whose result shapes were found by running the op on dummy data.
        launches: number of calls: one for each batch; for the rule "loop", one for each op.
        backward_calls: number of calls of ``backward()`` inside the block.
        depth: number of ops in the longest dependency chain, over all flushes. 0 if the end of the
            block is the only flush.
        lower_bound: a lower bound on the number of batches of any schedule, summed over the
            flushes.
        signatures: one row for each signature and rule.
        flushes: the flushes, in order.
        at_once: ops that ran eagerly instead of being captured.
        pauses: lines where capture paused, because deferring costs more than it saves there.
        is_open: the block has not ended.
        defers_checks: checks of all code are deferred (``batch(defer_checks=True)``).
        is_enabled: False for a block with ``enabled=False``, which captures nothing.
        trace: the times, if the block has ``profile=True``; else None.
    """

    ops: int = 0
    views: int = 0
    gradients: int = 0
    nodes: int = 0
    batches: int = 0
    checks: int = 0
    passes: dict[str, int] = dataclasses.field(default_factory=dict)
    inferred: int = 0
    launches: int = 0
    backward_calls: int = 0
    lower_bound: int = 0
    depth: int = 0
    signatures: list[SignatureReport] = dataclasses.field(default_factory=list)
    flushes: list[FlushReport] = dataclasses.field(default_factory=list)
    at_once: list[AtOnceReport] = dataclasses.field(default_factory=list)
    pauses: list[PauseReport] = dataclasses.field(default_factory=list)
    is_open: bool = False
    defers_checks: bool = False
    is_enabled: bool = True
    trace: TraceReport | None = None

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> "Report":
        """Makes a report from the result of ``to_dict``."""
        rows = {
            "signatures": SignatureReport,
            "flushes": FlushReport,
            "at_once": AtOnceReport,
            "pauses": PauseReport,
        }
        fields = dict(facts)
        for name, kind in rows.items():
            fields[name] = [kind(**row) for row in fields.get(name, [])]
        if fields.get("trace") is not None:
            trace = dict(fields["trace"])
            for name in ("flushes", "stages", "batches"):
                trace[name] = [tuple(row) for row in trace[name]]  # JSON has no tuples
            fields["trace"] = TraceReport(**trace)
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings, numbers, bools and None, as in JSON."""
        facts = dataclasses.asdict(self)
        for name, rows in (facts["trace"] or {}).items():
            if isinstance(rows, list):
                facts["trace"][name] = [
                    list(row) if isinstance(row, tuple) else row for row in rows
                ]
        return facts

    @property
    def launches_saved(self) -> int:
        """Number of calls that batching saved: ``nodes - launches``."""
        return self.nodes - self.launches

    @property
    def findings(self) -> "list[Finding]":
        """At most ten causes that prevent batching, with remedies, the worst first."""
        from torch_autobatch._report_advice import findings

        return findings(self)

    def table(self) -> str:
        """Returns a table with a row for each op and source line, by descending launches."""
        from torch_autobatch._report_text import table

        return "\n".join(table(self))

    def save(self, path: str | Path) -> None:
        """Writes the report to a file, in the format of the file's suffix.

        ``.html`` is a page for a browser, ``.txt`` the printed report, ``.json`` a trace for
        Perfetto or chrome://tracing, ``.dot`` the graph of batches for Graphviz. The suffixes
        ``.json`` and ``.dot``, and the timeline of the page, need ``batch(profile=True)``.

        Raises:
            ValueError: if the suffix is not supported, or the format needs ``profile=True``.
        """
        from torch_autobatch._report_files import save

        save(self, Path(path))

    def __str__(self) -> str:
        from torch_autobatch._report_text import text

        return text(self)

    def __repr__(self) -> str:
        return (
            f"<torch_autobatch.Report: {self.nodes} ops in {self.launches} launches, "
            f"{len(self.signatures)} signatures, {len(self.flushes)} flushes>"
        )

    def _repr_html_(self) -> str:
        from torch_autobatch._report_page import notebook

        return notebook(self)
