"""The state of modules and functions that a dynamic cell's trace depends on, except parameters.

A trace contains the values of attributes (a temperature, a dropout rate) and of numbers among the
globals, and it outlives the block. Therefore guards check these values again before each replay,
except values that the function itself changes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from torch_autobatch._cell_objects import plain_item

Guard = tuple[dict[Any, Any], str | None, Any]

_OTHERS = ("_parameters", "_buffers", "_modules", "training")  # `_cell.guards` checks these
_CONSTANTS = (bool, int, float, str)


class Attributes:
    """Records the attributes of modules, and the globals of functions, before a call.

    `function`: the function that is called.
    """

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        self._tables = [(module.__dict__, dict(module.__dict__)) for module in modules]
        self._functions = [function, *(type(module).forward for module in modules)]
        self._globals = [guard for function in self._functions for guard in _globals_of(function)]

    def guards(self) -> list[Guard]:
        """Returns guards for the values that the call has not changed. Use this after the call."""
        found: list[Guard] = []
        for table, before in self._tables:
            if len(table) == len(before):
                found.append((table, None, len(table)))
            found += [
                (table, name, value)
                for name, value in before.items()
                if name not in _OTHERS and not name.endswith("_hooks") and table.get(name) is value
            ]
        return found + [guard for guard in self._globals if guard[0].get(guard[1]) is guard[2]]

    def hold(self, tensors: Iterable[Tensor]) -> bool:
        """Returns whether one of the tensors is a buffer, attribute, global or closure variable."""
        values = [value for function in self._functions for value in _known_to(function)]
        for _, before in self._tables:
            values += [*before["_buffers"].values(), *before.values()]
        ids = {id(value) for value in values if isinstance(value, Tensor)}
        return any(id(tensor) in ids for tensor in tensors)

    def undo(self) -> None:
        """Restores the attributes that the modules had before the call."""
        for table, before in self._tables:
            for name in [name for name in table if name not in before]:
                del table[name]
            table.update(before)

    def make_plain(self) -> bool:
        """Converts traced numbers that the call has stored in attributes to ordinary numbers.

        Searches lists and dicts in attributes too, but not the lists and dicts inside these.
        Returns whether it found a traced number.
        """
        has_stored = False
        for table, _ in self._tables:
            for values in (table, *table.values()):
                if type(values) in (dict, list):
                    has_stored = _make_plain(values) or has_stored
        return has_stored


def _make_plain(values: Any) -> bool:
    """Converts traced numbers in a list, or in the values of a dict, to ordinary numbers.

    Returns whether it found a traced number. Other values stay the same objects, because guards
    compare identities.
    """
    has_traced = False
    for key, value in values.items() if type(values) is dict else enumerate(values):
        ordinary = plain_item(value)
        if ordinary is not value:
            values[key] = ordinary
            has_traced = True
    return has_traced


def _named_by(function: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the globals of a function, and the names in its code."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return getattr(function, "__globals__", {}), code.co_names if code is not None else ()


def _globals_of(function: Any) -> list[Guard]:
    """Returns guards for the numbers and strings among the globals that a function names."""
    table, names = _named_by(function)
    return [(table, name, table[name]) for name in names if type(table.get(name)) in _CONSTANTS]


def _known_to(function: Any) -> Iterator[Any]:
    """Yields the globals that a function names, and the contents of its closure."""
    table, names = _named_by(function)
    yield from (table.get(name) for name in names)
    for cell in getattr(inspect.unwrap(function), "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the closure variable has no value yet
            yield cell.cell_contents
