"""The arguments of a dynamic cell's call: what tells its kind, and what its program is given."""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from torch_autobatch._cell_objects import (
    BY_VALUE,
    contents,
    exactly,
    has_slots,
    has_state,
    is_fixed,
    put,
)
from torch_autobatch._cell_sizes import is_traced, traced
from torch_autobatch._cell_trace import Trace, context

_DEEPEST = 32  # of containers within each other


class UnknownArgumentError(Exception):
    """An argument that can't be told apart from others."""


@dataclasses.dataclass
class Arguments:
    """A call's arguments, taken apart."""

    kind: list[Any] = dataclasses.field(default_factory=list)
    inputs: list[Any] = dataclasses.field(default_factory=list)  # tensors, ints, containers
    objects: list[Any] = dataclasses.field(default_factory=list)  # whose ids are in `kind`
    # Objects with tensors in them, and their lists and dicts: by ids, the numbers of these inputs.
    containers: dict[int, int] = dataclasses.field(default_factory=dict)
    ints: list[tuple[Any, Any, int]] = dataclasses.field(default_factory=list)  # in containers
    counts: dict[int, int] = dataclasses.field(default_factory=dict)  # of inputs in an object

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind is Tensor:
            self._add_tensor(value)
        elif kind is nn.Parameter:  # the function may know it by another way too
            self.kind += (kind, id(value))
            self.inputs.append(value)
            self.objects.append(value)
        elif kind is int:
            self.kind.append(int)
            self.inputs.append(value)
        elif is_fixed(value) and kind is not tuple:
            self.kind.append(exactly(value))
        elif kind is tuple or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            self.kind += (kind, len(value))
            for item in value:
                self.add(item)
        elif kind is list or kind is dict or has_state(value):
            before = len(self.inputs)
            self._add_container(value)
            self.counts.setdefault(id(value), len(self.inputs) - before)
        elif kind is torch.Size or kind is range:
            self.kind += (kind, *value)
        else:
            self._add_other(value)

    def _add_other(self, value: Any) -> None:
        """What is told by its identity: it is not to change."""
        is_collection = isinstance(value, Collection) and not isinstance(value, (nn.Module, type))
        if is_collection or isinstance(value, Tensor) or is_traced(value):
            raise UnknownArgumentError
        if has_slots(value) and type(value).__module__ not in sys.stdlib_module_names:
            raise UnknownArgumentError
        self.kind += (type(value), id(value))
        self.objects.append(value)

    def _add_tensor(self, value: Tensor) -> None:
        self.kind += (Tensor, value.dtype, value.dim(), value.requires_grad, value.device)
        self.inputs.append(value)

    def _add_container(self, value: Any, depth: int = 0) -> None:
        known = self.containers.setdefault(id(value), len(self.inputs))
        if known < len(self.inputs):
            self.kind += ("known", known)
            return
        if depth > _DEEPEST or has_slots(value):
            raise UnknownArgumentError
        items = contents(value)
        self.kind += (type(value), *map(exactly, items))
        self.inputs.append(value)
        for name, item in items.items():
            kind = type(item)
            if kind is Tensor:
                self._add_tensor(item)
            elif kind in BY_VALUE or (kind is tuple and is_fixed(item)):
                self.kind.append(exactly(item))
            elif kind is list or kind is dict or has_state(item):
                self._add_container(item, depth + 1)
            elif kind is int:
                self.ints.append((value, name, len(self.inputs)))
                self.add(item)
            elif isinstance(item, weakref.ref) and id(item()) in self.containers:
                self.kind += (weakref.ref, self.containers[id(item())])
            elif isinstance(item, tuple) and not all(isinstance(i, Tensor) for i in item):
                raise UnknownArgumentError
            else:
                self.add(item)

    def tensors(self) -> list[Tensor]:
        """But for parameters, which `kind` tells apart."""
        return [value for value in self.inputs if type(value) is Tensor]

    def key(self) -> tuple[Any, ...]:
        ids = [id(value) for value in self.inputs if isinstance(value, Tensor)]
        same = tuple(ids.index(i) for i in ids) if len(set(ids)) < len(ids) else ()
        return (*self.kind, same, torch.is_grad_enabled(), *context())

    def sizes(self) -> tuple[int, ...]:
        found: list[int] = []
        for value in self.inputs:
            if isinstance(value, Tensor):
                found.extend(value.shape)
            elif isinstance(value, int):
                found.append(value)
        return tuple(found)

    def names_of_sizes(self) -> list[str]:
        """In a program, in the same order."""
        found: list[str] = []
        for i, value in enumerate(self.inputs):
            if isinstance(value, Tensor):
                found.extend(f"x{i}.size({d})" for d in range(value.dim()))
            elif isinstance(value, int):
                found.append(f"x{i}")
        return found

    def modules(self, args: tuple[Any, ...]) -> list[nn.Module]:
        return [value for value in (*args[:1], *self.objects) if isinstance(value, nn.Module)]


class TracedNumbers:
    """Puts traced numbers in the place of ints among arguments, in the order of `Arguments`."""

    def __init__(self, arguments: Arguments, trace: Trace) -> None:
        self._trace = trace
        self._next = 0
        self._counts = dict(arguments.counts)
        for container, name, i in arguments.ints:
            put(container, name, traced(contents(container)[name], trace, f"x{i}"))

    def _skip(self, count: int) -> int:
        self._next += count
        return self._next - count

    def put(self, value: Any) -> Any:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            self._skip(1)
        elif kind is int:
            return traced(value, self._trace, f"x{self._skip(1)}")
        elif kind is tuple:
            return tuple(self.put(item) for item in value)
        elif isinstance(value, tuple) and hasattr(kind, "_fields"):
            return kind(*(self.put(item) for item in value))
        else:
            self._skip(self._counts.pop(id(value), 0))
        return value
