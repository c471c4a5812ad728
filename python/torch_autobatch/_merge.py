"""Merges the reports of many blocks that one place opened."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch_autobatch._report import Report

_Row = TypeVar("_Row")

_COUNTS = {"instances", "batches", "launches", "alone", "nodes", "count", "calls"}
# Fields that may differ between merged rows, and that are not added. `largest` becomes the maximum.
# `serial` has no meaning outside its block.
_OWN = {"largest", "serial"}


def merged(reports: Iterable[Report]) -> Report:
    """Merges reports: adds counts, merges rows that differ only in counts, and drops traces."""
    reports = list(reports)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Report):
        values = [getattr(report, field.name) for report in reports]
        if field.name == "trace":
            fields["trace"] = None
        elif field.type is bool:
            fields[field.name] = any(values)
        elif field.type is int:
            fields[field.name] = sum(values)
        elif field.name == "passes":
            fields["passes"] = dict(sum(map(Counter, values), Counter()))
        else:
            fields[field.name] = _merged_rows(row for rows in values for row in rows)
    return Report(**fields)


def _merged_rows(rows: Iterable[Any]) -> list[Any]:
    found: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        values = {f.name: getattr(row, f.name) for f in dataclasses.fields(row)}
        key = tuple(v for name, v in values.items() if name not in _COUNTS | _OWN)
        found[key] = _sum(found[key], row) if key in found else row
    return list(found.values())


def _sum(a: _Row, b: _Row) -> _Row:
    """Returns the sum of two rows that differ only in counts."""
    ways: dict[str, Callable[[int, int], int]] = dict.fromkeys(_COUNTS, int.__add__)
    ways["largest"] = max
    changes = {
        name: way(getattr(a, name), getattr(b, name))
        for name, way in ways.items()
        if hasattr(a, name)
    }
    return dataclasses.replace(a, **changes)  # type: ignore[type-var]
