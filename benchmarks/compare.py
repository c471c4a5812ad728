"""Compares two source trees, by the results of ``python -m benchmarks --json``. Prints Markdown.

python -m benchmarks.compare --base base-1.json base-2.json --ours ours-1.json ours-2.json

The files must come from alternating runs on one machine: base-1, ours-1, base-2, ours-2. The
command compares the minimum times of each tree. The ratios to eager and to hand-batched code are
computed within one run, so they depend less on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import EAGER, HAND, OURS
from benchmarks.tables import table

Key = tuple[str, int, int]  # workload, hidden size, minibatch

HEAD = [
    "workload",
    "hidden",
    "minibatch",
    "base, ms",
    "this, ms",
    "base / this",
    "hand / ours: base",
    "this",
    "eager / ours: base",
    "this",
]


def read(paths: Iterable[Path]) -> dict[Key, list[dict[str, Any]]]:
    """Returns the results of all files, by workload, hidden size and minibatch."""
    found: dict[Key, list[dict[str, Any]]] = {}
    for path in paths:
        for result in json.loads(path.read_text(encoding="utf-8"))["results"]:
            key = (result["workload"], result["hidden"], result["minibatch"])
            found.setdefault(key, []).append(result)
    return found


def rows(
    base: dict[Key, list[dict[str, Any]]], ours: dict[Key, list[dict[str, Any]]]
) -> list[list[str]]:
    """Returns a row for each measurement that both trees have."""
    return [_row(key, base[key], ours[key]) for key in ours if key in base]


def _row(key: Key, base: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    before, after = _least(base), _least(ours)
    ratios = [_ratio(results, to) for to in (HAND, EAGER) for results in (base, ours)]
    times = [f"{before:.2f}", f"{after:.2f}", f"{before / after:.2f}"]
    return [*map(str, key), *times, *(f"{ratio:.2f}" for ratio in ratios)]


def _least(results: list[dict[str, Any]]) -> float:
    return min(result["timings"][OURS]["least"] for result in results)


def _ratio(results: list[dict[str, Any]], to: str) -> float:
    return median(result["ours_against"][to] for result in results)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table. Returns 1 if the trees have no measurement in common."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for name, meaning in (("--base", "the tree compared with"), ("--ours", "the tree judged")):
        parser.add_argument(name, type=Path, nargs="+", required=True, metavar="JSON", help=meaning)
    options = parser.parse_args(arguments)
    lines = rows(read(options.base), read(options.ours))
    if not lines:
        print("benchmarks.compare: no measurement is in both trees' files", file=sys.stderr)
        return 1
    print(table(HEAD, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
