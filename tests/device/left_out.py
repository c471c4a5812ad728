"""Tests that mean the CPU, and are left out on the simulated device. By the end of their names."""

from __future__ import annotations

import re

# Why, and regular expressions for node ids.
LEFT_OUT: dict[str, tuple[str, ...]] = {}


def reason(nodeid: str) -> str | None:
    """Why the test is left out, or None if it runs."""
    for why, patterns in LEFT_OUT.items():
        if any(re.search(pattern, nodeid) for pattern in patterns):
            return why
    return None
