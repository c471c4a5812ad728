"""The report: the facts of what a block captured and ran, as plain objects.

What follows from them is elsewhere: the advice in ``_report_advice``, its text in
``_report_text``, the page in ``_report_page``, files for other programs in ``_report_files``.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_autobatch._report_advice import Finding


@dataclasses.dataclass(frozen=True)
class SignatureReport:
    """The ops of one signature: what may run as one batch.

    Attributes:
        op: "aten::linear".
        shapes: of the operands of the first one: "(Float[4], Float[3, 4], Float[3])".
        rule: how its batches run: "native", "functorch" or "loop" (one by one).
        note: why the rule is no better one, or "".
        site: the line that first captured it: "/home/me/model.py:12".
        instances: ops that ran.
        batches: that they ran in.
        largest: ops in the largest batch.
        launches: calls made: a batch is one, but for a loop's.
        alone: ops that no other one ran with.
        constants: arguments that are no tensors and have other than default values: "dim=1".
        position: what of the line that was: its further lines, first and last column, 16 bits each;
            0 where that is not known.
        serial, weights, context: numbers that tell signatures apart, which weights they have, and
            grad mode and autocast; they mean nothing outside this report.
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
    """A flush; of very many in one block, all of one reason and line.

    Attributes:
        reason: what asked for it: "aten::item: needs values", "the end of the block".
        site: the line that did: "train.py:30".
        nodes: ops that ran, in all of them.
        count: how many flushes.
        batches: that the ops ran in.
        caller: where ``site`` is in an installed package: the user's line that led there, or "".
        via: functions of Python and PyTorch that the line at ``site`` called, outermost first:
            "torch._tensor.Tensor.__repr__ torch._tensor_str._str".
        position: what of the user's line asked for it, as that of a signature.
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
    """An op, function or cell that was not deferred, though it met what was.

    Attributes:
        op: ``aten::t_``, or a function's name.
        reason: why: "writes to its arguments".
        site: the line of the first call.
        count: calls.
        caller, via, position: as those of a flush.
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
    """A line from which on ops ran at once for a while, since deferring them did not pay.

    Attributes:
        site: the line.
        count: pauses there.
        calls: of functions and modules that ran at once, until the block went on.
        measured: the whole block, or map, ran eagerly, for that was faster by the clock.
    """

    site: str
    count: int = 1
    calls: int = 0
    measured: bool = False


@dataclasses.dataclass(frozen=True)
class TraceReport:
    """What ran when, with ``batch(profile=True)``. Times are nanoseconds since the block opened.

    Attributes:
        flushes: (reason, site, start, end).
        stages: (name, start, end): "schedule", "execute", "materialize", "backward", "weight
            gradients".
        batches: (signature's serial, number, members, bytes of results, start, end, is backward);
            the number is that of forward's batch.
        batch_of_node: by op, in the order of capture: the number of its batch.
        inputs_of_node: by op: the ops whose results it read, of the same flush.
        is_cut: there was too much to record all of it.
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
    """What a block captured and how it ran. Printed, it gives the verdict, advice, and a table.

    It holds plain Python objects only, and can be pickled and compared.

    Attributes:
        ops: captured.
        views: captured; these cost no call.
        gradients: calls of ``autograd.grad`` that were captured.
        nodes: ops that ran: captured ones less those that nobody needed; a cell's call is one.
        batches: that they ran in.
        checks: of values, that waited for a flush.
        inferred: calls whose results' shapes were found out by trying.
        launches: calls made: a batch is one, but for those that a loop ran.
        backward_calls: ``backward()`` that began inside the block.
        depth: ops of the longest chain in which each reads the one before, over all flushes; 0 of a
            block whose only flush is that of its end.
        lower_bound: the fewest batches that any schedule needs, of each flush as it was.
        signatures: a row a signature.
        flushes: in their order.
        at_once: what was not deferred.
        pauses: where deferring did not pay.
        is_open: the block has not ended.
        defers_checks: with ``batch(defer_checks=True)``.
        is_enabled: False of a block with ``enabled=False``, which captures nothing.
        trace: with ``batch(profile=True)``, else None.
    """

    ops: int = 0
    views: int = 0
    gradients: int = 0
    nodes: int = 0
    batches: int = 0
    checks: int = 0
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
        """The reverse of ``to_dict``."""
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
        """All of it as dicts, lists, strings, numbers, truths and None, as JSON has them."""
        facts = dataclasses.asdict(self)
        for name, rows in (facts["trace"] or {}).items():
            if isinstance(rows, list):
                facts["trace"][name] = [
                    list(row) if isinstance(row, tuple) else row for row in rows
                ]
        return facts

    @property
    def launches_saved(self) -> int:
        """Calls that one op after the other would have taken, less those made."""
        return self.nodes - self.launches

    @property
    def findings(self) -> "list[Finding]":
        """What keeps ops from running together, worst first: at most ten, each with a remedy."""
        from torch_autobatch._report_advice import findings

        return findings(self)

    def table(self) -> str:
        """A line for each op and line of the program, those with the most launches first."""
        from torch_autobatch._report_text import table

        return "\n".join(table(self))

    def save(self, path: str | Path) -> None:
        """Writes a file, of a kind that its name says.

        ``.html`` is a page for a browser, ``.txt`` the printed report, ``.json`` a trace for
        Perfetto or chrome://tracing, ``.dot`` the graph of batches for Graphviz. The last two, and
        the page's timeline, show what ``batch(profile=True)`` records.

        Raises:
            ValueError: if the name ends in something else, or the file needs ``profile=True``.
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
