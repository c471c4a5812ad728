"""Explains early flushes in terms of the user's code: ``print``, ``float()``, ``if``.

The core reports the op or hook that caused the flush, the source line, and the functions of Python
and PyTorch that the line called. ``_report_source`` finds the user's expression in that line.
"""

import ast
import dataclasses
import functools
import re
from typing import TYPE_CHECKING

import torch

from torch_autobatch._report_source import (
    Spot,
    Test,
    around,
    called,
    finds,
    is_a,
    is_call,
    is_check,
    is_function,
    is_item_read,
    is_item_written,
    is_log,
    is_of_math,
    is_operator,
    is_percent,
    is_range,
    nodes_at,
    source_line,
)

if TYPE_CHECKING:
    from torch_autobatch._report import AtOnceReport, FlushReport, Report

_PLANNED = ("the end of the block", "the end of ab.map", "scope.flush()", "max_pending reached")
_OF_MAP = " (instances of a map wait for it)"
OF_EAGER = "in batch(enabled=False)"

_USE_MAP = (
    "run the loop as ab.map(function, instances): instances that read a value wait for each "
    "other, and one flush computes the values of all of them"
)
_AFTER_BLOCK = "collect x.detach() in a list, and read the values after the block"
_AFTER_BLOCK_OR_MAP = f"{_AFTER_BLOCK}; or, if the control flow depends on the value, {_USE_MAP}"
_DEFER_CHECKS = "batch(defer_checks=True) lets the check wait for the end of the block"
_CHECK_AFTER = f"collect the checked tensors and check them after the block; or {_USE_MAP}"
_OUTSIDE = "run that part outside the block"


@dataclasses.dataclass(frozen=True)
class Cause:
    """What the user's code did to cause a flush, and what to change."""

    what: str
    remedy: str


def is_planned(reason: str) -> bool:
    """Whether the user's code requested the flush, or all instances wait for it."""
    return reason.startswith(_PLANNED) or reason.endswith((_OF_MAP, OF_EAGER))


@functools.lru_cache(maxsize=1024)  # one line may cause thousands of flushes
def cause_of(
    reason: str,
    site: str,
    caller: str = "",
    via: str = "",
    position: int = 0,
    *,
    defers_checks: bool = False,
) -> Cause:
    """Returns the cause of a flush, or of an op that ran eagerly.

    The arguments are fields of a row of the report. ``defers_checks``: if true, all checks that can
    be deferred are already deferred, so the option is not a remedy.
    """
    spot = Spot(caller or site, position)
    cause = _cause_of(reason.removesuffix(_OF_MAP), site, spot, via)
    if cause.remedy == _DEFER_CHECKS and (defers_checks or _may_be_caught(spot)):
        return Cause(cause.what, _CHECK_AFTER)
    return cause


def cause_of_row(
    report: "Report", row: "FlushReport | AtOnceReport", reason: str | None = None
) -> Cause:
    """Returns the cause of a row of the report. ``reason`` replaces ``row.reason``."""
    return cause_of(
        row.reason if reason is None else reason,
        row.site,
        row.caller,
        row.via,
        row.position,
        defers_checks=report.defers_checks,
    )


def _may_be_caught(spot: Spot) -> bool:
    """Whether code around the spot, in the same function and block, may catch errors."""
    for statement in around(spot):
        if isinstance(statement, ast.Try) and statement.handlers:
            return True
        if isinstance(statement, ast.With):
            managers = [ast.unparse(item.context_expr) for item in statement.items]
            if any("batch(" in manager for manager in managers):
                return False  # handlers outside the block are not relevant
            if not all(manager.startswith("torch.") for manager in managers):
                return True
    return False


def _cause_of(reason: str, site: str, line: Spot, via: str) -> Cause:
    for what, remedy, is_here in _PRINTING:  # printing may cause a flush without a read
        if finds(line, is_here):
            return Cause(what, remedy)
    if match := re.search(r"because it has set (\S+)\)$", reason):
        return Cause(
            f"a read in an instance that has set {match[1]}",
            "keep the value in a local variable: an instance that sets no attribute of a module "
            "can wait for other instances, and one flush computes the values of all of them",
        )
    for pattern, cause in _BY_REASON:
        if re.search(pattern, reason):
            return cause
    for pattern, cause in _BY_VIA:
        if re.search(rf"(^| ){pattern}", via):
            return cause
    if match := re.match(r"(\w+)\.apply: custom autograd.Function (.*)", reason):
        return _of_function(match[1], match[2], via)
    if line.site != site and _is_read(reason):
        package = re.sub(r".*-packages/([^/:]+).*", r"\1", site).removesuffix(".py")
        return Cause(f"a read of a value in {package}", _AFTER_BLOCK)
    return _of_line(reason, line, via)


