"""What packages keep for the whole process, and each instance of a ``map`` has for itself."""

import copy
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torch_autobatch import _C

_S = TypeVar("_S")


def register_fiber_state(save: Callable[[], _S], restore: Callable[[_S], object]) -> None:
    """Gives each instance of a ``map`` its own of something that a process has one of.

    For a package that keeps a stack of contexts in a global variable: while an instance waits for a
    value, others run, and are not to see what it has entered. Each instance starts with the state
    that the map was called in, and the map leaves it so. For maps that start after the call; one
    call a process.

    Args:
        save: gives the state as it is. What is changed in place must be copied.
        restore: makes the state what ``save`` gave.

    Pyro's stack of effect handlers is known. Context variables (``contextvars``) need no call.

    Example::

        def restore(saved):
            package.STACK[:] = saved


        ab.register_fiber_state(lambda: list(package.STACK), restore)
    """
    _C.register_fiber_state(save, restore)


# --- packages that are known, once they are imported ---


def _register_pyro(runtime: Any) -> None:
    stack, allocator = runtime._PYRO_STACK, runtime._DIM_ALLOCATOR._stack
    enumeration = vars(runtime._ENUM_ALLOCATOR)

    def save() -> tuple[list[Any], list[Any], dict[str, Any]]:
        return list(stack), list(allocator), {k: copy.copy(v) for k, v in enumeration.items()}

    def restore(saved: tuple[list[Any], list[Any], dict[str, Any]]) -> None:
        stack[:], allocator[:] = saved[0], saved[1]
        enumeration.clear()
        enumeration.update(saved[2])

    register_fiber_state(save, restore)


_KNOWN: dict[str, Callable[[Any], None]] = {"pyro.poutine.runtime": _register_pyro}
_registered: set[str] = set()


def register_known() -> None:
    """Those of the packages that the program has imported."""
    for name, register in _KNOWN.items():
        if name in sys.modules and name not in _registered:
            _registered.add(name)
            register(sys.modules[name])


# --- a hint where something is shared that is not known ---

_OWN = (os.path.dirname(torch.__file__), os.path.dirname(__file__), os.path.dirname(os.__file__))


def note_shared_state(error: BaseException) -> None:
    """To an instance's error that a context manager raised which may be shared."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        is_own = code.co_filename.startswith(_OWN) and "-packages" not in code.co_filename
        if code.co_name not in ("__enter__", "__exit__") or is_own:
            continue
        error.add_note(
            f"raised in {code.co_qualname} at {code.co_filename}:{line}. If this context manager "
            "keeps a stack for the whole process, the instances of ab.map share it, for they take "
            "turns where they read values: ab.register_fiber_state gives each instance its own"
        )
        return
