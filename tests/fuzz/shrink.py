"""Makes a failing program smaller as long as it fails in the same way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from tests.fuzz.program import VARIABLE, Program, Statement, assigned, used, walk

Fails = Callable[[Program], bool]


def shrink(program: Program, fails: Fails, seconds: float) -> Program:
    """Returns the smallest program found within the time."""
    end = time.monotonic() + seconds
    smaller = True
    while smaller and time.monotonic() < end:
        before = program.source()
        program = _remove_chunks(program, fails, end)
        smaller = program.source() != before
        for candidates in (_unwrapped, _without_definition, _simpler_lines):
            program, better = _first_fixpoint(program, candidates, fails, end)
            smaller |= better
    return program


def _first_fixpoint(
    program: Program, candidates: Callable[[Program], Iterator[Program]], fails: Fails, end: float
) -> tuple[Program, bool]:
    """Replaces the program by a candidate that still fails, until there is no such candidate."""
    better = True
    any_better = False
    while better and time.monotonic() < end:
        better = False
        for candidate in candidates(program):
            if time.monotonic() >= end:
                break
            if fails(candidate):
                program, better, any_better = candidate, True, True
                break
    return program, any_better


def _edited(program: Program, change: Callable[[Statement], list[Statement] | None]) -> Program:
    """Returns a copy. ``change`` returns the replacement of a statement, or None to copy it."""

    def copied(statements: list[Statement]) -> list[Statement]:
        made = []
        for statement in statements:
            instead = change(statement)
            if instead is not None:
                made += (
                    copied(instead) if instead and instead[0] in (statement.body or []) else instead
                )
            else:
                body = None if statement.body is None else copied(statement.body)
                if body != []:
                    made.append(Statement(statement.code, body))
        return made

    return Program(copied(program.statements), program.seed, program.knobs)


def _without(program: Program, gone: set[int]) -> Program:
    """Returns the program without these statements and the statements that depend on them."""
    missing: set[str] = set()

    def change(statement: Statement) -> list[Statement] | None:
        lost = id(statement) in gone or any(n in missing for n in used(statement.code))
        if lost:
            missing.update(assigned(statement.code))
            for inner in walk(statement.body or []):
                missing.update(assigned(inner.code))
            return []
        missing.difference_update(assigned(statement.code))
        return None

    return _edited(program, change)


def _remove_chunks(program: Program, fails: Fails, end: float) -> Program:
    """Removes chunks of statements: first halves of the program, and finally single statements."""
    length = program.size() // 2
    while length >= 1:
        start = program.size() - length
        while start > -length and time.monotonic() < end:
            chunk = list(walk(program.statements))[max(start, 0) : start + length]
            candidate = _without(program, {id(s) for s in chunk})
            if candidate.statements and candidate.size() < program.size() and fails(candidate):
                program = candidate
                start = min(start, program.size())
            start -= length
        length //= 2
    return program


def _unwrapped(program: Program) -> Iterator[Program]:
    """Yields programs with one block replaced by its body."""
    for target in walk(program.statements):
        if target.body is not None and not target.code.endswith("as scope:"):
            yield _edited(program, lambda s, t=target: t.body if s is t else None)


def _without_definition(program: Program) -> Iterator[Program]:
    """Yields programs without one definition, whose variable is replaced by one that it reads."""
    for target in walk(program.statements):
        names = assigned(target.code)
        if target.body is not None or len(names) != 1:
            continue
        for other in dict.fromkeys(used(target.code)):
            yield _renamed(
                _edited(program, lambda s, t=target: [] if s is t else None), names[0], other
            )


def _renamed(program: Program, old: str, new: str) -> Program:
    pattern = re.compile(rf"\b{old}\b")

    def change(statement: Statement) -> list[Statement] | None:
        if not pattern.search(statement.code):
            return None
        body = statement.body
        return [Statement(pattern.sub(new, statement.code), body)] if body is None else None

    return _edited(program, change)


_SIMPLER = [
    (re.compile(r"batch\(.+?\)"), "batch()"),
    (re.compile(r"requires_grad_\(\)"), "clone()"),
    (re.compile(r"\b[2-9], 4"), "1, 4"),
    (re.compile(r"\b[3-9], 4"), "2, 4"),
    (re.compile(r"\b4\b"), "2"),
    (re.compile(r", retain_graph=True"), ""),
    (re.compile(r"retain_graph=True"), ""),
    (re.compile(r"\.sum\(\)"), ""),
    (re.compile(r"\.abs\(\)"), ""),
    (re.compile(r"\+[\w.]+"), ""),
]


def _simpler_lines(program: Program) -> Iterator[Program]:
    for target in walk(program.statements):
        for pattern, instead in _SIMPLER:
            code = pattern.sub(instead, target.code)
            if code != target.code:
                yield _with_code(program, target, code)
        for argument in re.finditer(r"(?<=[\[(,])[a-f]\d+\.\w+\(\)", target.code):
            name = VARIABLE.search(argument[0])
            if name:
                code = target.code[: argument.start()] + name[0] + target.code[argument.end() :]
                yield _with_code(program, target, code)


def _with_code(program: Program, target: Statement, code: str) -> Program:
    def change(statement: Statement) -> list[Statement] | None:
        return [Statement(code, statement.body)] if statement is target else None

    return _edited(program, change)
