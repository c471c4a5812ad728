"""Obstacles of captured ops: why the ops of one call in the source did not run as one batch."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from torch_autobatch._report_groups import Group, groups, name_of, plural
from torch_autobatch._report_obstacle import Obstacle

if TYPE_CHECKING:
    from torch_autobatch._report import Report, SignatureReport


def unbatched_ops(report: "Report") -> Iterator[Obstacle]:
    yield from _unbatched_calls(report)
    yield from _loops(report)


_REMEDIES = {
    "sizes": "put examples of the same size into one block, or use ops that accept any length "
    "(docs/batched_ops.md)",
    "dtypes": "use the same dtype in all examples",
    "weights": "stack the weights and select by index, or call modules of one kind in the same "
    "order in all examples",
    "modes": "open no_grad or autocast around the whole block",
}
_AS_A_TENSOR = "pass the argument that differs as a tensor"
_NO_TENSOR = (
    "this argument cannot be a tensor: put more examples with the same value into one block, or "
    "use an op that accepts a tensor (x * c, torch.where)"
)


def _unbatched_calls(report: "Report") -> Iterator[Obstacle]:
    """Yields an obstacle for each call in the source whose ops ran in several batches."""
    flushes = sum(flush.count for flush in report.flushes)
    largest = max((row.largest for row in report.signatures), default=0)
    for group in groups(report):
        calls: dict[int, list[SignatureReport]] = {}
        for row in group.rows:
            if row.rule != "loop":
                calls.setdefault(row.position, []).append(row)
        for rows in calls.values():
            if (found := _of_call(group, rows, flushes, largest)) is not None:
                yield found


def _of_call(
    group: Group, rows: Sequence["SignatureReport"], flushes: int, largest: int
) -> Obstacle | None:
    instances = sum(row.instances for row in rows)
    launches = sum(row.launches for row in rows)
    # One line may call several layers of a model. The layers run one after the other, in full
    # batches.
    is_full = instances >= 2 * launches and instances >= largest / 2 * launches
    if len(rows) < 2 or instances >= 8 * launches or is_full:
        return None
    # Estimated launches of each row with only one flush. Several flushes are a separate finding.
    alone = [math.ceil(row.launches / max(min(flushes, row.batches), 1)) for row in rows]
    most = max(row.launches for row in rows)
    cost = min(launches - max(most, flushes), sum(alone) - max(alone))
    if cost < 2:
        return None
    differs = next(_differences(rows), None)
    if differs is None:
        return None
    what, detail = differs
    remedy = _of_constants(group.op, detail) if what == "constants" else _REMEDIES[what]
    if group.op.endswith(".apply"):
        detail = ""  # the number in the detail is internal
    return Obstacle(
        f"{what} of {name_of(group.op)}",
        remedy,
        group.site,
        _says_unbatched,
        detail,
        instances,
        cost,
        ran=launches if sum(alone) == launches else 0,
    )


def _says_unbatched(one: Obstacle) -> str:
    if one.ran == 0:
        return f"{one.what} differ{one.detail}: about {plural(one.launches, 'launch')} more"
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
    # The sizes of a factory are not part of its signature.
    if len(shapes := sorted({row.shapes for row in rows} - {"()"})) > 1:
        yield "sizes", f" ({shapes[0]} and {shapes[-1]})"


def _of_constants(op: str, detail: str) -> str:
    """Returns the remedy for different constants: to pass a tensor, if an overload accepts one."""
    namespace, _, name = op.partition("::")
    argument = detail.removeprefix(" (").partition("=")[0]
    if op.endswith(".apply"):
        return "pass tensors to apply() instead of the numbers that differ"
    packet = getattr(getattr(torch.ops, namespace, None), name.split(".")[0], None)
    for overload in packet.overloads() if packet is not None else ():
        for taken in getattr(packet, overload)._schema.arguments:
            if taken.name == argument and "Tensor" in str(taken.type):
                return _AS_A_TENSOR
    return _NO_TENSOR


def _different_constants(rows: Sequence["SignatureReport"]) -> list[str]:
    """Returns the first and the last value of an argument that differs: ["dim=0", "dim=1"].

    Returns an empty list if no argument differs.
    """
    each = [dict(re.findall(r"(\w+)=(\[[^\]]*\]|[^,]*)", row.constants)) for row in rows]
    for name in dict.fromkeys(name for constants in each for name in constants):
        if name == "size" and rows[0].shapes == "()":
            continue  # a factory's sizes may differ within a batch
        values = list(dict.fromkeys(constants.get(name, "(not given)") for constants in each))
        if len(values) > 1:
            return [f"{name}={values[0]}", f"{name}={values[-1]}"]
    return []


_NOT_FASTER = "would not be faster"  # the note of a rule that loops on purpose has this text


def _loops(report: "Report") -> Iterator[Obstacle]:
    for group in groups(report):
        rows = [row for row in group.rows if row.rule == "loop" and row.largest > 1]
        cost = sum(row.launches - row.batches for row in rows)
        if cost < 1:
            continue
        note = next((row.note for row in rows if row.note), "the op has no batching rule")
        remedy = (
            "draw the random numbers for all examples at once, before the block"
            if "random" in note
            else "leave it as it is"
            if _NOT_FASTER in note
            else "use an op that docs/ops.md lists as batched"
        )
        times = cost + len(rows)
        yield Obstacle(name_of(group.op), remedy, group.site, _says_loop, note, times, cost)


def _says_loop(one: Obstacle) -> str:
    return f"{one.what} ran one by one, {plural(one.count, 'time')}: {one.detail}"
