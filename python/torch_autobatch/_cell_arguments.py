"""Arguments of a dynamic cell's call, and the traced numbers that replace its int arguments."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor, nn

from torch_autobatch._cell_objects import contents, put
from torch_autobatch._cell_sizes import traced
from torch_autobatch._cell_trace import Trace


@dataclasses.dataclass
class Arguments:
    """The results of ``_C.take_apart`` except the key (csrc/python/cells/dynamic_arguments.h)."""

    inputs: tuple[Any, ...]  # inputs of the program: tensors, ints, and containers of these
    objects: list[Any]  # kept alive, because the key contains their addresses
    # Maps the id of each object that holds tensors, and of each list and dict in it, to an index
    # among the inputs.
    containers: dict[int, int]
    # For each int in a container: the container, the int's name in it, and the index of the input.
    ints: list[tuple[Any, Any, int]]
    counts: dict[int, int]  # maps the id of a container to the number of inputs in it

    def tensors(self) -> list[Tensor]:
        """Returns the input tensors except parameters. (The key identifies the parameters.)"""
        return [value for value in self.inputs if type(value) is Tensor]

    def sizes(self) -> tuple[int, ...]:
        found: list[int] = []
        for value in self.inputs:
            if isinstance(value, Tensor):
                found.extend(value.shape)
            elif isinstance(value, int):
                found.append(value)
        return tuple(found)

    def names_of_sizes(self) -> list[str]:
        """Returns the Python source that computes each item of `sizes` in a program."""
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
    """Replaces ints among arguments with traced numbers, in the order of `Arguments.inputs`."""

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
