"""Turns a program's regions into ``ab.map`` over its instances, for ``--map``.

The statements of one instance in a region become a function. Both runs call the functions; the
eager run calls them one after the other. The functions must not depend on each other: if eager
results change with the order of the instances, the program is not compared (``execute.check``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch_autobatch as ab

from tests.fuzz.program import LETTERS, Program, Statement, walk

_LETTER = re.compile(rf"\b([{LETTERS}])\d+\b")
_instance: ContextVar[int | None] = ContextVar("instance", default=None)


class Log(list[Any]):
    """A list whose entries are sorted by instance, independent of when they were appended."""

    def __init__(self) -> None:
        self.maps = 0
        self.keyed: list[tuple[tuple[int, int, int], Any]] = []

    def append(self, entry: Any) -> None:
        instance = _instance.get()
        at = (self.maps, 1, 0) if instance is None else (self.maps, 0, instance)
        self.keyed.append((at, entry))

    def settle(self) -> None:
        """Fills the list from the sorted entries."""
        self[:] = [entry for _, entry in sorted(self.keyed, key=lambda pair: pair[0])]


def runner(log: Log, *, batched: bool, backwards: bool) -> Callable[[list[Any]], None]:
    """Returns the function that calls a region's functions."""

    def run(functions: list[Callable[[], None]]) -> None:
        log.maps += 1

        def call(pair: tuple[int, Callable[[], None]]) -> None:
            token = _instance.set(pair[0])
            try:
                pair[1]()
            finally:
                _instance.reset(token)

        pairs = list(enumerate(functions))
        ab.map(call, pairs[::-1] if backwards else pairs, enabled=batched)

    return run


def source(program: Program) -> str:
    """Returns the program's source, with the instances of each region as functions."""
    return "\n".join(_lines(program.statements)) + "\n"


def _lines(statements: Iterable[Statement]) -> Iterator[str]:
    for statement in statements:
        if statement.body is None:
            yield statement.code
            continue
        is_region = statement.code.startswith("with batch(")
        inner = _region(statement.body) if is_region else _lines(statement.body)
        yield statement.code
        yield from (f"    {line}" for line in [*inner] or ["pass"])


def _region(body: list[Statement]) -> Iterator[str]:
    parts: dict[str, list[Statement]] = {}
    for statement in body:
        letters = {found for s in walk([statement]) for found in _LETTER.findall(s.code)}
        if len(letters) == 1:
            parts.setdefault(letters.pop(), []).append(statement)
            continue
        yield from _instances(parts)
        parts = {}
        yield from _lines([statement])
    yield from _instances(parts)


def _instances(parts: dict[str, list[Statement]]) -> Iterator[str]:
    if not parts:
        return
    for letter, statements in sorted(parts.items()):
        code = list(_lines(statements))
        names = sorted({m[0] for line in code for m in _LETTER.finditer(line)})
        yield f"def instance_{letter}():"
        yield f"    global {', '.join(names)}"
        yield from (f"    {line}" for line in code)
    yield f"run_map([{', '.join(f'instance_{letter}' for letter in sorted(parts))}])"
