"""Stores the facts of the last block. When a block ends, logs it and calls the observers."""

import collections
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from torch_autobatch import _C, _log
from torch_autobatch._merge import merged
from torch_autobatch._report import Report

profile_all = False  # whether all blocks record times (`python -m torch_autobatch run --save`)
# These functions are called with the facts of each outermost block when the block ends.
observers: list[Callable[["_C.ReportFacts"], object]] = []


_NOT_USERS = ("torch_autobatch.", "torch.", "contextlib")


class Stretches(collections.deque["_C.ReportFacts"]):
    """The facts of the blocks of one call of a generator that is decorated with ``batch``.

    A block contains the code between two yields, which is called a stretch.
    """

    def __init__(self) -> None:
        super().__init__(maxlen=256)  # an endless generator keeps only its last blocks


class _Last(threading.local):
    facts: "Sequence[_C.ReportFacts]" = ()


_last = _Last()


def is_pending(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor is pending: whether its value has not been computed yet."""
    return _C.is_pending(tensor)


def report_of(facts: "_C.ReportFacts") -> Report:
    return Report.from_dict(facts.facts())


def has_ended(facts: "_C.ReportFacts", stretches: Stretches | None = None) -> None:
    """Keeps the facts of an outermost block that has ended, logs them and calls the observers.

    ``stretches``: the facts of the generator's blocks so far, if the block is part of a generator.
    """
    if stretches is not None:
        stretches.append(facts)
    _last.facts = (facts,) if stretches is None else stretches
    if _log.is_on():
        _log.log_block(report_of(facts), line_of_user())
    for observe in observers:
        observe(facts)


def last_report() -> Report:
    """Returns the report of the block or map that ended last on this thread.

    The report is empty if there was no block. For a generator that is decorated with ``batch``, the
    report covers everything that ran between its yields (at most the last 256 stretches).
    """
    reports = [report_of(facts) for facts in _last.facts]
    if len(reports) > 1:
        return merged(reports)
    return reports[0] if reports else Report()


def warn_of_options(outer: dict[str, Any], inner: dict[str, Any]) -> None:
    """Warns about options of an inner block that have no effect."""
    standard = {"policy": "auto", "granularity": "auto", "defer_checks": None, "adaptive": None}
    without = [
        f"{name}={value!r}"
        for name, value in inner.items()
        if value != outer[name] and value != standard.get(name, False) and value is not None
    ]
    if without:
        warnings.warn(
            f"batch({', '.join(without)}) inside another block has no effect. The inner block "
            "joins the outer block. Pass these options to the outer block.",
            RuntimeWarning,
            stacklevel=_level_of_user(),
        )


def line_of_user() -> str:
    """Returns the line of the innermost frame outside torch and this package: "train.py:12"."""
    frame = sys._getframe(_level_of_user() - 1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _level_of_user() -> int:
    """Returns the ``stacklevel`` of the innermost frame outside torch and this package.

    The level is counted from the caller of this function.
    """
    level = 1
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_NOT_USERS):
        frame = frame.f_back
        level += 1
    return level
