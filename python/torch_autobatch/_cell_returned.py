"""The source of the value that a dynamic cell's program returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_autobatch._cell_objects import (
    DELETED,
    Changes,
    change,
    has_slots,
    has_state,
    is_object,
    make,
    make_dict,
)
from torch_autobatch._cell_program import UntraceableError, quoted, structure_of
from torch_autobatch._cell_sizes import TracedShape


class ReturnedValue:
    """Writes the source of a traced call's result and of the call's changes to arguments.

    `expression`: returns the source of a tensor or a number. `constant`: returns the name of a
    constant. `objects`: the objects that the program makes.
    """

    def __init__(
        self,
        changes: Changes,
        expression: Callable[[Any], str],
        constant: Callable[[Any], str],
    ) -> None:
        self._changes = changes
        self._expression = expression
        self._constant = constant
        self._ids: set[int] = set()
        self.objects: list[Any] = []

    def source(self, value: Any) -> str:
        result = self._result(value)
        changes = list(self._changes.sources(self._result))
        if not changes:
            return result
        return f"{self._constant(change)}({', '.join([result, *changes])})"

    def _result(self, value: Any) -> str:
        known = self._changes.name_of(value)
        if known is not None:
            return known
        if isinstance(value, Tensor):
            return self._expression(value)
        kind = type(value)
        if is_object(value) and (has_state(value) or dataclasses.is_dataclass(value)):
            return self._new_object(value)
        self._note_made(value)
        if dataclasses.is_dataclass(value) and isinstance(value, dict):  # in transformers
            return self._dict_of_fields(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return f"{self._constant(kind)}({', '.join(self._result(item) for item in value)})"
        if kind is TracedShape or kind is torch.Size:
            return f"{self._constant(torch.Size)}({structure_of(value, self._result)})"
        if kind in (tuple, list, dict):
            return structure_of(value, self._result)
        if value is None or isinstance(value, (int, float, str)):
            return self._expression(value)
        if isinstance(value, (type, torch.dtype, torch.device)) or value is DELETED:
            return self._constant(value)
        raise UntraceableError("it returns a kind of object that a replay cannot construct")

    def _dict_of_fields(self, value: Any) -> str:
        attributes, kind = vars(value), self._constant(type(value))
        if all(attributes.get(key) is item for key, item in value.items()):
            made = structure_of(attributes, self._result)
            return (
                f"{self._constant(make_dict)}({kind}, {made}, {structure_of(tuple(value), quoted)})"
            )
        fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        given = {name: item for name, item in fields if item is not None}
        return f"{kind}(**{structure_of(given, self._result)})"

    def _note_made(self, value: Any) -> None:
        """Records an object that the program makes. An object may occur only once in the result."""
        if isinstance(value, (list, dict)) or is_object(value):
            if id(value) in self._ids:
                raise UntraceableError("its result contains the same object twice")
            self._ids.add(id(value))
            self.objects.append(value)

    def _new_object(self, value: Any) -> str:
        if has_slots(value):
            raise UntraceableError("it returns an object of a class with __slots__")
        self._note_made(value)
        attributes = structure_of(vars(value), self._result)
        return f"{self._constant(make)}({self._constant(type(value))}, {attributes})"
