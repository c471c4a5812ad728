"""Templates replace the calls of a dynamic cell's program for tensor sizes that occurred before.

The nodes that the calls add to the graph depend on the kinds of the tensors and on the numbers
among the arguments. From the third call with the same kinds and numbers on, C++ adds the nodes
(``_C.Cell``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_autobatch import _C
from torch_autobatch._cell_by_data import by_data
from torch_autobatch._cell_ops import is_pure
from torch_autobatch._cell_passes import may_repeat, without_unused
from torch_autobatch._cell_program import (
    VARIABLE,
    Line,
    Program,
    compile_function,
    source_of_function,
)

_FEWEST = 4  # a look-up costs more than it saves in a program with fewer calls
# Properties that the kind of a tensor does not determine.
_NOT_OF_KINDS = re.compile(r"\.is_(leaf|inference)\b")


def with_templates(
    program: Program,
    lines: Sequence[Line],
    look_up: Sequence[Line],
    constants: dict[str, Any],
    file: str,
    line: int,
) -> tuple[list[Line], _C.Cell] | None:
    """Returns lines that call a cell with templates, and the cell (``body`` in these lines).

    `lines` and `look_up` are the lines of the function without templates. Returns None if the kinds
    of the tensors do not determine what the program does, or if templates are not worthwhile.
    """
    returned = dict.fromkeys(VARIABLE.findall(program.returned))
    given = [name for name in returned if name[0] in "rs"]
    # Each call makes these aliases again, because `.data = ...` replaces the memory of a weight.
    aliases = [line for line in lines if line.name == "__get__data" and _is_of_constants(line)]
    lines = [line for line in lines if line not in aliases]
    asks = [other for other in lines if other.selects or _is_question(other)]
    sizes = _needed(lines, look_up)  # sizes that the look-up reads
    first = [line for line in _needed(lines, asks) if line not in sizes]
    is_short = sum(other.is_call for other in lines) < _FEWEST
    has_effects = program.has_effects or any(other.writes for other in lines)
    sets_mode = any(other.name == "_set_grad_enabled" for other in lines)
    may_go_first = all(_may_go_first(o, program, sets_mode) for o in (*sizes, *first))
    if not given or is_short or has_effects or program.reads_floats or not may_go_first:
        return None
    views = _WeightViews(program, lines, file, line)
    done = {*(other for other in first if not other.is_number), *asks, *views.lines}
    rest = without_unused([other for other in lines if other not in done], program.returned)
    asked = {name for other in rest for name in other.variables()}
    before = (*aliases, *look_up, *first)
    computed = [other.target for other in before if not other.is_number]
    inputs = [name for name in (*program.inputs, *computed) if name in asked]
    source = source_of_function(inputs, rest, f"({''.join(f'{name}, ' for name in given)})")
    of_body = {**constants, **views.made}
    body = _C.Cell(compile_function(source, of_body, file, line), False, True)
    constants["refresh_views"] = views.refresh
    call = [
        *([Line("views", "refresh_views()")] if views.lines else []),
        Line("found", f"body({', '.join(inputs)})"),
        Line("", "found is not MISMATCH"),
        *(Line(name, f"found[{i}]") for i, name in enumerate(given)),
    ]
    if not any(_NOT_OF_KINDS.search(other.source) for other in first):
        first = by_data(program, first, asked, constants, file, line)
    return [*aliases, *sizes, *look_up, *first, *call], body


class _WeightViews:
    """Views of parameters. If autograd is off, they are made eagerly, and only once."""

    def __init__(self, program: Program, lines: Sequence[Line], file: str, line: int) -> None:
        self.made: dict[str, Tensor] = {}
        self.lines: list[Line] = []
        self._of: dict[str, Tensor] = {}  # maps the variable of a view to the viewed parameter
        self._make: dict[str, Callable[[], Tensor]] = {}
        # Maps the variable of a view to the place of the parameter's memory when the view was made.
        self._places: dict[str, Any] = {}
        if torch.is_grad_enabled() or any(other.name == "_set_grad_enabled" for other in lines):
            return
        for other in lines:
            found = [self._weight(program, name) for name in other.arguments()]
            weights = [weight for weight in found if weight is not None]
            is_view = other.is_call and not other.fresh and is_pure(other.name)
            if is_view and len(weights) == 1 and other.variables() <= set(self.made):
                known = {**program.constants, **self.made}
                source = source_of_function((), [other], other.target)
                self._add(other, weights[0], compile_function(source, known, file, line))

    def refresh(self) -> None:
        """Updates views of parameters whose memory has been replaced (``.data = ...``)."""
        for name, view in self.made.items():
            place = _place(self._of[name])
            if place != self._places[name]:
                view.data = _eagerly(self._make[name])
                self._places[name] = place

    def _weight(self, program: Program, name: str) -> Tensor | None:
        value = program.constants.get(name, self.made.get(name))
        is_weight = isinstance(value, Tensor) and (value.requires_grad or name in self.made)
        return self._of.get(name, value) if is_weight else None

    def _add(self, line: Line, weight: Tensor, make: Callable[[], Tensor]) -> None:
        view = _eagerly(make)
        if isinstance(view, Tensor) and _are_one_memory(view, weight):
            self.lines.append(line)
            self._places[line.target] = _place(weight)
            self.made[line.target], self._of[line.target] = view, weight
            self._make[line.target] = make


def _is_of_constants(line: Line) -> bool:
    return all(name[0] == "k" for name in line.arguments())


def _eagerly(make: Callable[[], Tensor]) -> Tensor:
    before = _C.set_eager(True)
    try:
        return make()
    finally:
        _C.set_eager(before)


def _place(weight: Tensor) -> Any:
    return weight.data_ptr(), weight.shape, weight.stride()


def _are_one_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _is_question(line: Line) -> bool:
    if line.is_condition:
        return line.reads or bool(_NOT_OF_KINDS.search(line.source))
    return line.name == "item"


def _may_go_first(line: Line, program: Program, sets_mode: bool) -> bool:
    if not line.is_call or line.name == "item":
        return True
    return may_repeat(line, program) and not sets_mode


def _needed(lines: Sequence[Line], asks: Iterable[Line]) -> list[Line]:
    """Returns the lines in `asks` and the lines on which they depend, in order."""
    wanted = list(asks)
    names = {name for line in wanted for name in line.variables()}
    found: list[Line] = []
    for line in reversed(lines):
        if line in wanted or line.target in names:
            names |= line.variables()
            found.append(line)
    return found[::-1]
