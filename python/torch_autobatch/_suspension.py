"""Rejects blocks that would stay open while their code is suspended at an ``await`` or ``yield``.

While the code is suspended, other code runs on the same thread (another task, the generator's
caller). The block would capture the ops of the other code, which would then get pending tensors.
"""

import dis
import inspect
from functools import lru_cache
from types import CodeType, FrameType

from torch_autobatch._catching import exception_table

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# These modules run generators as context managers: the block is open in the code that uses them.
_MANAGERS = ("contextlib", "_pytest.fixtures", "pytest_asyncio.plugin")
# Prefixes of the names of instructions between the entry of a `with` and the start of its body.
_ENTERING = (
    *("POP_TOP", "STORE_", "UNPACK_", "SWAP", "NOP", "CACHE", "RESUME"),
    *("SEND", "YIELD_VALUE", "JUMP_BACKWARD_NO_INTERRUPT", "END_SEND", "CLEANUP_THROW"),
)


def check(frame: FrameType | None, opener: str) -> None:
    """Checks the frame that enters a block, either by a ``with`` or by a call.

    Context managers (``contextmanager``, ``ExitStack``, an ``__enter__``) leave the block open for
    their callers. For a context manager, the caller's frame is checked instead. ``opener`` names
    the block in the error message.

    Raises:
        RuntimeError: if the code awaits or yields while the block is open.
    """
    is_left_open = False  # whether a call left the block open outside any `with`
    while frame is not None:
        code, at, caller = frame.f_code, frame.f_lasti, frame.f_back
        is_suspendable = bool(code.co_flags & _SUSPENDABLE)
        if _is_manager(frame) or (is_suspendable and caller and _runs_managers(caller)):
            is_left_open = code.co_name.startswith("enter_")  # such as ExitStack.enter_context
        elif is_suspendable:
            if _is_suspended_within(code, at):
                raise RuntimeError(_message(frame, opener))
            return
        elif not is_left_open or _enclosing(code, at) is not None:
            return
        frame = caller


def _is_manager(frame: FrameType) -> bool:
    return frame.f_code.co_name in ("__enter__", "__aenter__") or _runs_managers(frame)


def _runs_managers(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _MANAGERS


def _message(frame: FrameType, opener: str) -> str:
    awaits = not frame.f_code.co_flags & inspect.CO_GENERATOR
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if awaits:
        return (
            f"torch_autobatch: {opener} at {place} would stay open across an await, and capture "
            "the ops of other tasks meanwhile. Await before the block or after it."
        )
    return (
        f"torch_autobatch: {opener} at {place} would stay open across a yield, and capture the "
        "ops of the code that iterates over the generator. Collect results in the block and yield "
        "them after the block, or decorate the generator with @batch(), which closes the block at "
        "each yield."
    )


@lru_cache(maxsize=1024)
def _is_suspended_within(code: CodeType, entered_at: int) -> bool:
    """Whether the code yields or awaits while the block entered at this instruction is open."""
    block = _body(code, entered_at) or _enclosing(code, entered_at)
    return any(
        instruction.opname == "YIELD_VALUE"
        and instruction.offset > entered_at
        and (
            block in _withs_around(code, instruction.offset)
            if block is not None
            else instruction.offset < _left_at(code, entered_at)
        )
        and not _is_entering(code, entered_at, instruction.offset)
        for instruction in dis.get_instructions(code)
    )


def _left_at(code: CodeType, entered_at: int) -> int:
    """Returns where a block opened by a call of `__enter__` ends.

    This is the offset of the next reference to `__exit__`, or the end of the code if there is none.
    """
    instructions = (i for i in dis.get_instructions(code) if i.offset > entered_at)
    leaves = (i.offset for i in instructions if i.argval == "__exit__")
    return next(leaves, len(code.co_code))


def _body(code: CodeType, entered_at: int) -> int | None:
    """Returns the handler of the `with` entered at the offset; None if a call enters the block."""
    starts = [r for r in exception_table(code) if r[0] > entered_at and _is_of_with(code, r[2])]
    if not starts:
        return None
    start, _, handler = min(starts)
    return handler if _is_entering(code, entered_at, start) else None


def _is_entering(code: CodeType, entered_at: int, until: int) -> bool:
    """Whether all instructions between the two offsets belong to the entry of a `with`."""
    return all(
        instruction.opname.startswith(_ENTERING)
        for instruction in dis.get_instructions(code)
        if entered_at < instruction.offset < until
    )


def _enclosing(code: CodeType, offset: int) -> int | None:
    """Returns the handler of the innermost `with` around an instruction."""
    return next(iter(_withs_around(code, offset)), None)


def _withs_around(code: CodeType, offset: int) -> list[int]:
    """Returns the handlers of the `with`s around an instruction, innermost first.

    Follows the path of an error from handler to handler. Offsets do not give the nesting, because
    the compiler may place the handler of a body after code that follows the body.
    """
    seen: list[int] = []
    while True:
        ranges = exception_table(code)
        handler = next((to for start, end, to in ranges if start <= offset < end), None)
        if handler is None or handler in seen:
            return [handler for handler in seen if _is_of_with(code, handler)]
        seen.append(handler)
        offset = handler


@lru_cache(maxsize=4096)
def _is_of_with(code: CodeType, handler: int) -> bool:
    """Whether a handler belongs to a `with` rather than a `try`."""
    after = (i.opname for i in dis.get_instructions(code) if i.offset > handler)
    return next((name for name in after if name != "CACHE"), "") == "WITH_EXCEPT_START"
