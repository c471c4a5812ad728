"""Finds the expressions in the user's source that a report names as causes.

The core reports the line of an instruction and its position in the line, both from
``code.co_positions()``. Only expressions and statements that contain the instruction are causes.
Other expressions in the line are not causes.
"""

import ast
import linecache
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch_autobatch._source import tree_of

Test = Callable[[ast.AST], bool]


class Spot(NamedTuple):
    """An instruction of the program.

    Attributes:
        site: the source line of the instruction: "model.py:12".
        position: the position in this line. It consists of the number of further lines, the first
            column and the last column, with 16 bits for each number. 0 if unknown.
    """

    site: str
    position: int = 0


def place_of(site: str) -> tuple[str, int]:
    """Splits a site: "model.py:12" gives ("model.py", 12)."""
    path, _, number = site.rpartition(":")
    return (path, int(number)) if number.isdigit() else (site, 0)


def source_line(site: str) -> str:
    """Returns the text of the line, or "" if the file is not found."""
    return linecache.getline(*place_of(site)).strip()


def finds(spot: Spot, is_here: Test) -> bool:
    """Whether a syntax node at the spot passes the test."""
    return any(is_here(node) for node in nodes_at(spot))


def nodes_at(spot: Spot) -> list[ast.AST]:
    """Returns the nodes that contain the instruction, from the innermost node to the statement.

    If the position is not known, returns all nodes of the line, innermost first.
    """
    path, line = place_of(spot.site)
    if (tree := tree_of(path)) is None:
        return []
    if spot.position == 0:
        return list(_nodes_of_line(tree, line))[::-1]
    way = _way_to(tree, spot)
    inner = max((i for i, node in enumerate(way) if isinstance(node, _OUTER)), default=0)
    return way[inner:][::-1]


_OUTER = (ast.stmt, ast.Lambda, ast.match_case)  # nodes that contain whole expressions


def around(spot: Spot) -> list[ast.stmt]:
    """Returns the function's statements around the instruction's own statement, innermost first."""
    tree = tree_of(place_of(spot.site)[0])
    way = _way_to(tree, spot) if tree is not None else []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inner = max((i for i, node in enumerate(way) if isinstance(node, functions)), default=-1)
    statements = [node for node in way[inner + 1 :] if isinstance(node, ast.stmt)]
    if spot.position:
        statements.pop()  # removes the instruction's own statement
    return statements[::-1]


def _way_to(tree: ast.Module, spot: Spot) -> list[ast.AST]:
    """Returns the path from the module to the innermost node that contains the instruction."""
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
    """Returns the first and last (line, column) of a node, or None if it is unknown.

    A node without a position has the extent of its children.
    """
    if (first := getattr(node, "lineno", None)) is not None:
        begin = (first, getattr(node, "col_offset", 0))
        return begin, (getattr(node, "end_lineno", first), getattr(node, "end_col_offset", 0))
    parts = [extent for part in ast.iter_child_nodes(node) if (extent := _extent(part))]
    return (min(parts)[0], max(part[1] for part in parts)) if parts else None


def _nodes_of_line(tree: ast.Module, line: int) -> Iterator[ast.AST]:
    """Yields the nodes of a line. A compound statement counts only on the lines of its header."""
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
    """Returns the owner and name of a called function.

    ("log", "info") for log.info(...), ("", "float") for float(...), ("", "") for other nodes.
    """
    if not isinstance(node, ast.Call):
        return "", ""
    if isinstance(node.func, ast.Attribute):
        return ast.unparse(node.func.value), node.func.attr
    return "", node.func.id if isinstance(node.func, ast.Name) else ""


# --- tests ---


def is_call(*names: str) -> Test:
    """Tests for a call of a function or a method."""
    return lambda node: called(node)[1] in names


def is_function(*names: str) -> Test:
    """Tests for a call of a function: `max(x)`, but not `x.max()`."""
    return lambda node: called(node) in [("", name) for name in names]


def is_log(node: ast.AST) -> bool:
    owner, name = called(node)
    if name == "log":  # tensors have a method `log` too, so the owner is tested
        return re.search(r"log|wandb|run$|^self$|trainer|accelerator", owner) is not None
    methods = ("debug", "info", "warning", "error", "log_dict", "log_metrics", "add_scalar")
    return name in methods and owner != ""


def is_of_math(node: ast.AST) -> bool:
    return called(node)[0] in ("math", "cmath")


def is_a(*kinds: type[ast.AST]) -> Test:
    return lambda node: isinstance(node, kinds)


def is_operator(*kinds: type[ast.AST]) -> Test:
    """Tests for an operator: `not x`, `x in y`."""

    def test(node: ast.AST) -> bool:
        operators = getattr(node, "ops", None) or [getattr(node, "op", None)]
        return any(isinstance(operator, kinds) for operator in operators)

    return test


def is_percent(node: ast.AST) -> bool:
    """Whether the node is a % format: `"%s" % x`."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)):
        return False
    return isinstance(node.left, ast.JoinedStr) or isinstance(
        getattr(node.left, "value", None), str
    )


def is_range(node: ast.AST) -> bool:
    """Whether the node calls `range` with a variable: `range(n)`, but not `range(3)`."""
    return is_function("range")(node) and not all(
        isinstance(argument, ast.Constant) for argument in getattr(node, "args", [])
    )


def is_item_read(node: ast.AST) -> bool:
    """Whether the node reads `x[i]`."""
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)


def is_item_written(node: ast.AST) -> bool:
    """Whether the node writes `x[i] = ...` or `x[i] += ...`, as into a NumPy array."""
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Subscript)
    return isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)


def is_check(node: ast.AST) -> bool:
    """Whether the node is a check: `if x: raise ...`, without an `else`."""
    return isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and not node.orelse
