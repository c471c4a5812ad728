"""Separates the calls of a dynamic cell's program that depend only on sizes (masks, positions).

These calls run eagerly, once for each combination of sizes. Their results are cached and reused by
calls with the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_autobatch import _C
from torch_autobatch._cell_passes import may_repeat, objects_of_their_own
from torch_autobatch._cell_program import (
    MISMATCH,
    VARIABLE,
    Line,
    Program,
    compile_function,
    is_fixed,
    source_of_function,
)
from torch_autobatch._cell_templates import with_templates

_MOST_BYTES = 64 << 20  # maximum size of the cached results of one program
_ENTRY = 1024  # estimated bytes of an entry, without the memory of its tensors


class _Results:
    """A function of sizes with a cache of its results."""

    def __init__(self, function: Callable[..., tuple[Any, ...]]) -> None:
        self._function = function
        self._known: dict[tuple[Any, ...], Any] = {}
        self._bytes = 0

    def __call__(self, *sizes: Any) -> Any:
        found = self._known.get(sizes)
        return self._add(sizes) if found is None else found

    def _add(self, sizes: tuple[Any, ...]) -> Any:
        before = _C.set_eager(True)
        try:
            found = self._function(*sizes)
        finally:
            _C.set_eager(before)
        self._bytes += _ENTRY
        if found is not MISMATCH:
            dense = [x for x in found if isinstance(x, Tensor) and x.layout == torch.strided]
            self._bytes += sum(value.nbytes for value in dense)
        if self._bytes > _MOST_BYTES:
            self._known.clear()
            self._bytes = 0
            return found
        self._known[sizes] = found
        return found


def compiled(
    program: Program, conditions: Sequence[str], file: str, line: int
) -> Callable[..., Any]:
    """Returns the program as a function of its inputs, which also checks `conditions`."""
    lines = [*(Line("", condition) for condition in conditions), *program.lines]
    of_sizes, sizes = _of_sizes(program)
    if of_sizes:
        rest = [line for line in lines if line not in of_sizes]
        asked = {name for line in rest for name in line.variables()}
        asked |= set(VARIABLE.findall(program.returned))
        given = [line.target for line in of_sizes if line.target in asked]
        source = source_of_function(sizes, of_sizes, f"({''.join(f'{name}, ' for name in given)})")
        results = _Results(compile_function(source, program.constants, file, line))
        return _compiled(program, rest, (results, sizes, given), file, line)
    return _compiled(program, lines, None, file, line)


def _compiled(
    program: Program,
    lines: Sequence[Line],
    kept: tuple[_Results, Sequence[str], Sequence[str]] | None,
    file: str,
    line: int,
) -> Callable[..., Any]:
    constants = dict(program.constants)
    look_up: list[Line] = []
    if kept is not None:
        results, sizes, given = kept
        constants["of_sizes"] = results
        look_up = [
            Line("kept", f"of_sizes({', '.join(sizes)})"),
            Line("", "kept is not MISMATCH"),
            *(Line(name, f"kept[{i}]") for i, name in enumerate(given)),
        ]
    body = with_templates(program, lines, look_up, constants, file, line)
    if body is not None:
        lines, constants["body"] = body
    else:
        first = next((i for i, other in enumerate(lines) if other.is_call), len(lines))
        lines = [*lines[:first], *look_up, *lines[first:]]
    source = source_of_function(program.inputs, lines, program.returned)
    return compile_function(source, constants, file, line)


def _of_sizes(program: Program) -> tuple[list[Line], list[str]]:
    """Returns the lines that depend only on sizes of inputs, and the variables of these sizes."""
    own = objects_of_their_own(program.lines, program.returned)
    fixed = {name for name in own if name[0] != "k"}  # excludes constants (dtypes, devices)
    changing = {name for name, value in program.constants.items() if not is_fixed(value)}
    numbers = _numbers_of_inputs(program)
    known = set(numbers)
    sizes: set[str] = set()
    found: list[Line] = []
    for line in program.lines:
        follows = line.variables() <= known and not line.arguments() & (changing | fixed)
        is_of_numbers = line.variables() <= set(numbers)
        if line.is_number or (line.is_condition and is_of_numbers) or not follows:
            continue
        if line.is_call and not (may_repeat(line, program) and line.target not in fixed):
            continue
        known.add(line.target)
        sizes |= line.variables() & set(numbers)
        found.append(line)
    return found, [name for name in numbers if name in sizes]


def _numbers_of_inputs(program: Program) -> list[str]:
    """Returns the number variables that are computed before the first call."""
    found = list(program.int_inputs)
    for line in program.lines:
        if line.is_call:
            break
        if line.is_number:
            found.append(line.target)
    return found
