"""Flushes before calls that order launches: changes of the stream, and recording of events.

A captured op is not launched before the flush. An event marks the work that was launched before the
event. A stream receives the work that is launched after the stream becomes current. Therefore a
block launches its pending ops before either call, on the stream that was current when the ops were
captured.
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
        except TypeError:  # Python can't set attributes of a class from C++
            _C.replace_method(owner, name, watched)


def watch() -> None:
    """Installs the wrappers permanently. Outside blocks, the wrappers have no effect."""
    change, event = "the current stream changes", "an event is recorded"
    _watch(torch.cuda, ("set_stream",), change)
    _watch(torch.Stream, ("__enter__", "__exit__"), change)
    _watch(torch.cuda.Stream, ("__enter__", "__exit__"), change)
    _watch(torch.accelerator, ("set_stream",), change)
    # `wait_stream` records an event on the other stream.
    _watch(torch.Stream, ("record_event", "wait_stream"), event)
    _watch(torch.Event, ("record",), event)
    _watch(torch.cuda.Event, ("record",), event)
