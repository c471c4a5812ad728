"""Attributes of shared modules that an instance of a ``map`` sets, such as ``self.hidden = h``.

Other instances must not run between the assignment and the code that reads the attribute. So an
instance that sets an attribute keeps its turn: its later reads are computed at once, and it runs to
its end before another instance runs.
"""

import sys
import threading
from typing import Any

import torch
from torch.utils import _pytree

from torch_autobatch import _C

_Module = torch.nn.Module


def _is_state(value: object) -> bool:
    """Whether later code may compute with the value: tensors, containers of tensors, and None.

    Numbers are left out: a counter has the same value at the end in any order.
    """
    if value is None or isinstance(value, torch.Tensor):
        return True
    if not isinstance(value, tuple | list | dict):
        return False
    return any(isinstance(x, torch.Tensor) for x in _pytree.tree_leaves(value))


class _Watch:
    """Replaces ``nn.Module.__setattr__`` while a map runs on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps = 0
        self._original: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._maps += 1
            if self._maps == 1:
                self._original = _Module.__setattr__
                _Module.__setattr__ = _set_attribute  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._maps -= 1
            if self._maps == 0 and _Module.__setattr__ is _set_attribute:
                _Module.__setattr__ = self._original  # type: ignore[method-assign]

    def set(self, module: _Module, name: str, value: object) -> None:
        self._original(module, name, value)


def _set_attribute(module: _Module, name: str, value: object) -> None:
    # A module that an instance creates belongs to the instance.
    if _is_state(value) and sys._getframe(1).f_code.co_name != "__init__":
        _C.keep_turn()
    watch_modules.set(module, name, value)


watch_modules = _Watch()
