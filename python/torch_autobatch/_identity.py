"""What a block or a map can call, as a number (``csrc/autobatch/scope/trials.h``).

One place of a program may open blocks of many models: a function that measures each of them. What
is known of one model must not decide for another.
"""

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_autobatch._cell import _names_in, _next_behind

# Data differs from block to block, and what a program does is seldom in it.
_DATA = (torch.Tensor, list, tuple, dict, set, str, int, float, type(None), type, types.ModuleType)


def of_frame(frame: types.FrameType) -> int:
    """Of a block that the frame opens: its variables, and the globals that its code names."""
    names = _names_in(frame.f_code)
    table = frame.f_globals
    named = {**frame.f_locals, **{name: table[name] for name in names if name in table}}
    flags = {item for item in named.items() if isinstance(item[1], bool)}
    return _number(named.values(), flags)


def of_function(function: Any) -> int:
    """Of a map: by its function."""
    return _number([function], ())


def _number(values: Iterable[Any], flags: Iterable[Any]) -> int:
    return hash(frozenset((*_behind(values), *flags))) & ((1 << 64) - 1)


def _behind(values: Iterable[Any]) -> set[int]:
    """The ids of modules, and of the code of functions."""
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
        if is_near and not callable(value):  # a trainer's or an example's own
            queue.extend((x, False) for x in getattr(value, "__dict__", {}).values())
    return ids
