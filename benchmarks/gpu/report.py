"""Markdown and pictures of the results of `make gpu`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# This file does not import torch, because a part may be building against it.
COLUMNS = ("eager", "hand", "dgl", "ours", "cells")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table: names are left-aligned, numbers right-aligned."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def figures_of(data: Mapping[str, Any], kind: str) -> list[Any]:
    """Returns the results of the parts of a kind."""
    return [
        part["figures"]
        for name, part in data["parts"].items()
        if name.partition(":")[0] == kind and part.get("figures")
    ]


def write(data: Mapping[str, Any], folder: Path) -> None:
    """Writes report.md and the pictures from the results so far."""
    rows = sorted(
        figures_of(data, "row"), key=lambda r: (r["workload"], r["minibatch"], r["hidden"])
    )
    experts = [row for rows_of in figures_of(data, "experts") for row in rows_of]
    sections = [f"# On the device {data['device']}\n\n{_parts(data)}"]
    if rows:
        sections.append(f"## Training steps\n\n{_environment(rows[0])}{_steps(rows)}")
        sections.append(f"## Ratios of times\n\n{_ratios(rows)}")
    if experts:
        sections.append(f"## Cell speed-up of experts\n\nOne by one / each.\n\n{_experts(experts)}")
    sections.append(_failures(data))
    drawn = _draw(rows, experts, folder)
    text = "\n".join([*sections, *(f"![]({name})" for name in drawn)])
    (folder / "report.md").write_text(text + "\n", encoding="utf-8")


def _parts(data: Mapping[str, Any]) -> str:
    lines = [
        [name, part["status"], f"{part['seconds']:.0f}", _last_line(part["output"])]
        for name, part in data["parts"].items()
    ]
    return table(["part", "", "seconds", "last line"], lines)


def _last_line(output: str) -> str:
    lines = [line.strip("= ") for line in output.splitlines() if line.strip("=-~ ")]
    return lines[-1].replace("|", "\\|")[:100] if lines else ""


def _failures(data: Mapping[str, Any]) -> str:
    text = ""
    for name, part in data["parts"].items():
        if part["status"] not in ("done", "skipped"):
            text += f"\n### {name}: {part['status']}\n\n```\n{part['output']}\n```\n"
    return f"## What failed\n{text}" if text else "All parts that were run went well.\n"


def _environment(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in row["environment"].items()) + "\n\n"


def _timings(row: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, row["timings"][name]) for name in COLUMNS if name in row["timings"]]


def _cell(timing: Mapping[str, Any], key: str, scale: float, digits: int) -> str:
    value = timing.get(key)
    return "" if value is None else f"{value * scale:.{digits}f}"


def _steps(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        for name, timing in _timings(row):
            figures = [
                _cell(timing, "median", 1, 1),
                _cell(timing, "examples a second", 1, 0),
                _cell(timing, "launches", 1, 0),
                _cell(timing, "idle", 100, 0),
                _cell(timing, "peak", 1e-6, 1),
            ]
            lines.append([_title(row), name, *figures])
    header = ["workload, hidden size, minibatch", "", "ms", "examples / s", "launches"]
    return table([*header, "idle %", "peak MB"], lines)


def _title(row: Mapping[str, Any]) -> str:
    return f"{row['title']}, {row['hidden']}, {row['minibatch']}"


def _ratios(rows: Sequence[Mapping[str, Any]]) -> str:
    pairs = [("eager", "ours"), ("eager", "cells"), ("hand", "ours"), ("hand", "cells")]
    lines = []
    for row in rows:
        medians = {name: timing["median"] for name, timing in row["timings"].items()}
        ratios = [f"{medians[a] / medians[b]:.2f}" if b in medians else "" for a, b in pairs]
        lines.append([_title(row), *ratios, f"{row['difference']:.0e}"])
    header = ["workload, hidden size, minibatch", *(f"{a} / {b}" for a, b in pairs)]
    return table([*header, "largest difference"], lines)


def _experts(rows: Sequence[Mapping[str, float]]) -> str:
    counts = ("experts", "examples")
    lines = [[f"{v:g}" if k in counts else f"{v:.2f}" for k, v in row.items()] for row in rows]
    return table(list(rows[0]), lines)


# ---------------------------------------------------------------- pictures


def _draw(
    rows: Sequence[Mapping[str, Any]], experts: Sequence[Mapping[str, float]], folder: Path
) -> list[str]:
    if importlib.util.find_spec("matplotlib") is None:
        return []
    groups = {
        _title(row): {name: timing["examples a second"] for name, timing in _timings(row)}
        for row in rows
    }
    reported = "Suarez and Zhu, on a GPU"
    cases = {
        f"{row['experts']:g} × {row['examples']:g}": {
            name: row[name] for name in ("by hand", "op by op", "cells", reported)
        }
        for row in experts
    }
    drawn = []
    for name, label, bars in (
        ("speed.png", "examples a second", groups),
        ("experts.png", "one by one / each", cases),
    ):
        if bars:
            _bars(bars, label, folder / name)
            drawn.append(name)
    return drawn


def _bars(groups: Mapping[str, Mapping[str, float]], label: str, path: Path) -> None:
    """Draws a group of horizontal bars for each row, on a logarithmic scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    figure, axis = plt.subplots(figsize=(8, 1 + 0.18 * len(names) * len(groups)))
    height = 0.8 / len(names)
    for k, name in enumerate(names):
        places = [g + k * height for g, values in enumerate(groups.values()) if name in values]
        values = [values[name] for values in groups.values() if name in values]
        axis.barh(places, values, height, label=name)
    axis.set_yticks([g + 0.4 - height / 2 for g in range(len(groups))], list(groups), fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel(label)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
