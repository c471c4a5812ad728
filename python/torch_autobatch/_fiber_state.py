"""Gives each instance of a ``map`` a copy of packages' process-wide state."""

import copy
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.nn.utils import stateless
from torch.nn.utils._named_member_accessor import NamedMemberAccessor

from torch_autobatch import _C

_S = TypeVar("_S")


def register_fiber_state(save: Callable[[], _S], restore: Callable[[_S], object]) -> None:
    """Gives each instance of a ``map`` its own copy of a process-wide state.

    A package needs this if it keeps a stack of contexts in a global variable. While one instance
    waits for a value, other instances run, and they must not see the contexts of the waiting
    instance. Each instance starts with the state that was current when ``map`` was called. After
    the map, the state is the same as before. The hooks apply to maps that start after this call.
    Register each state once per process.

    Args:
        save: returns the current state. Objects that are changed in place must be copied.
        restore: sets the state to a value that ``save`` returned.

    Pyro's stack of effect handlers is registered automatically. Context variables
    (``contextvars``) need no registration.

    Example::

        def restore(saved):
            package.STACK[:] = saved


        ab.register_fiber_state(lambda: list(package.STACK), restore)
    """
    _C.register_fiber_state(save, restore)


# --- functional_call: replaces a module's parameters during a call ---


class _Swapped(threading.local):
    """The active calls of ``functional_call`` on this thread. The innermost call is last."""

    def __init__(self) -> None:
        self.accessors: list[_Accessor] = []

    def push(self, accessor: "_Accessor") -> None:
        self.accessors.append(accessor)
        _all_swapped.append(accessor)

    def remove(self, accessor: "_Accessor") -> None:
        self.accessors.remove(accessor)
        _all_swapped.remove(accessor)

    def set(self, wanted: "tuple[_Accessor, ...]") -> None:
        """Makes the calls ``wanted`` the active ones.

        Takes the tensors of all other calls out of their modules, and puts the tensors of
        the calls ``wanted`` back into their modules.
        """
        same = 0
        for ours, theirs in zip(self.accessors, wanted, strict=False):
            if ours is not theirs:
                break
            same += 1
        for accessor in reversed(self.accessors[same:]):
            accessor.exchange()
            self.remove(accessor)
        for accessor in wanted[same:]:
            accessor.exchange()
            self.push(accessor)


class _Accessor(NamedMemberAccessor):
    """The accessor of one call of ``functional_call``.

    The call swaps tensors into the module at its start, and swaps them back at its end.
    """

    outer: dict[str, torch.Tensor] | None = None  # tensors that are swapped out of the module

    def swap_tensors_dict(
        self, named_tensors: dict[str, torch.Tensor], allow_missing: bool = False
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        if self.outer is not None:  # the call ends, and swaps the tensors back
            if self in _swapped.accessors:
                _swapped.remove(self)
            return super().swap_tensors_dict(named_tensors, allow_missing)
        self.outer = {}
        found = super().swap_tensors_dict(named_tensors, allow_missing)
        self.outer = found[0]
        _swapped.push(self)
        return found

    def exchange(self) -> None:
        """Swaps the tensors in the module with the tensors in ``outer``."""
        # In reverse order, because two names may refer to one tensor.
        last_first = dict(reversed((self.outer or {}).items()))
        self.outer, _ = super().swap_tensors_dict(last_first, allow_missing=True)


_all_swapped: list[_Accessor] = []  # active calls of all threads
_swapped = _Swapped()
_C.replace(stateless, "NamedMemberAccessor", _Accessor)
_C.register_fiber_state(lambda: tuple(_swapped.accessors), _swapped.set, _all_swapped)


# --- packages that are registered automatically, once they are imported ---


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
    """Registers the state of each known package that the program has imported."""
    for name, register in _KNOWN.items():
        if name in sys.modules and name not in _registered:
            _registered.add(name)
            register(sys.modules[name])


# --- a note about shared state that is not registered ---

_OWN = (os.path.dirname(torch.__file__), os.path.dirname(__file__), os.path.dirname(os.__file__))


def note_shared_state(error: BaseException) -> None:
    """Adds a note to an error of an instance if a context manager raised it.

    Context managers of PyTorch, this package and the standard library are excluded. Any other
    context manager may keep a stack that the instances share.
    """
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        is_own = code.co_filename.startswith(_OWN) and "-packages" not in code.co_filename
        if code.co_name not in ("__enter__", "__exit__") or is_own:
            continue
        error.add_note(
            f"raised in {code.co_qualname} at {code.co_filename}:{line}. If this context manager "
            "keeps a stack for the whole process, the instances of ab.map share it, because they "
            "take turns when they read values. Call ab.register_fiber_state to give each instance "
            "its own stack"
        )
        return
