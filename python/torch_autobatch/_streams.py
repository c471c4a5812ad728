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
        if function is None or hasattr(function, "flushes_first"):
            continue
        watched: Any = _after_flush(function, reason)
        watched.flushes_first = True
        try:
            setattr(owner, name, watched)
        except TypeError:  # a class of torch's C++
            _C.replace_method(owner, name, watched)


def watch() -> None:
    """For good: outside of blocks nothing is different."""
    change, event = "the current stream changes", "an event is recorded"
    _watch(torch.cuda, ("set_stream",), change)
    _watch(torch.Stream, ("__enter__", "__exit__"), change)
    _watch(torch.cuda.Stream, ("__enter__", "__exit__"), change)
    _watch(torch.accelerator, ("set_stream",), change)
    # A stream waits for another by an event that it records there.
    _watch(torch.Stream, ("record_event", "wait_stream"), event)
    _watch(torch.Event, ("record",), event)
    _watch(torch.cuda.Event, ("record",), event)
