"""Formats the rows as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.real.answers import BLOCK, CELLS, EAGER, INFERENCE, MAP, OURS, OWN, TRAINING
from benchmarks.real.timing import Row
from benchmarks.tables import table

MOST_REASONS = 3


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 1.95 else f"{value:.2f}"


def name(row: Row) -> str:
    return f"{row.package}: {row.model}"


def speed(rows: Sequence[Row], phase: str) -> str:
    """Returns times, and the speed-up of block and map over eager and the package's batching."""
    lines = []
    for row in rows:
        found = row.phases.get(phase)
        if found is None:
            continue
        line = [name(row), str(row.examples)]
        line += [number(found.milliseconds.get(variant)) for variant in (EAGER, OWN)]
        for ours in (BLOCK, MAP):
            if ours in found.failed:
                line += ["fails", "", ""]
                continue
            ratios = found.speed.get(ours, {})
            line += [number(ratios.get(other)) for other in (EAGER, OWN)]
            line.append(str(found.flushes.get(ours, "")))
        ratios = found.speed.get(CELLS, {})
        line += [number(ratios.get(EAGER)), number(ratios.get(OWN))]
        if CELLS in found.failed:
            line[-2] = "fails"
        lines.append(line)
    header = ["model", "examples", "eager ms", "own ms"]
    header += ["block: eager / ours", "own / ours", "flushes"]
    header += ["map: eager / ours", "own / ours", "flushes"]
    header += ["cells: eager / ours", "own / ours"]
    return table(header, lines)


def failures(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.failed:
            lines.append(f"- {name(row)}: {row.failed}\n")
        for phase, found in row.phases.items():
            for variant, error in found.failed.items():
                lines.append(f"- {name(row)}, {phase}, {variant}: {error}\n")
    return "".join(lines)


def reasons(rows: Sequence[Row]) -> str:
    """Returns the reasons of flushes, and the ops whose batches are small."""
    lines = []
    for row in rows:
        for ours in OURS:
            why: dict[str, int] = {}
            small: dict[str, list[int]] = {}
            for found in row.phases.values():
                why |= found.reasons.get(ours, {})
                small |= found.small_batches
            why = {reason: n for reason, n in why.items() if not reason.startswith("the end of")}
            parts = [f"{n} × {reason}" for reason, n in list(why.items())[:MOST_REASONS]]
            if len(why) > MOST_REASONS:
                parts.append(f"{len(why) - MOST_REASONS} more reasons")
            if ours == BLOCK and len(why) == 0 and small:
                few = list(small.items())[:MOST_REASONS]
                parts.append(", ".join(f"{op}: {m} in {n} batches" for op, (m, n) in few))
            if parts:
                lines.append([name(row), ours, "<br>".join(p.replace("|", "/") for p in parts)])
    return table(["model", "in", "flushes, ops that run at once, batches"], lines) if lines else ""


def _ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Returns eager's time divided by ours, by kind ("training, block") and model."""
    return {
        f"{phase}, {ours}": {
            name(row): row.phases[phase].speed[ours][EAGER]
            for row in rows
            if phase in row.phases and ours in row.phases[phase].speed
        }
        for phase in (TRAINING, INFERENCE)
        for ours in OURS
    }


def summary(rows: Sequence[Row]) -> str:
    """Returns how many models are faster than eager mode, by kind."""
    lines = []
    for kind, ratios in _ratios(rows).items():
        fast = sum(ratio >= 1 for ratio in ratios.values())
        lines.append([kind, f"{fast} of {len(ratios)}"])
    packages = len({row.package for row in rows})
    counts = table(["kind", "models that are faster than eager mode"], lines)
    return f"{len(rows)} models of {packages} packages.\n\n{counts}"


def slower(rows: Sequence[Row]) -> str:
    """Returns the table of models that are slower than eager mode."""
    ratios = _ratios(rows)
    lines = []
    for model in map(name, rows):
        found = [of_kind.get(model, 1.0) for of_kind in ratios.values()]
        if min(found) < 1:
            lines.append([model, *(f"{ratio:.2f}" if ratio < 1 else "" for ratio in found)])
    if not lines:
        return ""
    return (
        "The table gives eager / ours for the models that are slower than eager mode. A cell is "
        "empty if\nthe model is not slower, or was not measured. A ratio just below 1 is rounded "
        "to 1.00.\n\n" + table(["model", *ratios], lines)
    )


def markdown(rows: Sequence[Row]) -> str:
    sections: list[tuple[str, Callable[[], str]]] = [
        ("Slower than eager mode", lambda: slower(rows)),
        ("Training step", lambda: speed(rows, TRAINING)),
        ("Inference", lambda: speed(rows, INFERENCE)),
        ("Why it flushes", lambda: reasons(rows)),
        ("What fails", lambda: failures(rows)),
    ]
    text = summary(rows)
    for title, make in sections:
        body = make()
        if body:
            text += f"\n### {title}\n\n{body}"
    return text
