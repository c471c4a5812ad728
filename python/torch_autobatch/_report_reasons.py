"""Why something was computed early, in the words of the program: ``print``, ``float()``, ``if``.

The core knows the op or the hook that asked and the line. What the user wrote stands in the source
of that line.
"""

import ast
import dataclasses
import functools
import linecache
import re
from collections.abc import Callable, Iterator

_PLANNED = ("the end of the block", "the end of ab.map", "scope.flush()", "max_pending reached")
_OF_MAP = " (instances of a map wait for it)"

_USE_MAP = (
    "run the loop as ab.map(function, instances): instances then wait for each other, "
    "and their reads are served together"
)
_AFTER_BLOCK = "keep x.detach() in a list and read it after the block, all at once"


@dataclasses.dataclass(frozen=True)
class Cause:
    """What the user's code did, and what to do about it."""

    what: str
    remedy: str


def is_planned(reason: str) -> bool:
    """Whether the user asked for the flush, or no instance can go on without it."""
    return reason.startswith(_PLANNED) or reason.endswith(_OF_MAP)


@functools.lru_cache(maxsize=1024)  # a trace may have thousands of flushes at one line
def cause_of(reason: str, site: str, caller: str = "") -> Cause:
    """Of a flush, or of an op that ran at once."""
    reason = reason.removesuffix(_OF_MAP)
    for what, remedy, is_here in _FORMATTING:  # some of it is ops, and no read
        if _finds(caller or site, is_here):
            return Cause(what, remedy)
    if match := re.match(r"(\w+)\.apply: custom autograd.Function", reason):
        return Cause(
            f"the custom autograd.Function {match[1]}",
            "give the class generate_vmap_rule = True or a vmap staticmethod, and setup_context",
        )
    for pattern, cause in _BY_REASON:
        if re.search(pattern, reason):
            return cause
    if caller:
        package = re.sub(r".*-packages/([^/:]+).*", r"\1", site).removesuffix(".py")
        return Cause(f"a read of a value in {package}", _AFTER_BLOCK)
    if _reads_value(reason):
        return _read(reason, site)
    if "grad_fn" in reason or "is_leaf" in reason:
        return _read_of_state(reason, site)
    if match := re.match(r"(\w+::\w+)[^ :]*(: writes to its arguments| writes to memory)", reason):
        return Cause(
            f"an in-place write ({match[1]})",
            "give results back rather than writing them into a tensor that others refer to as "
            "well, and step the optimizer after the block",
        )
    return Cause(reason, "move it out of the block, or to where fewer ops are pending")


def _read_of_state(reason: str, site: str) -> Cause:
    """Of autograd's: many methods ask for the same."""
    for cause, methods in (
        (_REQUIRES_GRAD, ("requires_grad_",)),
        (_HOOK, ("register_hook", "register_post_accumulate_grad_hook")),
        (_BACKWARD, ("backward", "grad")),
    ):
        if _finds(site, _is_call(*methods)):
            return cause
    if reason.startswith("backward()"):
        reason = "a read of grad_fn"
        if not source_line(site):
            return _BACKWARD
    return Cause(reason, "read it after the block")


_BACKWARD = Cause(
    "backward()",
    "call scope.backward(loss) in its place: the block's end runs one batched backward of all. "
    "Step the optimizer after the block: where each example needs the step before, leave the "
    "block out",
)

_REQUIRES_GRAD = Cause("requires_grad_()", "call it before the block, or after it on x.detach()")
_HOOK = Cause("a hook", "register it after the block")

_BY_REASON = [
    (r"^requires_grad_\(\)|.* on what requires_grad_\(\) made a leaf", _REQUIRES_GRAD),
    (r"^(register_hook|the removal of a hook)", _HOOK),
    (r"^retain_grad", Cause("retain_grad()", "call it after the block")),
    (
        r"in batch\(enabled=False\)",
        Cause("an op in batch(enabled=False)", "give it tensors that were made before the block"),
    ),
    (
        r"hooks on saved tensors|saved-tensor hooks",
        Cause("checkpointing", "leave checkpointing out: max_pending= bounds memory as well"),
    ),
    (
        r"in a transform, in tracing",
        Cause("a transform (vmap, jvp), tracing or a mode", "apply it outside the block"),
    ),
]


