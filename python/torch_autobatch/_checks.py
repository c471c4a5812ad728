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
import contextlib
import dis
import functools
import linecache
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

_Position = tuple[int, int, int, int]  # first line, last line, first column, last column

_TORCH = os.path.dirname(torch.__file__) + os.sep


# --- the source of running code ---


class _Syntax:
    """The syntax tree of a function."""

    def __init__(self, root: ast.AST) -> None:
        self.root = root

    @functools.cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.root) for child in ast.iter_child_nodes(node)}

    def innermost(self, position: _Position) -> ast.AST | None:
        found: tuple[int, ast.AST] | None = None
        for node in ast.walk(self.root):
            if not _holds(node, position):
                continue
            depth = sum(1 for _ in self.ancestors(node))
            if found is None or depth >= found[0]:
                found = depth, node
        return None if found is None else found[1]

    def ancestors(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Each one above a node, with its child on the way there."""
        while node is not self.root:
            parent = self.parents[node]
            yield parent, node
            node = parent


def _position(node: ast.AST) -> _Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]


def _holds(node: ast.AST, position: _Position) -> bool:
    if not hasattr(node, "lineno"):
        return False
    first, last, start, end = _position(node)
    line, end_line, column, end_column = position
    return (first, start) <= (line, column) and (end_line, end_column) <= (last, end)


@functools.lru_cache(maxsize=64)
def _tree_of(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _first_line(node: ast.AST) -> int:
    decorators = getattr(node, "decorator_list", [])
    lines: list[int] = [n.lineno for n in (node, *decorators)]
    return min(lines)


def _is_compiled_from(code: types.CodeType, statements: list[ast.stmt]) -> bool:
    """The file may have been edited since, or the code be made by somebody's rewriting."""
    flags = code.co_flags & __future__.annotations.compiler_flag
    module = ast.Module(statements, [])
    made = [compile(module, code.co_filename, "exec", flags, dont_inherit=True)]
    while made:
        one = made.pop()
        if one == code:
            return True
        made += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
    return False


@functools.lru_cache(maxsize=64)
def _imports_of(file: str) -> list[ast.stmt]:
    """The imports of a module, by which the compiler calls methods of these names otherwise."""
    found: list[ast.stmt] = []
    waiting: list[ast.AST] = [*(tree.body if (tree := _tree_of(file)) else [])]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.expr):
            waiting += ast.iter_child_nodes(node)
    return found


@functools.lru_cache(maxsize=1024)
def _syntax_of(code: types.CodeType) -> _Syntax | None:
    """None if there is no source, or not that which the code was compiled from."""
    tree = _tree_of(code.co_filename)
    if tree is None:
        return None
    if code.co_name == "<module>":
        return _Syntax(tree) if _is_compiled_from(code, tree.body) else None
    for statement in tree.body:
        last = statement.end_lineno or statement.lineno
        if not _first_line(statement) <= code.co_firstlineno <= last:
            continue
        functions = [
            node
            for node in ast.walk(statement)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name == code.co_name
            and _first_line(node) == code.co_firstlineno
        ]
        imports = _imports_of(code.co_filename)
        if len(functions) == 1 and _is_compiled_from(code, [*imports, statement]):
            return _Syntax(functions[0])
    return None


def _position_at(instruction: dis.Instruction) -> _Position | None:
    p = instruction.positions
    if p is None or None in p:
        return None
    return p.lineno, p.end_lineno, p.col_offset, p.end_col_offset  # type: ignore[return-value]


def _at(code: types.CodeType, offset: int) -> tuple[dis.Instruction | None, dis.Instruction | None]:
    """The instruction there (or in whose cache), and the one before it."""
    found = before = None
    for instruction in dis.get_instructions(code):
        if instruction.offset > offset:
            break
        found, before = instruction, found
    return found, before


