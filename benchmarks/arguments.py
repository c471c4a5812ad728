"""Arguments that several of the benchmarks' commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """The type of an argument that is a comma-separated list of some of the names."""
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
