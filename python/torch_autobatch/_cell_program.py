"""The program that a call of a dynamic cell becomes: lines of Python source."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

MISMATCH = object()  # what a program returns for sizes that it is not for

VARIABLE = re.compile(r"\b[xrsk]\d+\b")
_COMPARED = (float, complex, bytes, torch.device)  # constants that are the same if they are equal


class UntraceableError(Exception):
    """The function does something that a program can't repeat; the message says what."""


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a call is not replayed, and the line that it comes of."""

    text: str
    place: str


@dataclasses.dataclass(frozen=True)
class Line:
    """An assignment, or a condition on sizes.

    Variables are ``x`` for the call's tensors and ints, ``r`` for results of PyTorch's functions,
    ``s`` for sizes and ``k`` for constants (functions, weights, dtypes).
    """

    target: str  # empty: a condition that must hold
    source: str
    is_number: bool = False
    name: str = ""  # of the function that is called
    writes: str = ""  # the variable that the call writes to
    keeps_type: bool = False  # so would the op that is not in place, to which it gives its result
    fresh: bool = False  # a call whose result has memory of its own
    selects: bool = False  # a call that takes or writes elements that follow from values
    reads: bool = False  # a condition on values, which must stay where it is
    place: str = dataclasses.field(default="", compare=False)  # of a condition: who has asked

    @property
    def is_condition(self) -> bool:
        return not self.target

    @property
    def is_call(self) -> bool:
        return bool(self.target) and not self.is_number

    def variables(self) -> set[str]:
        """Those that it reads; constants are none."""
        return {name for name in VARIABLE.findall(self.source) if name[0] != "k"}

    def arguments(self) -> set[str]:
        """Of a call: variables and constants, but for the function."""
        start = 0 if self.name.startswith("__get__") or self.reads else self.source.find("(")
        return set(VARIABLE.findall(self.source, start))

    def renamed(self, names: dict[str, str]) -> Line:
        """The same with other variables, where `names` has them."""
        writes = names.get(self.writes, self.writes)
        return dataclasses.replace(self, source=renamed(self.source, names), writes=writes)


def renamed(source: str, names: dict[str, str]) -> str:
    return VARIABLE.sub(lambda match: names.get(match.group(), match.group()), source)


def quoted(key: Any) -> str:
    """Source for a key or name, which must not look like a variable."""
    found = repr(key)
    if VARIABLE.search(found):
        raise UntraceableError(f"a key or name in its result is {found}")
    return found


def are_the_same(ours: Any, theirs: Any) -> bool:
    if ours is theirs:
        return True
    return type(ours) is type(theirs) and type(ours) in _COMPARED and ours == theirs


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class Program:
    """A call without its Python code."""

    def __init__(
        self,
        inputs: Sequence[str],
        lines: Sequence[Line],
        returned: str,
        constants: dict[str, Any],
        has_effects: bool,
        int_inputs: Sequence[str] = (),
        containers: Sequence[str] = (),
        asks_after_draws: bool = False,
        made: Sequence[Any] = (),
    ) -> None:
        self.inputs = tuple(inputs)
        self.int_inputs = tuple(int_inputs)
        self.containers = tuple(containers)  # inputs that are objects, lists and dicts
        self.lines = tuple(lines)
        self.returned = returned
        self.constants = constants
        self.has_effects = has_effects
        # Where a condition fails, random numbers have been drawn.
        self.asks_after_draws = asks_after_draws
        self.made = list(made)  # objects without tensors that the traced call has given

    def difference(self, other: Program) -> Reason | None:
        """What first differs, for people."""
        for ours, theirs in zip(self.lines, other.lines, strict=False):
            if ours != theirs:
                steps = (self._readable(ours.source), other._readable(theirs.source))
                return Reason(", then ".join(steps), ours.place)
        if len(self.lines) != len(other.lines):
            return Reason(f"{len(self.lines)} steps, then {len(other.lines)}", "")
        if self.returned != other.returned:
            return Reason("another result", "")
        for name, ours in self.constants.items():
            if not are_the_same(ours, other.constants[name]):
                return Reason(f"{ours!r}, then {other.constants[name]!r}"[:200], "")
        return None

    def _readable(self, source: str) -> str:
        def of(match: re.Match[str]) -> str:
            value = self.constants.get(match.group())
            return getattr(value, "__name__", match.group()) if value is not None else match.group()

        return VARIABLE.sub(of, source)

    def weights(self) -> list[Tensor]:
        return [value for value in self.constants.values() if isinstance(value, Tensor)]

    def returns_data(self) -> bool:
        """Whether some result follows from the inputs, and from no parameter."""
        known = {name for name, value in self.constants.items() if not _is_trained(value)}
        known |= set(self.inputs) - set(self.containers)
        for line in self.lines:
            if line.is_number or line.arguments() <= known:
                known.add(line.target)
        returned = (name for name in VARIABLE.findall(self.returned) if name[0] != "k")
        return not known.isdisjoint(returned)

    def source(self) -> str:
        return source_of_function(self.inputs, self.lines, self.returned)


def structure_of(value: Any, source_of_item: Callable[[Any], str]) -> str:
    """Source for a tuple, a list or a dict of things that have their own."""
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
    """Reports and errors say that the function's ops are at that line."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = 0
        elif isinstance(node, (ast.arg, ast.keyword)):
            node.lineno = node.end_lineno = line
    namespace = {**constants, "MISMATCH": MISMATCH}
    exec(compile(tree, file, "exec"), namespace)
    program: Callable[..., Any] = namespace["program"]
    return program