# --- checks ---


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

    With the method ``return`` a call asks, of a function that returns the truth.
    """
    end = _end_of_tested(code, offset, method)
    syntax = None if end is None else _syntax_of(code)
    if syntax is None:
        return None
    for statement in ast.walk(syntax.root):
        if not isinstance(statement, ast.If | ast.Assert):
            continue
        for node, fails in _operands(*_failing_truth(statement)):
            if _end(node) != end or not _asks(node, method, module):
                continue
            failing = _failing_branch(statement)
            names = _names(code, failing)
            return None if names is None else Check(code, not fails, failing, names)
    return None


def returned_at(
    code: types.CodeType, offset: int, method: str, module: dict[str, Any]
) -> tuple[bool | None, bool | None]:
    """For either truth that a function may return: the truth here that makes it return that.

    None where nothing here does.
    """
    end = _end_of_tested(code, offset, method)
    syntax = None if end is None else _syntax_of(code)
    for statement in [] if syntax is None else ast.walk(syntax.root):
        if isinstance(statement, ast.Return) and statement.value is not None:
            false, true = (
                [
                    t
                    for n, t in _operands(statement.value, r)
                    if _end(n) == end and _asks(n, method, module)
                ]
                for r in (False, True)
            )
            if false or true:
                return (false[0] if false else None, true[0] if true else None)
    return None, None


def calls(frame: types.FrameType, code: types.CodeType) -> bool:
    """Whether the call that a function is in is of the function that has this code, and not of one
    written in C that calls it (``all(map(...))``)."""
    called = _called_at(frame.f_code, frame.f_lasti)
    function = None if called is None else _look_up(called, frame)
    return getattr(function, "__code__", None) is code


@functools.lru_cache(maxsize=1024)
def _called_at(code: types.CodeType, offset: int) -> ast.expr | None:
    end, syntax = _end_of_tested(code, offset, "return"), _syntax_of(code)
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
    instruction, before = _at(code, offset)
    if instruction is None or before is None:
        return None
    itself = ("PRECALL", "CALL", "COMPARE_OP") if method == "__bool__" else ("PRECALL", "CALL")
    if instruction.opname.startswith(itself):
        position = _position_at(instruction)
    elif method == "__bool__" and instruction.opname.startswith(_TRUTHS):
        position = _position_at(before)
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


# --- what may catch an error ---


def catches(code: types.CodeType, offset: int, entered: int) -> bool | None:
    """Whether a function may catch what is raised at an instruction; None: ``catches_in`` knows.

    ``entered`` is the instruction by which it opened the block, and -1 in other functions. What
    lies around the block catches the error at its end as well.
    """
    if code.co_name.startswith("<") and code.co_name != "<module>":
        return False  # lambdas and comprehensions
    if entered >= 0:
        after = next((i.offset for i in dis.get_instructions(code) if i.offset > entered), entered)
        body = _handler(code, after)
        if body is None:
            return True  # not by a `with`: where the block ends is not known
        if body == _handler(code, offset):
            return False
    elif _handler(code, offset) is None:
        return False
    guards = _guards(code, offset, entered)
    return guards is None or (None if guards else False)


def catches_in(frame: types.FrameType, entered: int) -> bool:
    """The same where it depends on which context managers are entered."""
    guards = _guards(frame.f_code, frame.f_lasti, entered)
    return guards is None or not all(_lets_pass(guard, frame) for guard in guards)


def _handler(code: types.CodeType, offset: int) -> int | None:
    """Where an error at an instruction goes to, in this function."""
    for start, end, target in _handlers(code):
        if start <= offset < end:
            return _handler(code, target) if _only_reraises(code, target) else target
    return None


_RESTORING = ("SWAP", "POP_TOP", "STORE_FAST", "STORE_DEREF", "STORE_NAME", "CALL_INTRINSIC_1")


@functools.lru_cache(maxsize=1024)
def _only_reraises(code: types.CodeType, target: int) -> bool:
    """Whether a handler is the end of a comprehension that is part of its function (PEP 709: since
    Python 3.12), or of a generator: it restores variables, and the error goes on."""
    for instruction in dis.get_instructions(code):
        if instruction.offset >= target and not instruction.opname.startswith(_RESTORING):
            return instruction.opname == "RERAISE"
    return False


@functools.lru_cache(maxsize=1024)
def _handlers(code: types.CodeType) -> list[tuple[int, int, int]]:
    """CPython's table of them (Objects/exception_handling_notes.txt). Of nested ones it has the
    inner one's."""
    numbers: list[int] = []
    value, more = 0, False
    for byte in code.co_exceptiontable:  # six bits each
        value = (value << 6 if more else 0) | (byte & 63)
        more = bool(byte & 64)
        if not more:
            numbers.append(value)
    entries = zip(*(iter(numbers),) * 4, strict=False)
    return [(2 * start, 2 * (start + size), 2 * target) for start, size, target, _ in entries]


