"""Arguments of a dynamic cell that are objects with tensors in them: a key-value cache, a graph.

Such an object is taken apart as lists and dicts are: its tensors and ints are inputs of the
program. So are the object and the lists and dicts in it, for a call may put other tensors there
(``self.keys = torch.cat([self.keys, new])``): the program's last step does the same.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_autobatch._cell_program import UntraceableError, quoted
from torch_autobatch._cell_sizes import TracedFloat, TracedInt, TracedShape, is_traced, plain

_MOST_VALUES = 512  # of an object that is looked through
_OTHERS = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, Tensor)
_TRACED = (TracedInt, TracedFloat)
_NUMBERS = (int, float, complex, *_TRACED, torch.dtype, torch.device)
_HEAP_TYPE = 1 << 9  # of a class made in Python: CPython's Py_TPFLAGS_HEAPTYPE

DELETED = object()


@functools.lru_cache(1024)
def _consists_of_attributes(kind: Any) -> bool:
    others = (*_OTHERS, *_NUMBERS, bytes, str, tuple, list, dict, set, frozenset)
    is_made_in_python = bool(kind.__flags__ & _HEAP_TYPE)
    return is_made_in_python and not issubclass(kind, others) and kind.__dictoffset__ != 0


@functools.lru_cache(1024)
def _has_slots(kind: Any) -> bool:
    return any(
        isinstance(item, types.MemberDescriptorType)
        for base in kind.__mro__
        if base.__flags__ & _HEAP_TYPE
        for item in vars(base).values()
    )


def has_slots(value: Any) -> bool:
    """Whether it has attributes that are not in its dict."""
    kind: Any = type(value)
    return bool(_has_slots(kind))


@functools.lru_cache(1024)
def flags_of(kind: type) -> int:
    """What C++ asks of an argument's class (dynamic_arguments.cpp)."""
    is_collection = issubclass(kind, Collection) and not issubclass(kind, (nn.Module, type))
    has_hidden_state = _has_slots(kind) and kind.__module__ not in sys.stdlib_module_names
    is_refused = is_collection or has_hidden_state or issubclass(kind, (Tensor, *_TRACED))
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    flags = (_consists_of_attributes(kind), _has_slots(kind), is_refused, is_named_tuple)
    return sum(flag << bit for bit, flag in enumerate(flags))


def is_object(value: Any) -> bool:
    """Whether it is of a class made in Python, and has attributes."""
    kind: Any = type(value)
    return bool(_consists_of_attributes(kind))


def contents(value: Any) -> dict[Any, Any]:
    """The attributes of an object, the items of a list, tuple or dict; else nothing.

    It may be the object's own dict: not to be changed.
    """
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return vars(value) if is_object(value) else {}


def values_in(*values: Any) -> Iterator[Any]:
    """They, and what they consist of."""
    seen: dict[int, Any] = {}
    waiting = list(reversed(values))
    while waiting:
        value = waiting.pop()
        yield value
        inner = contents(value)
        if inner and id(value) not in seen and len(seen) < _MOST_VALUES:
            seen[id(value)] = value
            waiting.extend(reversed(inner.values()))


def holds_tensors(value: Any) -> bool:
    return any(isinstance(item, Tensor) for item in values_in(value))


def has_state(value: Any) -> bool:
    """Whether it is an object with tensors in it."""
    return is_object(value) and holds_tensors(value)


def put(container: Any, name: Any, value: Any) -> None:
    """Another attribute of an object, another item of a list or dict."""
    table = vars(container) if is_object(container) else container
    table[name] = value


def plain_item(value: Any) -> Any:
    """The same, if nothing in it is traced. Lists and dicts stay the same objects."""
    if is_traced(value):
        return plain(value)
    if not isinstance(value, tuple):
        return value
    items = [plain_item(item) for item in value]
    if type(value) is TracedShape:
        return torch.Size(items)
    if all(ours is theirs for ours, theirs in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def make_plain(*values: Any) -> None:
    """Sizes that are kept in them become ordinary numbers."""
    for container in values_in(*values):
        if isinstance(container, tuple):
            continue
        tables: list[Any] = [container] if isinstance(container, (list, dict)) else []
        if hasattr(container, "__dict__") and (is_object(container) or tables):
            tables.append(vars(container))
        for table in tables:
            items = dict(enumerate(table)) if isinstance(table, list) else dict(table)
            if any(map(is_traced, items)):  # keys
                table.clear()
                table.update({plain(name): plain_item(item) for name, item in items.items()})
                continue
            for name, item in items.items():
                ordinary = plain_item(item)
                if ordinary is not item:
                    table[name] = ordinary


def watched(values: Sequence[Any]) -> Changes:
    """What becomes of objects other than modules."""
    objects = [value for value in values if not isinstance(value, _OTHERS)]
    found = {id(value): value for value in values_in(*objects) if contents(value)}
    return Changes(list(found.values()), [""] * len(found))


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
                kept = [name for name in before if name in after]
                added = [name for name in after if name not in before]
                if list(after) != kept + added:
                    raise UntraceableError("it changes the order of an object's attributes")
                for name in [*before, *added]:
                    value = after.get(name, DELETED)
                    if name not in before or before[name] is not value:
                        yield f"({variable}, {quoted(name)}, {source_of(value)})"
            elif list(before) != list(after) or any(before[k] is not after[k] for k in before):
                items = ", ".join(
                    f"{quoted(key)}: {source_of(item)}" for key, item in after.items()
                )
                yield f"({variable}, None, {{{items}}})"

    def is_empty(self) -> bool:
        try:
            return next(self.sources(lambda _: ""), None) is None
        except UntraceableError:
            return False

    def make_plain(self) -> None:
        make_plain(*self._containers)


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


def make_dict(kind: Any, attributes: dict[str, Any], keys: Sequence[str]) -> Any:
    """A new dict with attributes, some of which are its items, without its own checks of them."""
    found: Any = kind.__new__(kind)
    add = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
    for key in keys:
        add(found, key, attributes[key])
    vars(found).update(attributes)
    return found
