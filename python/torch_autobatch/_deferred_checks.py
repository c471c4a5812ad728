"""Decides which checks may be deferred to the flush, such as ``if not valid.all(): raise ...``.

A check reads the truth value of a tensor. For one of the two truth values, the check only raises an
error. ``batch()`` continues with the other truth value. The flush that computes the tensor performs
the check. A check is deferred under two conditions. First, the statement must be an ``if`` or an
``assert`` whose failing branch ends with ``raise`` on every path. Second, no code between the
statement and the block may catch the error. If either condition is uncertain, the value is
read immediately. Results are cached by code object and instruction
(``csrc/python/deferred_checks.cpp``).

The statement may be in a caller. The function that reads the value returns the truth value
(``return bool(valid.all())``), or returns the tested tensor early (``if not valid.all(): return
valid``), and the caller tests the result.
"""

import __future__

import ast
import builtins
import functools
import itertools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from torch_autobatch._source import instruction_at, look_up, parse, position_at, syntax_of

_TORCH = os.path.dirname(torch.__file__) + os.sep


class Check:
    """A statement that raises an error if a truth value is not the expected value."""

    def __init__(
        self, code: types.CodeType, expected: bool, failing: list[ast.stmt], names: list[str]
    ) -> None:
        self.code = code
        self.expected = expected
        self.failing = failing  # the statements of the failing branch
        self.names = tuple(names)  # the function's variables that the branch reads
        self.is_of_torch = code.co_filename.startswith(_TORCH)

    def failure(
        self, variables: dict[str, Any], module: dict[str, Any], asked: str
    ) -> BaseException:
        """Runs the failing branch with the check's variables, and returns the error that it raises.

        ``asked``: the line of the user's code that read the truth value.
        """
        run = types.FunctionType(self._compile(list(variables)), module)
        try:
            run(**variables)
        except BaseException as error:
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next  # removes this function's frame
            note = "torch_autobatch.batch() deferred this check until its value was computed"
            error.add_note(note + (f"; the program made the check at {asked}" if asked else ""))
            return error
        return RuntimeError(f"torch_autobatch: a check in {self.code.co_qualname} failed")

    def _compile(self, names: list[str]) -> types.CodeType:
        tree = parse(f"def check({', '.join(names)}): pass")
        function = tree.body[0]
        assert isinstance(function, ast.FunctionDef)
        function.body = self.failing
        flags = self.code.co_flags & __future__.annotations.compiler_flag
        module = compile(tree, self.code.co_filename, "exec", flags, dont_inherit=True)
        code = next(c for c in module.co_consts if isinstance(c, types.CodeType))
        return code.replace(co_name=self.code.co_name, co_qualname=self.code.co_qualname)


def check_at(
    code: types.CodeType, offset: int, method: str, module: dict[str, Any]
) -> Check | None:
    """Returns the check that reads a truth value at an instruction; None if it can't be deferred.

    ``method`` is the tensor's method that reads the truth value. If it is ``return``, the
    instruction calls a function that returns the truth value.
    """
    end = _end_of_tested(code, offset, method)
    syntax = None if end is None else syntax_of(code)
    if syntax is None:
        return None
    for statement in ast.walk(syntax.root):
        if not isinstance(statement, ast.If | ast.Assert):
            continue
        fails = _deciding_truth(_operands(*_failing_truth(statement)), end, method, module)
        if fails is not None:
            failing = _failing_branch(statement)
            names = _names(code, failing)
            return None if names is None else Check(code, not fails, failing, names)
    return None


def returned_at(
    code: types.CodeType, offset: int, method: str, module: dict[str, Any]
) -> tuple[bool | None, bool | None]:
    """Returns the truth values of the tensor for which the function returns False and True.

    A truth value is None if the tensor alone does not determine the result.
    """
    end = _end_of_tested(code, offset, method)
    syntax = None if end is None else syntax_of(code)
    for statement in [] if syntax is None else ast.walk(syntax.root):
        if not isinstance(statement, ast.Return) or statement.value is None:
            continue
        false = _deciding_truth(_operands(statement.value, False), end, method, module)
        true = _deciding_truth(_operands(statement.value, True), end, method, module)
        if false is not None or true is not None:
            return false, true
    return None, None


# Tests of a tensor after which a function returns the tensor early. The numbers are the values of
# Method in csrc/python/deferred_checks.cpp.
_TESTS = {("all", False): 3, ("any", True): 4}


