"""Streams and events. A captured op has not been launched yet, so what orders launches must flush.

An event marks what was launched before it, and a change of stream says where later work goes. So in
a block what was captured is launched, on the stream that it was captured in, before either happens.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_autobatch import _C


def _after_flush(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        _C.flush_open_scope(reason)
        return function(*args, **options)

    return wrapper


def _watch(owner: Any, names: tuple[str, ...], reason: str) -> None:
    for name in names:
        function = getattr(owner, name, None)
        if function is not None:
            setattr(owner, name, _after_flush(function, reason))


def watch() -> None:
    """For good: outside of blocks nothing is different."""
    change = "the current stream changes"
    _watch(torch.cuda, ("set_stream",), change)
    _watch(torch.cuda.Stream, ("__enter__", "__exit__"), change)
    _watch(getattr(torch, "accelerator", None), ("set_stream",), change)
    _watch(torch.cuda.Event, ("record",), "an event is recorded")
