"""Which checks of a program may wait for the flush, as ``if not valid.all(): raise ...`` may.

Where the truth of a tensor is asked and one answer leads to nothing but an error, ``batch()`` goes
on with the other answer, and the flush that computes the tensor looks. That is decided here, by the
source: the statement must be an ``if`` or an ``assert`` whose failing branch ends with ``raise``,
whatever its way, and nothing between it and the block may catch the error. What was found is kept
by code object and instruction (``csrc/python/checks.cpp``). In doubt the answer is no, and the
value is read at once.
"""

import __future__

import ast
import builtins
import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from torch_autobatch._source import instruction_at, look_up, position_at, syntax_of

_TORCH = os.path.dirname(torch.__file__) + os.sep


class Check:
    """A statement that asks for a truth, and raises if that is not the expected one."""

    def __init__(
        self, code: types.CodeType, expected: bool, failing: list[ast.stmt], names: list[str]
    ) -> None:
        self.code = code
        self.expected = expected
        self.failing = failing  # the branch
        self.names = tuple(names)  # of the function's variables, those that the branch reads
        self.is_of_torch = code.co_filename.startswith(_TORCH)

    def failure(
        self, variables: dict[str, Any], module: dict[str, Any], asked: str
    ) -> BaseException:
        """What the branch raises, which runs now, with the variables as they were.

        ``asked`` is the line of the user's code.
        """
        run = types.FunctionType(self._compile(list(variables)), module)
        try:
            run(**variables)
        except BaseException as error:
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next  # without this function
            note = "torch_autobatch.batch() let this check wait until its value was computed"
            error.add_note(note + (f"; it was asked for at {asked}" if asked else ""))
            return error
        return RuntimeError(f"torch_autobatch: a check in {self.code.co_qualname} failed")

    def _compile(self, names: list[str]) -> types.CodeType:
        tree = ast.parse(f"def check({', '.join(names)}): pass")
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
    """What asks for a truth at an instruction, by ``method`` of a tensor; None if it can't wait.

    With the method ``return``, the instruction is the call of a function that returns the truth.
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
    """The truth of the tensor that makes the function return False, and the one for True.

    None where the tensor alone does not decide.
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


def _deciding_truth(
    operands: Iterator[tuple[ast.expr, bool]], end: Any, method: str, module: dict[str, Any]
) -> bool | None:
    """Of the operand that ends at ``end``, if ``method`` asks for its truth."""
    return next((t for n, t in operands if _end(n) == end and _asks(n, method, module)), None)


def calls(frame: types.FrameType, code: types.CodeType) -> bool:
    """Whether the call that the frame waits for runs this code itself, and is not a call of a
    function written in C that calls it (``all(map(...))``)."""
    called = _called_at(frame.f_code, frame.f_lasti)
    function = None if called is None else look_up(called, frame)
    return getattr(function, "__code__", None) is code


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
    """Where the expression ends whose truth, or number, an instruction asks for.

    The last instruction of an expression has the expression's position. (Not always its start: of
    a chain of methods over several lines it is the last one's.)
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
    """Whether an operand's value is the tensor's truth and nothing else."""
    if isinstance(node, ast.Compare):
        # A comparison may ask for the truth itself, from Python 3.13 on; so do those of lists, for
        # their elements. But not with numbers.
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
    """The test, and what truth of it leads to an error; None if neither does, or both do."""
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
    """The operands of a test that alone decide: where one is evaluated and has this truth, the
    statement fails."""
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
_LEAVING = (
    ast.Return,
    ast.Break,
    ast.Continue,
    ast.Yield,
    ast.YieldFrom,
    ast.Await,
    ast.Try,
    ast.With,
    ast.Lambda,
)


def _only_raises(branch: list[ast.stmt]) -> bool:
    """Whether it ends in an error whatever happens, and nothing in it is unusual."""
    if not branch or not all(isinstance(s, (*_STATEMENTS, ast.Raise)) for s in branch):
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
    """The function's variables that a branch reads; None if it can't run by itself."""
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
                return None  # another function would see it
    return sorted(names & {*own, *code.co_freevars})


def _is_private(name: str) -> bool:
    return name.startswith("__") and not name.endswith("__")
