"""Arguments of a dynamic cell that are objects with tensors in them: a key-value cache, a graph.

Such an object is taken apart as lists and dicts are: its tensors and ints are inputs of the
program. So are the object and the lists and dicts in it, for a call may put other tensors there
(``self.keys = torch.cat([self.keys, new])``): the program's last step does the same.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_autobatch._cell_program import quoted
from torch_autobatch._cell_sizes import is_traced, plain

_MOST_VALUES = 512  # of an object that is looked through
_OTHERS = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, Tensor)
BY_VALUE = frozenset((bool, float, str, bytes, type(None), torch.dtype, torch.device))
_HEAP_TYPE = 1 << 9  # of a class made in Python: CPython's Py_TPFLAGS_HEAPTYPE

DELETED = object()


@functools.lru_cache(1024)
def _consists_of_attributes(kind: Any) -> bool:
    others = (*_OTHERS, torch.dtype, torch.device, bytes, str, int, float, tuple, list, dict, set)
    is_made_in_python = bool(kind.__flags__ & _HEAP_TYPE)
    return is_made_in_python and not issubclass(kind, others) and kind.__dictoffset__ != 0


def is_object(value: Any) -> bool:
    """Whether it is of a class made in Python, and consists of attributes."""
    kind: Any = type(value)
    return bool(_consists_of_attributes(kind))


def contents(value: Any) -> dict[Any, Any]:
    """The attributes of an object, the items of a list, tuple or dict; else nothing. Not a copy."""
    kind = type(value)
    if kind is dict:
        return value  # type: ignore[no-any-return]
    if kind is list or kind is tuple:
        return dict(enumerate(value))
    return vars(value) if is_object(value) else {}


def values_in(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """It, and what it consists of."""
    seen = {} if seen is None else seen
    yield value
    inner = contents(value)
    if not inner or id(value) in seen or len(seen) >= _MOST_VALUES:
        return
    seen[id(value)] = value
    for item in inner.values():
        yield from values_in(item, seen)


def has_state(value: Any) -> bool:
    """Whether it is an object with tensors in it."""
    return is_object(value) and any(isinstance(item, Tensor) for item in values_in(value))


def put(container: Any, name: Any, value: Any) -> None:
    """Another attribute of an object, another item of a list or dict."""
    table = vars(container) if is_object(container) else container
    table[name] = value


def make_plain(value: Any) -> None:
    """Sizes that are kept in it become ordinary numbers."""
    for container in values_in(value):
        if type(container) is not tuple:
            for name, item in list(contents(container).items()):
                if is_traced(item) or (type(item) is tuple and any(map(is_traced, item))):
                    put(container, name, plain(item))


class Changes:
    """What a call does to containers. `names`: their variables in the program."""

    def __init__(self, containers: Sequence[Any], names: Sequence[str]) -> None:
        self.names = names
        self._containers = containers
        self._names = {id(c): name for c, name in zip(containers, names, strict=True)}
        self._before = [dict(contents(container)) for container in containers]

    def name_of(self, value: Any) -> str | None:
        return self._names.get(id(value))

    def sources(self, source_of: Callable[[Any], str]) -> Iterator[str]:
        """Python source for the arguments of :func:`change`. `source_of` gives that of a value."""
        for container, before in zip(self._containers, self._before, strict=True):
            variable, after = self._names[id(container)], contents(container)
            if is_object(container):
                for name in before.keys() | after.keys():
                    value = after.get(name, DELETED)
                    if name not in before or before[name] is not value:
                        yield f"({variable}, {quoted(name)}, {source_of(value)})"
            elif before.keys() != after.keys() or any(before[k] is not after[k] for k in before):
                items = ", ".join(
                    f"{quoted(key)}: {source_of(item)}" for key, item in after.items()
                )
                yield f"({variable}, None, {{{items}}})"

    def make_plain(self) -> None:
        for container in self._containers:
            make_plain(container)


def change(result: Any, *changes: tuple[Any, Any, Any]) -> Any:
    """Makes changes (container, attribute or None, value or all items); then gives the result."""
    for container, name, value in changes:
        if value is DELETED:
            del vars(container)[name]
        elif name is not None:
            vars(container)[name] = value
        elif type(container) is list:
            container[:] = value.values()
        else:
            container.clear()
            container.update(value)
    return result


def make(kind: type, attributes: dict[str, Any]) -> Any:
    """A new object."""
    found: Any = object.__new__(kind)
    vars(found).update(attributes)
    return found
