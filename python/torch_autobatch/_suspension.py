"""A block may not stay open where its code is suspended, at an ``await`` or a ``yield``.

Whoever runs meanwhile on the same thread, another task or the generator's caller, would have its
ops captured, and would find its tensors pending.
"""

import dis
import inspect
from functools import lru_cache
from types import CodeType, FrameType

from torch_autobatch._catching import exception_table

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def check(frame: FrameType | None, opener: str) -> None:
    """Of the frame that enters a ``with``.

    Raises:
        RuntimeError: if the body of the ``with`` awaits or yields. One that ``contextmanager``
            decorates may: its caller's ``with`` is looked at in its place.
    """
    while frame is not None and frame.f_code.co_flags & _SUSPENDABLE:
        caller = frame.f_back
        if caller is not None and caller.f_globals.get("__name__") == "contextlib":
            frame = caller.f_back
            continue
        if _is_suspended_within(frame.f_code, frame.f_lasti):
            awaits = not frame.f_code.co_flags & inspect.CO_GENERATOR
            raise RuntimeError(
                f"torch_autobatch: {opener} at {frame.f_code.co_filename}:{frame.f_lineno} would "
                f"stay open across {'an await' if awaits else 'a yield'}, and capture the ops of "
                f"{'other tasks' if awaits else 'whoever iterates'} meanwhile. "
                + (
                    "Await before the block or after it."
                    if awaits
                    else "Collect results in the block and yield them after it, or decorate the "
                    "generator with @batch(), which closes the block at each yield."
                )
            )
        return


@lru_cache(maxsize=1024)
def _is_suspended_within(code: CodeType, entered_at: int) -> bool:
    """Whether the body of the ``with`` that is entered at this instruction yields or awaits."""
    ranges = exception_table(code)
    _, target = min(((r[0], r[2]) for r in ranges if r[0] > entered_at), default=(0, None))
    body = [(start, end) for start, end, handler in ranges if handler == target]
    return any(
        instruction.opname == "YIELD_VALUE"
        and min(start for start, _ in body) <= instruction.offset < max(end for _, end in body)
        for instruction in (dis.get_instructions(code) if body else ())
    )
