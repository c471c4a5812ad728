"""What stands in the source at a line of the program: the words that a report takes from it."""

import ast
import functools
import linecache
import re
from collections.abc import Callable, Iterator

Test = Callable[[ast.AST], bool]


def place_of(site: str) -> tuple[str, int]:
    """("model.py", 12) of "model.py:12"."""
    path, _, number = site.rpartition(":")
    return (path, int(number)) if number.isdigit() else (site, 0)


def source_line(site: str) -> str:
    """What stands there, or "" where the file is not found."""
    return linecache.getline(*place_of(site)).strip()


def finds(site: str, is_here: Test) -> bool:
    """Whether a node of the line's syntax is such a one."""
    return any(is_here(node) for node in nodes_at(site))


@functools.lru_cache(maxsize=64)
def _tree(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def nodes_at(site: str) -> Iterator[ast.AST]:
    """Those that stand on the line, of a compound statement the head alone."""
    path, line = place_of(site)
    tree = _tree(path)
    for node in ast.walk(tree) if tree is not None else []:
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


def is_check(node: ast.AST) -> bool:
    """`if x: raise ...`, which a program does not go on by."""
    return isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and not node.orelse
