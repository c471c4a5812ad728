"""Separates the calls of a dynamic cell's program whose results determine sizes: masks, counts.

If these calls read only ordinary data, they run eagerly. Their results are cached, with the values
of the data as the key.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch_autobatch import _C
from torch_autobatch._cell_passes import objects_of_their_own
from torch_autobatch._cell_program import (
    VARIABLE,
    Line,
    Program,
    compile_function,
    is_fixed,
    source_of_function,
)


class _Results:
    """A function of data with a cache of its results. `constants`: the function's constants."""

    def __init__(self, function: Callable[..., Any], constants: dict[str, Any]) -> None:
        self._function = function
        self._constants = constants  # kept alive, because their ids are in the key
        self._known = _C.DataResults()

    def __call__(self, *values: Any) -> Any:
        found = self._known.find(values)
        if found is None:  # an input is not data, so the calls are captured
            return self._function(*values)
        if found is not False:
            return found
        before = _C.set_eager(True)
        try:
            found = self._function(*values)
        finally:
            _C.set_eager(before)
        return self._known.add(values, found)


# A key consists of the source and the ids of the constants. So layers of a model that run the same
# code share one cache.
_shared: weakref.WeakValueDictionary[Any, _Results] = weakref.WeakValueDictionary()


def by_data(
    program: Program,
    lines: Sequence[Line],
    asked: set[str],
    constants: dict[str, Any],
    file: str,
    line: int,
) -> list[Line]:
    """Returns lines that look up the results of `lines`. If this is impossible, returns `lines`.

    `asked`: the variables that other lines read. The look-up function is added to `constants`.
    """
    targets = {other.target for other in lines}
    own = objects_of_their_own(program.lines, program.returned)
    if targets & own or not any(other.is_call for other in lines):
        return list(lines)
    given = [other.target for other in lines if not other.is_number and other.target in asked]
    read = {name for other in lines for name in other.variables()} - targets
    inputs = sorted(read, key=lambda name: (name[0], int(name[1:])))
    source = source_of_function(inputs, lines, f"({''.join(f'{name}, ' for name in given)})")
    used = {name: constants[name] for name in VARIABLE.findall(source) if name in constants}
    if not all(map(is_fixed, used.values())):
        return list(lines)
    key = (source, *map(id, used.values()))
    results = _shared.get(key)
    if results is None:
        results = _shared[key] = _Results(compile_function(source, used, file, line), used)
    constants["of_data"] = results
    return [
        Line("data", f"of_data({', '.join(inputs)})"),
        Line("", "data is not MISMATCH"),
        *(Line(name, f"data[{i}]") for i, name in enumerate(given)),
    ]
