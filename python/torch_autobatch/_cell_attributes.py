"""What modules and functions hold besides parameters, as a trace of a dynamic cell finds it.

A trace has the values of attributes (a temperature, a dropout rate) and of numbers among globals
within it, and it outlives the block. So they are looked at again before it is replayed, but for
those that the function itself changes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from torch_autobatch._cell_sizes import TracedShape, is_traced, plain

Guard = tuple[dict[Any, Any], str | None, Any]

_OTHERS = ("_parameters", "_buffers", "_modules", "training")  # `guards` looks at these
_CONSTANTS = (bool, int, float, str)


class Attributes:
    """Of these modules, before a call. `function`: what is called."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        self._tables = [(module.__dict__, dict(module.__dict__)) for module in modules]
        self._functions = [function, *(type(module).forward for module in modules)]
        self._globals = [guard for function in self._functions for guard in _globals_of(function)]

    def guards(self) -> list[Guard]:
        """After the call: those that it has left as they were."""
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
        """Whether one is a buffer or an attribute, a function's global or in its closure."""
        values = [value for function in self._functions for value in _known_to(function)]
        for _, before in self._tables:
            values += [*before["_buffers"].values(), *before.values()]
        ids = {id(value) for value in values if isinstance(value, Tensor)}
        return any(id(tensor) in ids for tensor in tensors)

    def make_plain(self) -> None:
        """Sizes that the call has kept become ordinary numbers."""
        for table, _ in self._tables:
            for name, value in table.items():
                if is_traced(value) or type(value) in (tuple, TracedShape):
                    table[name] = plain(value)
                elif type(value) is list:
                    value[:] = (plain(item) for item in value)
                elif type(value) is dict:
                    value.update({key: plain(item) for key, item in value.items()})


def _named_by(function: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Its globals, and what it names."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return getattr(function, "__globals__", {}), code.co_names if code is not None else ()


def _globals_of(function: Any) -> list[Guard]:
    """The numbers and texts among the globals that a function names."""
    table, names = _named_by(function)
    return [(table, name, table[name]) for name in names if type(table.get(name)) in _CONSTANTS]


def _known_to(function: Any) -> Iterator[Any]:
    """The globals that a function names, and what is in its closure."""
    table, names = _named_by(function)
    yield from (table.get(name) for name in names)
    for cell in getattr(inspect.unwrap(function), "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty so far
            yield cell.cell_contents
