"""The program that replaces the function of a dynamic cell, as lines of Python source."""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torch_autobatch._cell_sizes import ROUNDING
from torch_autobatch._source import parse

MISMATCH = object()  # returned by a program if one of its conditions does not hold

VARIABLE = re.compile(r"\b[xrsk]\d+\b")
_COMPARED = (float, complex, bytes, torch.device)  # constants of these types are compared by value

# Types of constants that can't change.
_FIXED = (
    *(int, float, complex, str, bytes, torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class UntraceableError(Exception):
    """The function does something that a program can't repeat. The message says what."""


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a call is not replayed, and the source line that causes it."""

    text: str
    place: str


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a program: an assignment or a condition.

    The name of a variable is a letter and a number: ``x`` for the call's tensors and ints, ``r``
    for results of PyTorch's functions, ``s`` for sizes, ``k`` for constants (functions, weights,
    dtypes).
    """

    target: str  # if empty, the line is a condition that must hold
    source: str
    is_number: bool = False
    name: str = ""  # name of the called function
    writes: str = ""  # the variable that the call writes to
    keeps_type: bool = False  # whether the out-of-place op keeps dtype and strides
    fresh: bool = False  # whether the call's result has new memory
    draws: bool = False  # whether the call draws random numbers
    selects: bool = False  # whether values decide which elements the call reads or writes
    reads: bool = False  # whether the line is a condition on values, which must not be moved
    place: str = dataclasses.field(default="", compare=False)  # source line of a condition

    @property
    def is_condition(self) -> bool:
        return not self.target

    @property
    def is_call(self) -> bool:
        return bool(self.target) and not self.is_number

    def variables(self) -> set[str]:
        """Returns the variables that the line reads, without constants."""
        return {name for name in VARIABLE.findall(self.source) if name[0] != "k"}

    def arguments(self) -> set[str]:
        """Returns the variables and constants of a call, without the called function."""
        start = 0 if self.name.startswith("__get__") or self.reads else self.source.find("(")
        return set(VARIABLE.findall(self.source, start))

    def renamed(self, names: dict[str, str]) -> Line:
        """Returns the line with the variables in `names` replaced."""
        writes = names.get(self.writes, self.writes)
        return dataclasses.replace(self, source=renamed(self.source, names), writes=writes)


def renamed(source: str, names: dict[str, str]) -> str:
    return VARIABLE.sub(lambda match: names.get(match.group(), match.group()), source)


def quoted(key: Any) -> str:
    """Returns the Python source of a key or name.

    Raises:
        UntraceableError: if the key contains the name of a variable.
    """
    found = repr(key)
    if VARIABLE.search(found):
        raise UntraceableError(f"the string {found} has the form of a variable of the trace")
    return found


def are_the_same(ours: Any, theirs: Any) -> bool:
    if ours is theirs:
        return True
    return type(ours) is type(theirs) and type(ours) in _COMPARED and ours == theirs


def is_fixed(value: Any) -> bool:
    """Returns whether a constant is immutable. Tensors and arrays are mutable."""
    return callable(value) or isinstance(value, _FIXED)


def _shortened(text: str) -> str:
    """Returns the text on one line, for messages."""
    return textwrap.shorten(text, 80, placeholder=" …")


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


@dataclasses.dataclass(eq=False)
class Program:
    """The traced lines of a call. They replay the call without the function's Python code."""

    inputs: tuple[str, ...]
    int_inputs: tuple[str, ...]
    containers: tuple[str, ...]  # inputs that are objects, lists or dicts
    lines: tuple[Line, ...]
    returned: str
    constants: dict[str, Any]
    has_effects: bool
    asks_after_draws: bool  # whether a condition may fail after random numbers were drawn
    reads_floats: bool  # whether the program reads floats, which differ in most calls
    made: list[Any]  # objects without tensors that the traced call returned

    def difference(self, other: Program) -> Reason | None:
        """Returns the first difference from `other`, as text for a message; None if they agree."""
        for ours, theirs in zip(self.lines, other.lines, strict=False):
            if ours != theirs:
                steps = (self._readable(ours.source), other._readable(theirs.source))
                return Reason(", then ".join(map(_shortened, steps)), ours.place)
        if len(self.lines) != len(other.lines):
            return Reason(f"{len(self.lines)} steps, then {len(other.lines)} steps", "")
        if self.returned != other.returned:
            return Reason("a different result", "")
        for name, ours in self.constants.items():
            if not are_the_same(ours, other.constants[name]):
                steps = (_described(ours), _described(other.constants[name]))
                return Reason(", then ".join(map(_shortened, steps)), "")
        return None

    def _readable(self, source: str) -> str:
        def of(match: re.Match[str]) -> str:
            value = self.constants.get(match.group())
            return getattr(value, "__name__", match.group()) if value is not None else match.group()

        return VARIABLE.sub(of, source)

    def weights(self) -> list[Tensor]:
        return [value for value in self.constants.values() if isinstance(value, Tensor)]

    def returns_data(self) -> bool:
        """Returns whether some result depends only on inputs, and not on a trained parameter."""
        known = {name for name, value in self.constants.items() if not _is_trained(value)}
        known |= set(self.inputs) - set(self.containers)
        for line in self.lines:
            if line.is_number or line.arguments() <= known:
                known.add(line.target)
        returned = (name for name in VARIABLE.findall(self.returned) if name[0] != "k")
        return not known.isdisjoint(returned)


def _described(constant: Any) -> str:
    """Describes a constant in a message. (The repr of a pending tensor would cause a flush.)"""
    if isinstance(constant, Tensor):
        return f"a tensor with the sizes {list(constant.shape)}"
    return repr(constant)


def structure_of(value: Any, source_of_item: Callable[[Any], str]) -> str:
    """Returns the source of a container. `source_of_item` returns the source of an item."""
    if isinstance(value, dict):
        items = (f"{quoted(key)}: {source_of_item(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    items = (f"{source_of_item(item)}, " for item in value)
    return f"[{''.join(items)}]" if isinstance(value, list) else f"({''.join(items)})"


def source_of_function(parameters: Iterable[str], lines: Iterable[Line], returned: str) -> str:
    body = (
        f"if not ({line.source}): return MISMATCH"
        if line.is_condition
        else f"{line.target} = {line.source}"
        for line in lines
    )
    return "\n    ".join([f"def program({', '.join(parameters)}):", *body, f"return {returned}"])


def compile_function(
    source: str, constants: dict[str, Any], file: str, line: int
) -> Callable[..., Any]:
    """Compiles the source of a program.

    In reports and errors, the program's ops are located at `file` and `line`.
    """
    tree = parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
        elif isinstance(node, (ast.arg, ast.keyword)):
            node.lineno = node.end_lineno = line
    namespace = {**ROUNDING, **constants, "MISMATCH": MISMATCH}
    exec(compile(tree, file, "exec"), namespace)
    program: Callable[..., Any] = namespace["program"]
    return program