def early_return_at(
    code: types.CodeType, offset: int, method: str, module: dict[str, Any]
) -> tuple[int, bool] | None:
    """Returns the test that reads a truth value, if the function then returns the tested tensor.

    Recognizes ``if not x.all(): return x`` and ``if x.any(): return x``. The second element of the
    result says whether the function belongs to PyTorch.
    """
    end = _end_of_tested(code, offset, method)
    syntax = None if end is None else syntax_of(code)
    for statement in [] if syntax is None else ast.walk(syntax.root):
        if not isinstance(statement, ast.If):
            continue
        for node, truth in _operands(statement.test, True):
            if _end(node) == end and _asks(node, method, module):
                name, test = _test_of(node, truth)
                if test and _returns(statement, name):
                    return test, code.co_filename.startswith(_TORCH)
    return None


def check_after(code: types.CodeType, offset: int, test: int) -> Check | bool:
    """Returns the check of the tensor that a call returned after ``test`` failed in the call.

    The function must test the result in the next statement: ``valid = call()``, ``if not
    valid.all(): raise ...``. Returns True if the function returns the tensor to its caller, and
    False if there is no check.
    """
    end = _end_of_tested(code, offset, "return")
    syntax = None if end is None else syntax_of(code)
    if end is None or syntax is None:
        return False
    for parent in ast.walk(syntax.root):
        if isinstance(parent, ast.Return) and _is_call(parent.value, end):
            return True
        for body in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            if not isinstance(body, list):
                continue
            for statement, following in itertools.pairwise(body):
                if not isinstance(statement, ast.Assign) or not _is_call(statement.value, end):
                    continue
                return _check_of(code, statement.targets, following, test)
    return False


def _check_of(
    code: types.CodeType, targets: list[ast.expr], following: ast.stmt, test: int
) -> Check | bool:
    if len(targets) != 1 or not isinstance(targets[0], ast.Name):
        return False
    name = targets[0].id
    if isinstance(following, ast.If) and _returns(following, name):
        return any(_test_of(*o) == (name, test) for o in _operands(following.test, True))
    if not isinstance(following, ast.If | ast.Assert):
        return False
    if not any(_test_of(*o) == (name, test) for o in _operands(*_failing_truth(following))):
        return False
    failing = _failing_branch(following)
    names = _names(code, failing)
    if names is None or name in names:
        return False  # the branch reads a variable whose value would differ from eager mode
    return Check(code, True, failing, names)


def _test_of(node: ast.expr, truth: bool) -> tuple[str, int]:
    """Returns the tested variable and the test, for ``x.all()``, ``torch.all(x)`` and similar."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return "", 0
    kind = "all" if node.func.attr == "_is_all_true" else node.func.attr
    owner, given = node.func.value, node.args
    if isinstance(owner, ast.Name) and owner.id == "torch" and len(given) == 1:
        owner, given = given[0], []
    if not isinstance(owner, ast.Name) or given or node.keywords:
        return "", 0
    return owner.id, _TESTS.get((kind, truth), 0)


def _returns(statement: ast.If, name: str) -> bool:
    if len(statement.body) != 1 or statement.orelse:
        return False
    only = statement.body[0]
    return (
        isinstance(only, ast.Return) and isinstance(only.value, ast.Name) and only.value.id == name
    )


def _is_call(node: ast.expr | None, end: tuple[int, int]) -> bool:
    return isinstance(node, ast.Call) and _end(node) == end


def _deciding_truth(
    operands: Iterator[tuple[ast.expr, bool]], end: Any, method: str, module: dict[str, Any]
) -> bool | None:
    """Returns the truth value with which the operand at ``end`` decides the test, or None."""
    return next((t for n, t in operands if _end(n) == end and _asks(n, method, module)), None)


def calls(frame: types.FrameType, code: types.CodeType) -> bool:
    """Returns whether the frame is currently calling this code.

    Returns false if the frame calls a C function that calls the code, such as ``all(map(...))``.
    """
    called = _called_at(frame.f_code, frame.f_lasti)
    function = None if called is None else _function_of(called, frame)
    return getattr(function, "__code__", None) is code


def _function_of(called: ast.expr, frame: types.FrameType) -> Any:
    """Returns the function that an expression names. It may be a method of an object's class."""
    found = look_up(called, frame)
    if found is not None or not isinstance(called, ast.Attribute):
        return found
    owner = called.value
    if (
        isinstance(owner, ast.Call)
        and isinstance(owner.func, ast.Name)
        and owner.func.id == "super"
    ):
        names = frame.f_code.co_varnames
        this = frame.f_locals.get(names[0]) if names and not owner.args else None
        order = type(this).__mro__
        after = frame.f_locals.get("__class__")
        classes = order[order.index(after) + 1 :] if after in order else ()
    else:
        classes = type(look_up(owner, frame)).__mro__
    return next((c.__dict__[called.attr] for c in classes if called.attr in c.__dict__), None)


