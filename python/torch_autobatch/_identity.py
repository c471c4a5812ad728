"""Computes a number that identifies the code that a block or a map can call.

One place of a program may open blocks for many models, for example a function that times each
model. The timing trials of one model must not affect another model
(``csrc/autobatch/scope/trials.h``).
"""

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_autobatch._cell import _names_in, _next_behind

# Types that are not searched, because data differs between blocks and rarely contains code.
_DATA = (torch.Tensor, list, tuple, dict, set, str, int, float, type(None), type, types.ModuleType)


def of_frame(frame: types.FrameType) -> int:
    """Returns the number of a block that the frame opens.

    Uses the frame's variables and the globals that its code names.
    """
    names = _names_in(frame.f_code)
    table = frame.f_globals
    named = {**frame.f_locals, **{name: table[name] for name in names if name in table}}
    flags = {item for item in named.items() if type(item[1]) is bool}
    return _number(named.values(), flags)


def of_function(function: Any) -> int:
    """Returns the number of a map of ``function``."""
    return _number([function], ())


def _number(values: Iterable[Any], flags: Iterable[Any]) -> int:
    try:
        return hash(frozenset((*_behind(values), *flags))) & ((1 << 64) - 1)
    except Exception:  # the object can't be inspected, as a proxy of a dead object
        return 0


def _behind(values: Iterable[Any]) -> set[int]:
    """Returns the ids of the modules and of the functions' code objects reachable from values."""
    ids: set[int] = set()
    seen: set[int] = set()
    queue = [(value, True) for value in values]
    while queue:
        value, is_near = queue.pop()
        if id(value) in seen or isinstance(value, _DATA):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            ids.add(id(value))
            continue
        if isinstance(value, types.FunctionType):
            ids.add(id(value.__code__))
        queue.extend((x, is_near) for x in _next_behind(value))
        if is_near and not callable(value):  # searches the attributes of a trainer or an example
            queue.extend((x, False) for x in getattr(value, "__dict__", {}).values())
    return ids
