"""Running a function on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> T:
    """What the function returns or raises on another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
