"""Turns a program's plain assignments into cells (``ab.cell``), for ``--cells``.

Consecutive assignments of one instance are cut into functions of the variables that they read.
Instances with the same text share a function, so that a cell is called several times. Both runs
call the functions, but only the batched run makes them cells.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from typing import Any

import torch_autobatch as ab
from torch import Tensor
from torch_autobatch import _cell_templates

from tests.fuzz.program import LETTERS, Program, Statement, assigned, used

_LETTER = re.compile(rf"\b[{LETTERS}](?=\d+\b)")
_SHARED = re.compile(r"[WBSZ]\d+")  # shared tensors; modules are always captured by closure
_DELETED = re.compile(r"del (\w+)")
# Writes, reads and backward, which are not allowed in a cell.
_NOT_PLAIN = re.compile(
    r"[a-z]_\(|inplace|out=|autograd|backward|hook|\blog\b|scope|requires_grad|Q0"
)


def caller(env: dict[str, Any], *, batched: bool) -> Callable[..., Any]:
    """Returns the function that calls a program's functions."""
    _cell_templates._FEWEST = 0
    functions: dict[Any, Callable[..., Any]] = {}

    def call(text: str, **arguments: Any) -> Any:
        # A function with arguments of many sizes does not run as one node, so half of the functions
        # are separate for each size.
        tensors = [a for a in arguments.values() if isinstance(a, Tensor)]
        key = (text, tuple(a.shape for a in tensors) if _coin(text, 1) else None)
        if key not in functions:
            made: dict[str, Any] = {}
            exec(f"def function({', '.join(arguments)}): {text}", env, made)
            function = made["function"]
            dynamic = _coin(text, 4)  # half of the cells are dynamic
            functions[key] = ab.cell(function, dynamic=dynamic) if batched else function
        try:
            for _ in range(_coin(text, 2) + 3 * _coin(text, 5)):  # to use cached programs
                functions[key](**arguments)
            return functions[key](**arguments)
        except RuntimeError as error:
            if "reads a tensor's value" not in str(error):
                raise
            functions[key] = functions[key].__wrapped__
            return functions[key](**arguments)

    return call


def with_cells(program: Program) -> Program:
    """Returns the program with calls of functions in its regions."""
    made = [
        Statement(s.code, _block(s.body)) if s.body is not None else s for s in program.statements
    ]
    return Program(made, program.seed, program.knobs)


def _coin(text: str, bit: int) -> bool:
    return zlib.crc32(text.encode()) >> bit & 1 == 1


def _block(statements: list[Statement]) -> list[Statement]:
    made: list[Statement] = []
    parts: dict[str, list[str]] = {}  # by instance: lines that may move past other lines
    for statement in [*statements, None]:
        letters = set(_LETTER.findall(statement.code)) if statement else set()
        if statement and statement.body is None and len(letters) == 1 and _is_plain(statement.code):
            parts.setdefault(letters.pop(), []).append(statement.code)
            continue
        for letter, lines in parts.items():
            made += _calls(letter, lines)
        parts = {}
        if statement is not None:
            body = None if statement.body is None else _block(statement.body)
            made.append(Statement(statement.code, body))
    return made


def _is_plain(code: str) -> bool:
    return _DELETED.match(code) is not None or (
        bool(assigned(code)) and _NOT_PLAIN.search(code) is None
    )


def _calls(letter: str, lines: list[str]) -> list[Statement]:
    """Cuts an instance's lines at places that depend on their text, the same for all instances."""
    made: list[Statement] = []
    chunk: list[str] = []
    for line in lines:
        if chunk and zlib.crc32(_LETTER.sub("v", chunk[-1]).encode()) % 4 == 0:
            made += _call(letter, chunk)
            chunk = []
        chunk.append(line)
    return made + _call(letter, chunk)


def _call(letter: str, lines: list[str]) -> list[Statement]:
    code = [line for line in lines if not _DELETED.match(line)]
    gone = dict.fromkeys(m[1] for line in lines if (m := _DELETED.match(line)))
    if not code:
        return [Statement(line) for line in lines]
    results: dict[str, None] = {}
    inputs: dict[str, None] = {}
    for line in code:
        inputs |= dict.fromkeys(n for n in used(line) if n not in results)
        results |= dict.fromkeys(assigned(line))
    text = _LETTER.sub("v", "; ".join(code))
    kept = [n for n in results if n not in gone]
    shared = _coin(text, 3)  # shared tensors are arguments, or else captured by closure
    arguments = [n for n in inputs if n[0] == letter or (shared and _SHARED.fullmatch(n))]
    text += f"; return {_LETTER.sub('v', ', '.join(kept)) or None}"
    call = f"call({', '.join([repr(text), *(_LETTER.sub('v', n) + '=' + n for n in arguments)])})"
    made = [Statement(f"{', '.join(kept)} = {call}" if kept else call)]
    return made + [Statement(f"del {n}") for n in gone if n not in results]
