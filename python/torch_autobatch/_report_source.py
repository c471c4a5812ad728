"""What stands in the source where the program runs: the words that a report takes from it.

Of an instruction the core gives the line and its position there, as ``code.co_positions()`` has
it. What that instruction is a part of is the cause of what it does; what else stands on the line
is not.
"""

import ast
import functools
import linecache
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

Test = Callable[[ast.AST], bool]


class Spot(NamedTuple):
    """Where the program was.

    Attributes:
        site: the line: "model.py:12".
        position: the instruction's: its further lines, first and last column, 16 bits each; or 0.
    """

    site: str
    position: int = 0


def place_of(site: str) -> tuple[str, int]:
    """("model.py", 12) of "model.py:12"."""
    path, _, number = site.rpartition(":")
    return (path, int(number)) if number.isdigit() else (site, 0)


def source_line(site: str) -> str:
    """What stands there, or "" where the file is not found."""
    return linecache.getline(*place_of(site)).strip()


def finds(spot: Spot, is_here: Test) -> bool:
    """Whether a node of the syntax there is such a one."""
    return any(is_here(node) for node in nodes_at(spot))


@functools.lru_cache(maxsize=64)
def _tree(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def nodes_at(spot: Spot) -> list[ast.AST]:
    """What the instruction is a part of, from the innermost expression to its statement.

    Where its position is not known: all that stands on the line, the innermost first.
    """
    path, line = place_of(spot.site)
    if (tree := _tree(path)) is None:
        return []
    if spot.position == 0:
        return list(_nodes_of_line(tree, line))[::-1]
    way = _way_to(tree, spot)
    inner = max((i for i, node in enumerate(way) if isinstance(node, _OUTER)), default=0)
    return way[inner:][::-1]


_OUTER = (ast.stmt, ast.Lambda, ast.match_case)  # an expression ends there


def around(spot: Spot) -> list[ast.stmt]:
    """The statements that its statement is in, of the same function, from the innermost on."""
    tree = _tree(place_of(spot.site)[0])
    way = _way_to(tree, spot) if tree is not None else []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inner = max((i for i, node in enumerate(way) if isinstance(node, functions)), default=-1)
    statements = [node for node in way[inner + 1 :] if isinstance(node, ast.stmt)]
    if spot.position:
        statements.pop()  # its own
    return statements[::-1]


def _way_to(tree: ast.Module, spot: Spot) -> list[ast.AST]:
    """From the module to the innermost node that has all of the instruction."""
    line = place_of(spot.site)[1]
    lines, first, last = (spot.position >> shift & 0xFFFF for shift in (32, 16, 0))
    begin, end = (line, first), (line + lines, last)
    way: list[ast.AST] = [tree]
    while True:
        for node in ast.iter_child_nodes(way[-1]):
            extent = _extent(node)
            if extent is not None and extent[0] <= begin and end <= extent[1]:
                way.append(node)
                break
        else:
            return way


def _extent(node: ast.AST) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Where it begins and ends, in lines and columns; None of what holds nothing."""
    if (first := getattr(node, "lineno", None)) is not None:
        begin = (first, getattr(node, "col_offset", 0))
        return begin, (getattr(node, "end_lineno", first), getattr(node, "end_col_offset", 0))
    parts = [extent for part in ast.iter_child_nodes(node) if (extent := _extent(part))]
    return (min(parts)[0], max(part[1] for part in parts)) if parts else None


def _nodes_of_line(tree: ast.Module, line: int) -> Iterator[ast.AST]:
    """Those that stand on the line, of a compound statement the head alone."""
    for node in ast.walk(tree):
        first = getattr(node, "lineno", None)
        if first is None:
            continue
        last = getattr(node, "end_lineno", first)
        body = getattr(node, "body", None)
        if isinstance(body, list) and body:
            last = max(first, body[0].lineno - 1)
        if first <= line <= last:
            yield node


def called(node: ast.AST) -> tuple[str, str]:
    """("log", "info") of log.info(...), ("", "float") of float(...)."""
    if not isinstance(node, ast.Call):
        return "", ""
    if isinstance(node.func, ast.Attribute):
        return ast.unparse(node.func.value), node.func.attr
    return "", node.func.id if isinstance(node.func, ast.Name) else ""


# --- tests ---


def is_call(*names: str) -> Test:
    """Of a function or a method."""
    return lambda node: called(node)[1] in names


def is_function(*names: str) -> Test:
    """A call of a function: `max(x)`, but not `x.max()`."""
    return lambda node: called(node) in [("", name) for name in names]


def is_log(node: ast.AST) -> bool:
    owner, name = called(node)
    if name == "log":  # also a tensor's
        return re.search(r"log|wandb|run$|^self$|trainer|accelerator", owner) is not None
    methods = ("debug", "info", "warning", "error", "log_dict", "log_metrics", "add_scalar")
    return name in methods and owner != ""


def is_of_math(node: ast.AST) -> bool:
    return called(node)[0] in ("math", "cmath")


def is_a(*kinds: type[ast.AST]) -> Test:
    return lambda node: isinstance(node, kinds)


def is_operator(*kinds: type[ast.AST]) -> Test:
    """`not x`, `x in y`."""

    def test(node: ast.AST) -> bool:
        operators = getattr(node, "ops", None) or [getattr(node, "op", None)]
        return any(isinstance(operator, kinds) for operator in operators)

    return test


def is_percent(node: ast.AST) -> bool:
    """`"%s" % x`."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)):
        return False
    return isinstance(node.left, ast.JoinedStr) or isinstance(
        getattr(node.left, "value", None), str
    )


def is_range(node: ast.AST) -> bool:
    """`range(n)`, but not `range(3)`."""
    return is_function("range")(node) and not all(
        isinstance(argument, ast.Constant) for argument in getattr(node, "args", [])
    )


def is_item_read(node: ast.AST) -> bool:
    """`x[i]`, where it is not written to."""
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)


def is_item_written(node: ast.AST) -> bool:
    """`x[i] = ...` and `x[i] += ...`: of an array, which takes numbers."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Subscript)
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)


def is_check(node: ast.AST) -> bool:
    """`if x: raise ...`, which a program does not go on by."""
    return isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and not node.orelse