def _reads_value(reason: str) -> bool:
    return reason.endswith(": needs values") or reason.startswith("a raw read of")


def _read(reason: str, site: str) -> Cause:
    # Where a call reads the value, an `if` around it only tests the outcome.
    is_called = "is_nonzero" not in reason and _finds(site, _READING_CALL)
    for what, remedy, is_here in _READS:
        if not (is_called and what in ("if", "while", "assert")) and _finds(site, is_here):
            return Cause(what, remedy)
    op = reason.split(":")[2] if reason.startswith("aten::") else "the memory"
    return Cause(f"a read of a value ({op})", f"{_AFTER_BLOCK}; or {_USE_MAP}")


# --- the source ---


def place_of(site: str) -> tuple[str, int]:
    """("model.py", 12) of "model.py:12"."""
    path, _, number = site.rpartition(":")
    return (path, int(number)) if number.isdigit() else (site, 0)


def source_line(site: str) -> str:
    """What stands there, or "" where the file is not found."""
    return linecache.getline(*place_of(site)).strip()


_Test = Callable[[ast.AST], bool]


def _finds(site: str, is_here: _Test) -> bool:
    return any(is_here(node) for node in _nodes_at(site))


@functools.lru_cache(maxsize=64)
def _tree(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return None


def _nodes_at(site: str) -> Iterator[ast.AST]:
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


def _called(node: ast.AST) -> tuple[str, str]:
    """("log", "info") of log.info(...), ("", "float") of float(...)."""
    if not isinstance(node, ast.Call):
        return "", ""
    if isinstance(node.func, ast.Attribute):
        return ast.unparse(node.func.value), node.func.attr
    return "", node.func.id if isinstance(node.func, ast.Name) else ""


def _is_call(*names: str) -> _Test:
    return lambda node: _called(node)[1] in names


def _is_log(node: ast.AST) -> bool:
    owner, name = _called(node)
    if name == "log":  # also a tensor's
        return re.search(r"log|wandb|run$|^self$|trainer|accelerator", owner) is not None
    methods = ("debug", "info", "warning", "error", "log_dict", "log_metrics", "add_scalar")
    return name in methods and owner != ""


def _is(*kinds: type[ast.AST]) -> _Test:
    return lambda node: isinstance(node, kinds)


_READING_CALL = _is_call("item", "float", "int", "tolist", "numpy")

# What, what to do, and how it looks: the first that is found on the line.
_FORMATTING: list[tuple[str, str, _Test]] = [
    ("print", _AFTER_BLOCK, _is_call("print", "pprint")),
    ("a logger", _AFTER_BLOCK, _is_log),
    ("a progress bar", _AFTER_BLOCK, _is_call("set_postfix", "set_description", "set_postfix_str")),
]
_READS: list[tuple[str, str, _Test]] = [
    (
        "assert",
        "batch(defer_checks=True) lets the check wait for the end of the block",
        _is(ast.Assert),
    ),
    ("if", _USE_MAP, _is(ast.If, ast.IfExp)),
    ("while", _USE_MAP, _is(ast.While)),
    (".item()", f"{_AFTER_BLOCK}; or, if the code goes on by it, {_USE_MAP}", _is_call("item")),
    ("float()", f"{_AFTER_BLOCK}; or, if the code goes on by it, {_USE_MAP}", _is_call("float")),
    ("int()", _USE_MAP, _is_call("int")),
    ("bool()", _USE_MAP, _is_call("bool")),
    (".tolist()", f"{_AFTER_BLOCK}; or, if the code goes on by it, {_USE_MAP}", _is_call("tolist")),
    (
        "numpy()",
        f"{_AFTER_BLOCK}; torch's functions do the same on tensors",
        _is_call("numpy", "asarray", "array"),
    ),
    ("an f-string", _AFTER_BLOCK, _is(ast.JoinedStr)),
    ("str()", _AFTER_BLOCK, _is_call("str", "repr", "format")),
    ("torch.save or pickle", "save after the block", _is_call("save", "dump", "dumps")),
    ("a mask or nonzero()", _USE_MAP, _is_call("nonzero", "masked_select", "unique", "argwhere")),
    ("and, or", _USE_MAP, _is(ast.BoolOp)),
]
