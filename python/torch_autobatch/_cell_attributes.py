"""What modules and functions hold besides parameters, as a trace of a dynamic cell finds it.

A trace has the values of attributes (a temperature, a dropout rate) and of numbers among globals
within it, and it outlives the block. So they are looked at again before it is replayed, but for
those that the function itself changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from torch_autobatch._cell_sizes import TracedShape, is_traced, plain

Guard = tuple[dict[Any, Any], str | None, Any]

_OTHERS = ("_parameters", "_buffers", "_modules", "training")  # `guards` looks at these
_CONSTANTS = (bool, int, float, str)


class Attributes:
    """Of these modules, before a call. `function`: what is called."""

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        self._tables = [(module.__dict__, dict(module.__dict__)) for module in modules]
        self._globals = _globals_of(function)
        for module in modules:
            self._globals += _globals_of(type(module).forward)

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


def _globals_of(function: Any) -> list[Guard]:
    """The numbers and texts among the globals that a function names."""
    function = inspect.unwrap(function)
    table = getattr(function, "__globals__", {})
    names = function.__code__.co_names if hasattr(function, "__code__") else ()
    return [(table, name, table[name]) for name in names if type(table.get(name)) in _CONSTANTS]