def _of_line(reason: str, spot: Spot, via: str) -> Cause:
    """Returns the cause that the source of the line shows."""
    if finds(spot, is_call("vmap", "jvp", "vjp", "jacfwd", "jacrev", "hessian")):
        return _TRANSFORM
    for what, is_here in _TEXTS:
        if finds(spot, is_here):
            return Cause(what, _AFTER_BLOCK)
    if re.search(r"torch\._tensor(_str\.|\.Tensor\.__(repr|format)__)", via):
        return Cause(_named("a conversion of a tensor to text", spot), _AFTER_BLOCK)
    if _is_read(reason):
        return _read(reason, spot, via)
    if "grad_fn" in reason or "is_leaf" in reason:
        return _read_of_state(reason, spot)
    if match := re.match(r"(\w+::\w+)[^ :]*(: writes to its arguments| writes to memory)", reason):
        return Cause(
            f"an in-place write ({match[1]})",
            "return results instead of writing them into a shared tensor, and step the optimizer "
            "after the block",
        )
    if "the program may catch its error" in reason:
        return Cause(
            reason,
            "use ab.map instead of the loop, or the variant of the op that returns a code instead "
            "of an error (cholesky_ex, inv_ex)",
        )
    return Cause(reason, "move this code out of the block, or to a place where few ops are pending")


def _is_read(reason: str) -> bool:
    return reason.endswith(": needs values") or reason.startswith("a raw read of")


def _read(reason: str, spot: Spot, via: str) -> Cause:
    """Returns the cause of a read: the innermost expression that is known to read values.

    The enclosing expressions only use the value that was read.
    """
    is_truth = "is_nonzero" in reason
    more = _TRUTHS if is_truth else _NUMBERS if "item" in reason else []
    nodes = nodes_at(spot)
    is_tested = any(isinstance(node, _TESTS) for node in nodes)
    # If the position is unknown, expressions that always read values are tried first, and then
    # expressions that may read values.
    for tests in [[*_READS, *more]] if spot.position else [_READS, more]:
        for node in nodes:
            if is_tested and _is_logical(node):
                continue  # the node is only a part of the `if` condition
            for what, remedy, is_here in tests:
                if is_here(node):
                    return Cause(what, remedy)
    for node in nodes:
        if is_of_math(node):
            name = called(node)[1]
            instead = f"torch.{name}()" if hasattr(torch, name) else "torch functions"
            return Cause(f"math.{name}()", f"use {instead} instead; or {_USE_MAP}")
    if "torch._tensor.Tensor.__array__" in via or finds(spot, is_item_written):
        return _NUMPY
    op = reason.split(":")[2].split(".")[0] if reason.startswith("aten::") else "the memory"
    if reason.startswith("aten::") and op not in _READING:
        return Cause(
            f"{op} needs values, so it ran eagerly", f"call it after the block; or {_USE_MAP}"
        )
    return Cause(_named(f"a read of a value ({op})", spot), f"{_AFTER_BLOCK}; or {_USE_MAP}")


# Ops that return a value to Python.
_READING = ("item", "is_nonzero", "_local_scalar_dense", "equal", "allclose", "nonzero", "tolist")


_TESTS = (ast.If, ast.IfExp, ast.While, ast.Assert)


def _is_logical(node: ast.AST) -> bool:
    return isinstance(node, ast.BoolOp) or is_operator(ast.Not)(node)


def _named(what: str, spot: Spot) -> str:
    """Puts the name of the enclosing call before a cause, if a call encloses the spot."""
    for node in nodes_at(spot) if spot.position else []:
        if isinstance(node, ast.Call):
            return f"{called(node)[1] or ast.unparse(node.func)}(), {what}"
    return what