@functools.lru_cache(maxsize=4096)
def _guards(code: types.CodeType, offset: int, entered: int) -> tuple[ast.expr, ...] | None:
    """The context managers around an instruction; None if something else may catch an error."""
    syntax = _syntax_of(code)
    instruction, _ = _at(code, offset)
    position = None if instruction is None else _position_at(instruction)
    if syntax is None or position is None:
        return None
    # What enters a `with`, or is the last of the expression that does.
    block = [_position_at(i) for i in _at(code, entered) if i is not None] if entered >= 0 else []
    node = syntax.innermost(position)
    if node is None:
        return None
    guards: list[ast.expr] = []
    for parent, child in syntax.ancestors(node):
        if isinstance(parent, ast.Try | ast.TryStar):
            if (child in parent.body and parent.handlers) or _leaves(parent.finalbody):
                return None
        elif isinstance(parent, ast.With):
            managers = [item.context_expr for item in parent.items]
            if child in parent.body:
                for i, manager in enumerate(managers):
                    if _position(manager) in block:
                        return (*guards, *managers[i + 1 :])
                guards += managers
            elif child is not parent.items[0]:
                return None
        elif isinstance(parent, ast.AsyncWith):
            return None
    return tuple(guards) if entered < 0 else None


def _leaves(statements: list[ast.stmt]) -> bool:
    leaving = (ast.Return, ast.Break, ast.Continue)
    return any(isinstance(node, leaving) for s in statements for node in ast.walk(s))


@functools.cache
def _passing() -> frozenset[Any]:
    """``__exit__`` of context managers that let errors pass, by no side effect of which a program
    could tell when the error came."""
    from torch_autobatch._scope import batch

    classes: list[Any] = [
        batch,
        contextlib.nullcontext,
        torch.no_grad,
        torch.enable_grad,
        torch.set_grad_enabled,
        torch.inference_mode,
        torch.autocast,
        torch.amp.autocast,
        torch.cpu.amp.autocast,  # type: ignore[attr-defined]
        torch.cuda.amp.autocast,
        torch.profiler.record_function,
    ]
    return frozenset(kind.__exit__ for kind in classes)


def _lets_pass(manager: ast.expr, frame: types.FrameType) -> bool:
    if not isinstance(manager, ast.Call):
        made = _look_up(manager, frame)
        return getattr(type(made), "__exit__", None) in _passing()
    maker = _look_up(manager.func, frame)
    if isinstance(maker, types.MethodType) and maker.__name__ == "clone":  # @torch.no_grad()
        maker = type(maker.__self__)
    return isinstance(maker, type) and getattr(maker, "__exit__", None) in _passing()


def _look_up(expression: ast.expr, frame: types.FrameType) -> Any:
    """What a name, or an attribute of a module or object, is; None if that is not plain."""
    if isinstance(expression, ast.Name):
        for names in (frame.f_locals, frame.f_globals, frame.f_builtins):
            if expression.id in names:
                return names[expression.id]
    if isinstance(expression, ast.Attribute):
        owner = _look_up(expression.value, frame)
        return getattr(owner, "__dict__", {}).get(expression.attr)
    return None
