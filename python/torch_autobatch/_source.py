"""Finds the syntax tree of running code, and the source position of an instruction."""

import __future__

import ast
import dis
import functools
import linecache
import threading
import types
from collections.abc import Iterator
from typing import Any

Position = tuple[int, int, int, int]  # first line, last line, first column, last column


class Syntax:
    """The syntax tree of a function."""

    def __init__(self, root: ast.AST) -> None:
        self.root = root

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.root) for child in ast.iter_child_nodes(node)}

    def innermost(self, position: Position) -> ast.AST | None:
        found: tuple[int, ast.AST] | None = None
        for node in ast.walk(self.root):
            if not _holds(node, position):
                continue
            depth = sum(1 for _ in self.ancestors(node))
            if found is None or depth >= found[0]:
                found = depth, node
        return None if found is None else found[1]

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yields each ancestor of a node, innermost first, with its child on the path to it."""
        while node is not self.root:
            parent = self.parents[node]
            yield parent, node
            node = parent


def position_of(node: ast.AST) -> Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]


def _holds(node: ast.AST, position: Position) -> bool:
    if not hasattr(node, "lineno"):
        return False
    first, last, start, end = position_of(node)
    line, end_line, column, end_column = position
    return (first, start) <= (line, column) and (end_line, end_column) <= (last, end)


# CPython 3.11 has one recursion counter for the conversions of all threads. If two threads parse at
# the same time, ast.parse can raise a SystemError (gh-106905).
_parsing = threading.RLock()


def parse(source: str) -> ast.Module:
    """Calls ``ast.parse``, but never in two threads at the same time."""
    with _parsing:
        return ast.parse(source)


@functools.lru_cache(maxsize=64)
def tree_of(file: str) -> ast.Module | None:
    """Returns the syntax tree of a file, or None if the file has a syntax error."""
    try:
        return parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _first_line(node: ast.AST) -> int:
    decorators = getattr(node, "decorator_list", [])
    lines: list[int] = [n.lineno for n in (node, *decorators)]
    return min(lines)


def _is_compiled_from(code: types.CodeType, statements: list[ast.stmt]) -> bool:
    """Whether compiling these statements gives the code.

    False if the file was edited later, or if a tool rewrote the code. The name may differ, because
    PyTorch 2.15 gives the code of its decorators the name of the context manager.
    """
    flags = code.co_flags & __future__.annotations.compiler_flag
    module = ast.Module(statements, [])
    made = [compile(module, code.co_filename, "exec", flags, dont_inherit=True)]
    while made:
        one = made.pop()
        if one.replace(co_name=code.co_name, co_qualname=code.co_qualname) == code:
            return True
        made += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    return False


@functools.lru_cache(maxsize=64)
def _imports_of(file: str) -> list[ast.stmt]:
    """Returns the imports of a module.

    The compiler emits different instructions for a method call on an imported name, so a function
    must be compiled together with the imports.
    """
    found: list[ast.stmt] = []
    waiting: list[ast.AST] = [*(tree.body if (tree := tree_of(file)) else [])]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            waiting += ast.iter_child_nodes(node)
    return found


@functools.lru_cache(maxsize=1024)
def syntax_of(code: types.CodeType) -> Syntax | None:
    """Returns the syntax of a function or module, or None if its source is missing or differs."""
    tree = tree_of(code.co_filename)
    if tree is None or (code.co_name.startswith("<") and code.co_name != "<module>"):
        return None
    if code.co_name == "<module>":
        return Syntax(tree) if _is_compiled_from(code, tree.body) else None
    for statement in tree.body:
        last = statement.end_lineno or statement.lineno
        if not _first_line(statement) <= code.co_firstlineno <= last:
            continue
        functions = [
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and _first_line(node) == code.co_firstlineno
        ]
        imports = _imports_of(code.co_filename)
        if len(functions) == 1 and _is_compiled_from(code, [*imports, statement]):
            return Syntax(functions[0])
    return None


def position_at(instruction: dis.Instruction) -> Position | None:
    p = instruction.positions
    if p is None or None in p:
        return None
    return p.lineno, p.end_lineno, p.col_offset, p.end_col_offset  # type: ignore[return-value]


def instruction_at(
    code: types.CodeType, offset: int
) -> tuple[dis.Instruction | None, dis.Instruction | None]:
    """Returns the instruction whose code or cache contains ``offset``, and the previous one."""
    found = before = None
    for instruction in dis.get_instructions(code):
        if instruction.offset > offset:
            break
        found, before = instruction, found
    return found, before


def look_up(expression: ast.expr, frame: types.FrameType) -> Any:
    """Returns the value of a name, or of an attribute that is in an object's ``__dict__``.

    Returns None for all other expressions, because evaluating them may run user code.
    """
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if expression.id in names:
                return names[expression.id]
    if isinstance(expression, ast.Attribute):
        owner = look_up(expression.value, frame)
        return getattr(owner, "__dict__", {}).get(expression.attr)
    return None