def _read_of_state(reason: str, site: Spot) -> Cause:
    """Returns the cause of a read of autograd state. Many methods read this state."""
    for cause, methods in (
        (_REQUIRES_GRAD, ("requires_grad_",)),
        (_HOOK, ("register_hook", "register_post_accumulate_grad_hook")),
        (_BACKWARD, ("backward", "grad")),
    ):
        if finds(site, is_call(*methods)):
            return cause
    if reason.startswith("backward()"):
        reason = "a read of grad_fn"
        if not source_line(site.site):
            return _BACKWARD
    return Cause(reason, "read it after the block")


def _of_function(name: str, why: str, via: str) -> Cause:
    """Returns the cause for an `autograd.Function`. The user can change only their own classes.

    ``why``: the reason from ``_function.py``.
    """
    own = [f for f in via.split() if not f.startswith("torch.autograd.function.")]
    if own:
        return Cause(f"PyTorch's {name}, which {own[0]} applies", _OUTSIDE)
    what = f"the custom autograd.Function {name}"
    remedy = next((remedy for part, remedy in _FUNCTIONS if part in why), _OUTSIDE)
    return Cause(f"{what} {why.split(' (')[0]}", remedy)


_FUNCTIONS = [
    ("keyword arguments", "pass all arguments of apply() by position"),
    ("writes to its arguments", "return a new tensor instead of writing to an argument"),
    ("a vjp and a backward", "remove one of the two"),
]


_NUMPY = Cause("numpy()", f"{_AFTER_BLOCK}; or use torch functions instead of NumPy functions")
_BACKWARD = Cause(
    "backward()",
    "call scope.backward(loss) instead: at the end of the block, one batched backward runs for all "
    "losses. Step the optimizer after the block; if each example depends on the optimizer step of "
    "the previous example, do not use a block",
)
_REQUIRES_GRAD = Cause(
    "requires_grad_()", "call it before the block, or after the block on x.detach()"
)
_LEAF_VIEW = Cause(
    "a view made under no_grad()", "create the view from x.detach(), with grad mode enabled"
)
_HOOK = Cause("a hook", "register it after the block")
_CHECKPOINT = Cause("checkpointing", "remove checkpointing: max_pending= also limits memory")
_TRANSFORM = Cause("a transform (vmap, grad, jvp)", "apply it outside the block")
_COMPILED = Cause(
    "a compiled function",
    "call the compiled function outside the block, or call the original function inside the block",
)

# For each pattern of the reason that the core reports: the cause.
_BY_REASON = [
    (r"^requires_grad_\(\)|.* on a tensor that requires_grad_\(\) made a leaf", _REQUIRES_GRAD),
    (r".* on a view made under no_grad\(\)", _LEAF_VIEW),
    (r"^(register_hook|the removal of a hook)", _HOOK),
    (r"^retain_grad", Cause("retain_grad()", "call it after the block")),
    (r"hooks on saved tensors", _CHECKPOINT),
    (r"under a transform", _TRANSFORM),
    (r"under tracing", Cause("tracing", "trace the model outside the block")),
    (
        r"under anomaly mode",
        Cause(
            "anomaly mode", "no op is batched under detect_anomaly(): turn it off after debugging"
        ),
    ),
    (
        r"under a TorchDispatchMode",
        Cause(
            "a TorchDispatchMode",
            "no op is batched under this mode: use the mode in batch(enabled=False)",
        ),
    ),
    (r"^Compiled\w*\.apply", _COMPILED),
    (
        r"^BackwardHookFunction",
        Cause("a module's full backward hook", f"remove the hook, or {_OUTSIDE}"),
    ),
    (
        r"is an inference tensor",
        Cause(
            "an inference tensor",
            "create the tensor and open the block inside the same inference_mode()",
        ),
    ),
    (
        r"^aten::index\.\w+: no batching",
        Cause("x[mask]", f"use torch.where, or multiply by the mask; or {_USE_MAP}"),
    ),
    (r"has a forward-mode gradient", Cause("a forward-mode gradient (jvp)", _TRANSFORM.remedy)),
]

