"""Handles attributes of shared modules that an instance of a ``map`` sets (``self.hidden = h``).

A request of an ``Engine`` is an instance too.

Other instances must not run between the assignment and the code that reads the attribute. So an
instance that has set an attribute is not suspended: its later reads are computed immediately, and
no other instance runs until this instance ends.
"""

import sys
import threading
import types
from typing import Any

import torch
from torch.utils import _pytree

from torch_autobatch import _C

_Module = torch.nn.Module


def _is_state(value: object) -> bool:
    """Whether later code may compute with the value: a tensor, a container of tensors, or None.

    Numbers are excluded, because a counter has the same final value in any order.
    """
    if value is None or isinstance(value, torch.Tensor):
        return True
    if not isinstance(value, tuple | list | dict):
        return False
    return any(isinstance(x, torch.Tensor) for x in _pytree.tree_leaves(value))


class _Replacement:
    """Contains the code that replaces ``nn.Module.__setattr__`` while instances run.

    Python lets code replace a function's code only if both have the same number of free variables.
    """

    def __setattr__(self, name: str, value: object) -> None:
        __class__  # type: ignore[name-defined]  # noqa: B018  the free variable of the original
        from torch_autobatch._module_attributes import watch_modules

        watch_modules.set_attribute(self, name, value)


class _Watch:
    """Replaces the code of ``nn.Module.__setattr__`` while instances run on any thread.

    The function object stays the same. If the class changed, Python would clear its attribute
    caches for all modules, which takes 0.4 ms each time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._function: Any = _Module.__setattr__
        self._code = self._function.__code__
        self._original = types.FunctionType(
            self._code, self._function.__globals__, "__setattr__", None, self._function.__closure__
        )
        self._ours = _Replacement.__setattr__.__code__

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            fits = len(self._ours.co_freevars) == len(self._code.co_freevars)
            if fits and self._users == 1 and self._function.__code__ is self._code:
                self._function.__code__ = self._ours

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._function.__code__ is self._ours:
                self._function.__code__ = self._code

    def set_attribute(self, module: object, name: str, value: object) -> None:
        # A module that an instance creates belongs to this instance.
        if _is_state(value) and sys._getframe(2).f_code.co_name != "__init__":
            _C.keep_turn(f"{type(module).__name__}.{name}")
        self._original(module, name, value)


watch_modules = _Watch()