@functools.lru_cache(maxsize=1024)
def _called_at(code: types.CodeType, offset: int) -> ast.expr | None:
    end, syntax = _end_of_tested(code, offset, "return"), syntax_of(code)
    for node in [] if end is None or syntax is None else ast.walk(syntax.root):
        if isinstance(node, ast.Call) and _end(node) == end:
            return node.func
    return None


_TRUTHS = ("POP_JUMP", "TO_BOOL", "UNARY_NOT")
_PLAIN = (ast.Call, ast.Name, ast.Attribute, ast.Subscript, ast.BinOp, ast.UnaryOp)


def _end_of_tested(code: types.CodeType, offset: int, method: str) -> tuple[int, int] | None:
    """Returns the end (line, column) of the expression whose value an instruction reads.

    The last instruction of an expression has the end position of the expression. The start may
    differ: in a chain of methods over several lines, it is the start of the last method.
    """
    instruction, before = instruction_at(code, offset)
    if instruction is None or before is None:
        return None
    itself = ("PRECALL", "CALL", "COMPARE_OP") if method == "__bool__" else ("PRECALL", "CALL")
    if instruction.opname.startswith(itself):
        position = position_at(instruction)
    elif method == "__bool__" and instruction.opname.startswith(_TRUTHS):
        position = position_at(before)
    else:
        position = None
    return None if position is None else (position[1], position[3])


def _end(node: ast.expr) -> tuple[int | None, int | None]:
    return node.end_lineno, node.end_col_offset


def _asks(node: ast.expr, method: str, module: dict[str, Any]) -> bool:
    """Returns whether an operand's value is exactly the tensor's truth value."""
    if isinstance(node, ast.Compare):
        # From Python 3.13 on, the instruction of a comparison may read the truth value of its
        # result. A comparison of lists reads the truth values of elements; a comparison with a
        # number does not.
        return len(node.ops) == 1 and (
            sys.version_info < (3, 13) or _is_number(node.left) or _is_number(node.comparators[0])
        )
    if not isinstance(node, _PLAIN):
        return False
    if method == "return":
        return isinstance(node, ast.Call)
    if method == "item":
        return (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "item"
            and not node.args
            and not node.keywords
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "bool":
        return module.get("bool", builtins.bool) is builtins.bool
    return True


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _failing_truth(statement: ast.If | ast.Assert) -> tuple[ast.expr, bool | None]:
    """Returns the test, and its truth value that raises an error; None: both or none do."""
    if isinstance(statement, ast.Assert):
        return statement.test, False
    raises, others = _only_raises(statement.body), _only_raises(statement.orelse)
    return statement.test, (None if raises == others else raises)


def _failing_branch(statement: ast.If | ast.Assert) -> list[ast.stmt]:
    if isinstance(statement, ast.If):
        return statement.body if _only_raises(statement.body) else statement.orelse
    fails = ast.copy_location(ast.Assert(ast.Constant(False), statement.msg), statement)
    return [ast.fix_missing_locations(fails)]


def _operands(node: ast.expr, fails: bool | None) -> Iterator[tuple[ast.expr, bool]]:
    """Yields the operands that can decide a test alone, each with its deciding truth value.

    If such an operand is evaluated and has this truth value, the test has the value ``fails``.
    """
    if fails is None:
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield from _operands(node.operand, not fails)
    elif isinstance(node, ast.BoolOp):
        decides = isinstance(node.op, ast.Or)
        each = node.values if fails == decides else node.values[-1:]
        for value in each:
            yield from _operands(value, fails)
    else:
        yield node, fails


_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.If, ast.For, ast.Pass)
_LEAVING = (ast.Yield, ast.YieldFrom, ast.Await, ast.Lambda)


def _only_raises(branch: list[ast.stmt]) -> bool:
    """Returns whether a branch raises an error on every path and has only simple statements."""
    if not branch:
        return False
    for statement in branch:
        for node in ast.walk(statement):
            if isinstance(node, _LEAVING) or (isinstance(node, ast.Raise) and node.exc is None):
                return False
            if isinstance(node, ast.stmt) and not isinstance(node, (*_STATEMENTS, ast.Raise)):
                return False
    last = branch[-1]
    if isinstance(last, ast.If):
        return _only_raises(last.body) and _only_raises(last.orelse)
    return isinstance(last, ast.Raise)


def _names(code: types.CodeType, branch: list[ast.stmt]) -> list[str] | None:
    """Returns the function's variables that a branch reads; None if it can't run by itself."""
    own = {*code.co_varnames, *code.co_cellvars}
    names = set()
    for statement in branch:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                return None
            if not isinstance(node, ast.Name):
                continue
            if _is_private(node.id) or node.id in ("super", "locals", "__class__"):
                return None
            if isinstance(node.ctx, ast.Load):
                names.add(node.id)
            elif node.id not in own:
                return None  # other functions would see the assignment
    return sorted(names & {*own, *code.co_freevars})


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")
