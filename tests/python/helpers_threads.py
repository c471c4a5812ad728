"""Runs a function on a separate thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> T:
    """Returns the result of the function on another thread, or raises its exception."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
