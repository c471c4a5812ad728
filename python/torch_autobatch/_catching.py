"""Decides whether the code around an instruction may catch an error that is raised there.

A check may be deferred to the flush only if no code catches its error (``_deferred_checks.py``). If
it is unknown whether code catches the error, the functions of this module assume that it does.
"""

import ast
import contextlib
import dis
import functools
import types
from typing import Any

import torch

from torch_autobatch._source import instruction_at, look_up, position_at, position_of, syntax_of


def catches(code: types.CodeType, offset: int, entered: int) -> bool | None:
    """Returns whether a function may catch an error that is raised at an instruction.

    None means that the answer depends on the frame: see ``catches_in``. ``entered`` is the offset
    of the instruction that entered the block, or -1 if another function opened the block. Handlers
    around the block don't count, because they also catch an error that is raised at the end of the
    block.
    """
    if code.co_name.startswith("<") and code.co_name != "<module>":
        return False  # lambdas and comprehensions have no handlers
    if entered >= 0:
        after = next((i.offset for i in dis.get_instructions(code) if i.offset > entered), entered)
        body = _handler(code, after)
        if body is None:
            return True  # no `with` entered the block, so the end of the block is unknown
        if body == _handler(code, offset):
            return False
    elif _handler(code, offset) is None:
        return False
    guards = _guards(code, offset, entered)
    return guards is None or (None if guards else False)


def catches_in(frame: types.FrameType, entered: int) -> bool:
    """Returns whether code in the frame may catch an error, if ``catches`` returned None.

    Examines the context managers in the frame.
    """
    guards = _guards(frame.f_code, frame.f_lasti, entered)
    return guards is None or not all(_lets_pass(guard, frame) for guard in guards)


def _handler(code: types.CodeType, offset: int) -> int | None:
    """Returns the offset of the handler for an error at an instruction; None without a handler.

    Skips handlers that only raise the error again.
    """
    for start, end, target in exception_table(code):
        if start <= offset < end:
            return _handler(code, target) if _only_reraises(code, target) else target
    return None


_RESTORING = ("SWAP", "POP_TOP", "STORE_FAST", "STORE_DEREF", "STORE_NAME", "CALL_INTRINSIC_1")


@functools.lru_cache(maxsize=1024)
def _only_reraises(code: types.CodeType, target: int) -> bool:
    """Returns whether a handler only restores variables and raises the error again.

    From Python 3.12 on, the compiler makes a handler of this kind for a comprehension within a
    function (PEP 709), and another one around the body of a generator.
    """
    for instruction in dis.get_instructions(code):
        if instruction.offset >= target and not instruction.opname.startswith(_RESTORING):
            return instruction.opname == "RERAISE"
    return False


@functools.lru_cache(maxsize=1024)
def exception_table(code: types.CodeType) -> list[tuple[int, int, int]]:
    """Returns CPython's exception table (Objects/exception_handling_notes.txt).

    An entry is a tuple (start, end, handler) of offsets in bytes. If handlers are nested, the
    entry of an instruction contains the innermost handler.
    """
    numbers: list[int] = []
    value, more = 0, False
    for byte in code.co_exceptiontable:  # each byte has six bits of a number
        value = (value << 6 if more else 0) | (byte & 63)
        more = bool(byte & 64)
        if not more:
            numbers.append(value)
    entries = zip(*(iter(numbers),) * 4, strict=False)
    return [(2 * start, 2 * (start + size), 2 * target) for start, size, target, _ in entries]


@functools.lru_cache(maxsize=4096)
def _guards(code: types.CodeType, offset: int, entered: int) -> tuple[ast.expr, ...] | None:
    """Returns the context managers around an instruction.

    Returns None if something other than a context manager may catch an error, or if the source is
    unknown. If this function entered the block, only context managers inside the block count.
    """
    syntax = syntax_of(code)
    instruction, _ = instruction_at(code, offset)
    position = None if instruction is None else position_at(instruction)
    if syntax is None or position is None:
        return None
    # Positions of the instruction that entered the block and of the previous instruction. One of
    # these two positions is the position of the `with` item's expression.
    block = (
        [position_at(i) for i in instruction_at(code, entered) if i is not None]
        if entered >= 0
        else []
    )
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
                    if position_of(manager) in block:
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
    """Returns the ``__exit__`` methods of context managers that let a deferred error pass.

    These context managers catch no errors, and a program cannot observe from their side effects
    when the error was raised.
    """
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
        made = look_up(manager, frame)
        return getattr(type(made), "__exit__", None) in _passing()
    maker = look_up(manager.func, frame)
    if isinstance(maker, types.MethodType) and maker.__name__ == "clone":  # for @torch.no_grad()
        maker = type(maker.__self__)
    return isinstance(maker, type) and getattr(maker, "__exit__", None) in _passing()