# For each pattern of the functions of Python and PyTorch that the line called, separated by spaces:
# the cause.
_BY_VIA = [
    (r"torch\.utils\.checkpoint\.", _CHECKPOINT),
    (r"torch\.(_functorch|autograd\.forward_ad)\.", _TRANSFORM),
    (r"torch\.(_dynamo|_inductor)\.(?!eval_frame\.DisableContext)", _COMPILED),
    (r"torch\.(_tensor\.Tensor|autograd|autograd\.__init__)\.backward", _BACKWARD),
    (
        r"torch\.optim\.lr_scheduler\.",
        Cause("a step of the learning-rate scheduler", "step the scheduler after the block"),
    ),
    (
        r"torch\._library\.",
        Cause("a custom op (torch.library)", f"implement the op with PyTorch's ops; or {_OUTSIDE}"),
    ),
    (
        r"torch\.optim\.",
        Cause("a step of the optimizer", "step the optimizer after the block"),
    ),
    (r"torch\.nn\.utils\.clip_grad", Cause("clip_grad_norm_()", "clip after the block")),
    *(
        (
            rf"copy\.{name}\b",
            Cause(
                f"copy.{name}()",
                "copy before or after the block; or use clone(), which is captured",
            ),
        )
        for name in ("deepcopy", "copy")
    ),
    (
        r"(pickle|torch\.serialization)\.",
        Cause("torch.save or pickle", "save after the block"),
    ),
    (
        r"(pdb|bdb)\.",
        Cause("the debugger", "debug in batch(enabled=False), which runs ops as eager mode does"),
    ),
]

_TEXTS: list[tuple[str, Test]] = [
    ("an f-string", is_a(ast.JoinedStr)),
    ("str()", is_function("str", "repr")),
    ("format()", is_call("format")),
    ("a % format", is_percent),
]

# Each entry contains a cause, a remedy, and a test that recognizes the cause in the syntax tree.
_PRINTING: list[tuple[str, str, Test]] = [
    ("print", _AFTER_BLOCK, is_call("print", "pprint")),
    ("a logger", _AFTER_BLOCK, is_log),
    ("a progress bar", _AFTER_BLOCK, is_call("set_postfix", "set_description", "set_postfix_str")),
]
_READS: list[tuple[str, str, Test]] = [
    ("assert", _DEFER_CHECKS, is_a(ast.Assert)),
    ("if ...: raise", _DEFER_CHECKS, is_check),
    ("if", _USE_MAP, is_a(ast.If, ast.IfExp)),
    ("while", _USE_MAP, is_a(ast.While)),
    (".item()", _AFTER_BLOCK_OR_MAP, is_call("item")),
    ("float()", _AFTER_BLOCK_OR_MAP, is_call("float")),
    ("int()", _USE_MAP, is_call("int")),
    ("complex()", _AFTER_BLOCK_OR_MAP, is_function("complex")),
    ("bool()", _USE_MAP, is_call("bool")),
    (".tolist()", _AFTER_BLOCK_OR_MAP, is_call("tolist")),
    (_NUMPY.what, _NUMPY.remedy, is_call("numpy", "asarray", "array")),
    ("torch.save or pickle", "save after the block", is_call("save", "dump", "dumps")),
    ("a mask or nonzero()", _USE_MAP, is_call("nonzero", "masked_select", "unique", "argwhere")),
]
# Expressions in which Python itself calls bool().
_TRUTHS: list[tuple[str, str, Test]] = [
    *(
        (f"{name}() of tensors", f"{instead}; or {_USE_MAP}", is_function(name))
        for name, instead in {
            "max": "use torch.stack(x).max(), which returns a tensor",
            "min": "use torch.stack(x).min(), which returns a tensor",
            "sorted": "use torch.stack(x).sort(), which returns tensors",
            "any": "use torch.stack(x).any(), which returns a tensor",
            "all": "use torch.stack(x).all(), which returns a tensor",
        }.items()
    ),
    ("not", _USE_MAP, is_operator(ast.Not)),
    ("in", _USE_MAP, is_operator(ast.In, ast.NotIn)),
    ("and, or", _USE_MAP, is_a(ast.BoolOp)),
    ("if", _USE_MAP, is_a(ast.comprehension)),
]
# Expressions in which Python itself needs a number.
_NUMBERS: list[tuple[str, str, Test]] = [
    ("range()", _USE_MAP, is_range),
    ("an index x[i]", f"torch.gather accepts index tensors; or {_USE_MAP}", is_item_read),
]
