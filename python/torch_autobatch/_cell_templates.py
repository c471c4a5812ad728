"""A dynamic cell's program on tensors of sizes that were met before, without its calls.

What the calls add to the graph follows from the kinds of the tensors and from the numbers that they
are given. From the third call of such a kind on C++ adds it (``_C.Cell``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch_autobatch import _C
from torch_autobatch._cell_ops import is_pure
from torch_autobatch._cell_passes import without_unused
from torch_autobatch._cell_program import (
    VARIABLE,
    Line,
    Program,
    compile_function,
    source_of_function,
)

_FEWEST = 4  # calls that are worth a look-up
_NOT_OF_KINDS = re.compile(r"\.is_(leaf|inference)\b")  # nor do values follow from kinds


def with_templates(
    program: Program,
    lines: Sequence[Line],
    look_up: Sequence[Line],
    constants: dict[str, Any],
    file: str,
    line: int,
) -> tuple[list[Line], _C.Cell] | None:
    """The lines of a function that asks for a template, and whom it asks (``body``).

    `lines` and `look_up` are what it does without. None: kinds of tensors do not tell all of it.
    """
    returned = dict.fromkeys(VARIABLE.findall(program.returned))
    given = [name for name in returned if name[0] in "rs"]
    asks = [other for other in lines if _is_question(other)]
    first = _needed(program.lines, [*asks, *look_up])
    is_short = sum(other.is_call for other in lines) < _FEWEST
    has_effects = program.has_effects or any(other.writes for other in lines)
    reads = any(other.name == "item" for other in lines)
    if not given or is_short or has_effects or reads or not all(map(_may_go_first, first)):
        return None
    rest = without_unused([other for other in lines if not _is_question(other)], program.returned)
    asked = {name for other in rest for name in other.variables()}
    looked_up = [other.target for other in look_up if other.target in asked]
    inputs = [*(name for name in program.inputs if name in asked), *looked_up]
    source = source_of_function(inputs, rest, f"({''.join(f'{name}, ' for name in given)})")
    body = _C.Cell(compile_function(source, constants, file, line), False, True)
    call = [
        Line("found", f"body({', '.join(inputs)})"),
        Line("", "found is not MISMATCH"),
        *(Line(name, f"found[{i}]") for i, name in enumerate(given)),
    ]
    return [*first, *look_up, *call], body


def _is_question(line: Line) -> bool:
    return line.is_condition and (line.reads or bool(_NOT_OF_KINDS.search(line.source)))


def _may_go_first(line: Line) -> bool:
    return not line.is_call or is_pure(line.name)


def _needed(lines: Sequence[Line], asks: Iterable[Line]) -> list[Line]:
    """What these ask for, and they themselves where they are among the lines; in their order."""
    wanted = list(asks)
    names = {name for line in wanted for name in line.variables()}
    found: list[Line] = []
    for line in reversed(lines):
        if line in wanted or line.target in names:
            names |= line.variables()
            found.append(line)
    return found[::-1]
