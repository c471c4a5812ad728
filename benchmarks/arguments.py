"""Command-line arguments that several benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Returns the type of an argument that is a comma-separated list of some of ``names``."""
    known = list(names)

    def parse(text: str) -> list[str]:
        given = text.split(",")
        unknown = [name for name in given if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"{', '.join(unknown)}: expected some of {', '.join(known)}"
            )
        return given

    return parse
