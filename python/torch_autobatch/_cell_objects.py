"""Arguments of a dynamic cell that are objects with tensors, such as a key-value cache or a graph.

An object with tensors is flattened like a list or dict: its tensors and ints are inputs of the
program. The object and the lists and dicts in it are inputs too, because a call may store other
tensors there (``self.keys = torch.cat([self.keys, new])``). The last step of the program repeats
these stores.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_autobatch._cell_program import UntraceableError, quoted, structure_of
from torch_autobatch._cell_sizes import TracedFloat, TracedInt, TracedShape, is_traced, plain

_MOST_VALUES = 512  # maximum number of containers that are searched in one object
_OTHERS = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, Tensor)
_TRACED = (TracedInt, TracedFloat)
_NUMBERS = (int, float, complex, *_TRACED, torch.dtype, torch.device)
_HEAP_TYPE = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE, set for classes defined in Python

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
    """Returns whether ``value`` has attributes that are not in its ``__dict__``."""
    kind: Any = type(value)
    return bool(_has_slots(kind))


@functools.lru_cache(1024)
def flags_of(kind: type) -> int:
    """Returns properties of an argument's class as bits: ``Flag`` in dynamic_arguments.cpp."""
    is_collection = issubclass(kind, Collection) and not issubclass(kind, (nn.Module, type))
    has_hidden_state = _has_slots(kind) and kind.__module__ not in sys.stdlib_module_names
    is_refused = is_collection or has_hidden_state or issubclass(kind, (Tensor, *_TRACED))
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    flags = (_consists_of_attributes(kind), _has_slots(kind), is_refused, is_named_tuple)
    return sum(flag << bit for bit, flag in enumerate(flags))


def is_object(value: Any) -> bool:
    """Returns whether the class of ``value`` is defined in Python and consists of attributes.

    Returns false for modules, functions, tensors, numbers and containers.
    """
    kind: Any = type(value)
    return bool(_consists_of_attributes(kind))


def contents(value: Any) -> dict[Any, Any]:
    """Returns the attributes of an object or the items of a container. Otherwise returns {}.

    The caller must not change the result, because it may be the object's ``__dict__``.
    """
    if isinstance(value, dict):
        return value
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    return vars(value) if is_object(value) else {}


def values_in(*values: Any) -> Iterator[Any]:
    """Yields ``values`` and, recursively, their contents."""
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
    """Returns whether ``value`` is an object with tensors in it."""
    return is_object(value) and holds_tensors(value)


def put(container: Any, name: Any, value: Any) -> None:
    """Sets an attribute of an object, or an item of a list or dict."""
    table = vars(container) if is_object(container) else container
    table[name] = value


def plain_item(value: Any) -> Any:
    """Converts a traced number, or the traced numbers in a tuple, to ordinary numbers.

    Returns the same object if nothing in it is traced. Lists and dicts are not searched.
    """
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


def make_closure_plain(function: Any) -> None:
    """Converts traced numbers in the variables that a function takes from an enclosing function."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # the variable has no value yet
            cell.cell_contents = plain_item(cell.cell_contents)


def make_plain(*values: Any) -> None:
    """Converts traced numbers in ``values`` and their contents to ordinary numbers, in place."""
    for container in values_in(*values):
        if isinstance(container, tuple):
            continue
        tables: list[Any] = [container] if isinstance(container, (list, dict)) else []
        if hasattr(container, "__dict__") and (is_object(container) or tables):
            tables.append(vars(container))
        for table in tables:
            items = dict(enumerate(table)) if isinstance(table, list) else dict(table)
            if any(map(is_traced, items)):  # some keys are traced numbers
                table.clear()
                table.update({plain(name): plain_item(item) for name, item in items.items()})
                continue
            for name, item in items.items():
                ordinary = plain_item(item)
                if ordinary is not item:
                    table[name] = ordinary


def watched(values: Sequence[Any]) -> Changes:
    """Starts to record changes of objects other than modules, functions and tensors."""
    objects = [value for value in values if not isinstance(value, _OTHERS)]
    found = {id(value): value for value in values_in(*objects) if contents(value)}
    return Changes(list(found.values()), [""] * len(found))


class Changes:
    """Changes that a call makes to containers. `names`: their variables in the program."""

    def __init__(self, containers: Sequence[Any], names: Sequence[str]) -> None:
        self.names = names
        self._containers = containers
        self._names = {id(c): name for c, name in zip(containers, names, strict=True)}
        self._before = [dict(contents(container)) for container in containers]

    def name_of(self, value: Any) -> str | None:
        return self._names.get(id(value))

    def sources(self, source_of: Callable[[Any], str]) -> Iterator[str]:
        """Yields Python source for the arguments of :func:`change`.

        `source_of`: a function that returns the source of a value.
        """
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
                yield f"({variable}, None, {structure_of(after, source_of)})"

    def is_empty(self) -> bool:
        try:
            return next(self.sources(lambda _: ""), None) is None
        except UntraceableError:
            return False

    def make_plain(self) -> None:
        make_plain(*self._containers)

    def undo(self) -> None:
        for container, before in zip(self._containers, self._before, strict=True):
            if isinstance(container, list):
                container[:] = before.values()
            elif not isinstance(container, tuple):
                table = vars(container) if is_object(container) else container
                table.clear()
                table.update(before)


def change(result: Any, *changes: tuple[Any, Any, Any]) -> Any:
    """Makes changes to containers, then returns ``result``.

    A change is (container, attribute, value), or (container, None, dict of all items).
    """
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
    """Makes an object without calling its ``__init__``."""
    found: Any = object.__new__(kind)
    vars(found).update(attributes)
    return found


def make_dict(kind: Any, attributes: dict[str, Any], keys: Sequence[str]) -> Any:
    """Makes a dict with attributes. The attributes in ``keys`` are items too.

    The methods of ``kind`` that check items are not called.
    """
    found: Any = kind.__new__(kind)
    add = OrderedDict.__setitem__ if issubclass(kind, OrderedDict) else dict.__setitem__
    for key in keys:
        add(found, key, attributes[key])
    vars(found).update(attributes)
    return found
