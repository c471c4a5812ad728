"""Results as Markdown and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import EAGER, HAND, OURS
from benchmarks.suite import Result


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _milliseconds(result: Result, variant: str) -> str:
    timing = result.timings.get(variant)
    return "" if timing is None else f"{timing.median:.1f}"


def _name(result: Result) -> str:
    return f"{result.title}, {result.hidden}"


def speed(results: Sequence[Result]) -> str:
    """Returns the table of times, and of ratios to hand-batched code (with targets) and eager."""
    rows = []
    for r in results:
        target = ""
        if r.target is not None and r.backward:
            target = f"{r.target:.2f} {'reached' if r.against_hand >= r.target else 'missed'}"
        rows.append(
            [
                _name(r),
                *(_milliseconds(r, variant) for variant in (EAGER, HAND, OURS)),
                _ratio(r.against_hand),
                target,
                f"{r.ours_against[EAGER]:.1f}",
                f"{r.hand_against_eager:.1f}",
            ]
        )
    header = ["workload, hidden size", "eager ms", "hand ms", "ours ms"]
    header += ["hand / ours", "target", "eager / ours", "eager / hand"]
    return table(header, rows)


def stages(results: Sequence[Result]) -> str:
    """Returns the table of stages of ours and of hand, with the number of calls."""
    rows = []
    for r in results:
        ours, hand = r.timings[OURS].stages, r.timings[HAND].stages
        c = r.counts
        calls = " + ".join(
            f"{count} {rule}" for rule, count in sorted(r.rules.items(), reverse=True)
        )
        rows.append(
            [
                _name(r),
                *(f"{ours[stage]:.1f}" for stage in ("capture", "flush", "backward")),
                *(f"{hand[stage]:.1f}" for stage in ("collate", "forward", "backward")),
                f"{c['ops']:.0f} + {c['views']:.0f}",
                f"{1e3 * ours['capture'] / max(1, c['ops'] + c['views']):.2f}",
                f"{c['batches']:.0f}",
                calls,
            ]
        )
    header = ["workload, hidden size", "capture", "flush", "backward"]
    header += ["hand: collate", "forward", "backward"]
    header += ["ops + views", "capture µs an op", "batches", "calls"]
    return table(header, rows)


def breakdowns(results: Sequence[Result]) -> str:
    """Returns the table of the parts of flush and backward."""
    rows = []
    for r in results:
        b = r.breakdown
        if b is None:
            continue
        parts = [b.schedule, b.gather, b.calls, b.materialize]
        parts += [b.back_gather, b.back_calls, b.weights]
        counts = (f"{n:.0f}" for n in (r.counts["launches"], b.gathers, b.scatters))
        rows.append([_name(r), *(f"{part:.1f}" for part in parts), *counts])
    header = ["workload, hidden size", "schedule", "gather", "calls", "materialize"]
    header += ["backward: gather, scatter", "calls", "weights at the end"]
    header += ["calls forward", "gathers", "scatters"]
    return table(header, rows)


def peers(results: Sequence[Result]) -> str:
    """Returns the table of each peer's time divided by ours, and why peers could not run."""
    known = [EAGER, HAND, OURS]
    names = sorted({n for r in results for n in r.timings if n not in known})
    rows = [
        [_name(r), *(_ratio(r.ours_against.get(name)) for name in names)]
        for r in results
        if any(name in r.ours_against for name in names)
    ]
    found = table(["workload, hidden size", *names], rows) if rows else "No peer could run.\n"
    missing = [f"- {_name(r)}, {peer}: {why}\n" for r in results for peer, why in r.skipped.items()]
    return found + ("\n" + "".join(missing) if missing else "")


def slow_ops(results: Sequence[Result], most: int = 6) -> str:
    """Returns a list of ops that no native rule ran, at most ``most`` for each result."""
    lines = []
    for r in results:
        for op in r.slow_ops[:most]:
            note = f" ({op['note']})" if op["note"] else ""
            lines.append(
                f"- {_name(r)}: {op['op']} {op['shapes']}, {op['rule']}: "
                f"{op['launches']} launches for {op['ops']} ops{note}\n"
            )
    return "".join(lines) or "Native rules ran all of it.\n"


def policies(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of batches by policy, and their ratio to the lower bound."""
    names = [key for key in rows[0] if key not in ("workload", "title", "ops", "lower bound")]
    header = ["workload", "ops", "lower bound", *names, *(f"{n} / bound" for n in names)]
    lines = [
        [
            row["title"],
            f"{row['ops']:.0f}",
            f"{row['lower bound']:.0f}",
            *(f"{row[name]:.0f}" for name in names),
            *(f"{row[name] / max(1, row['lower bound']):.2f}" for name in names),
        ]
        for row in rows
    ]
    return table(header, lines)


def memory(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of peak memory of a training step, in MB."""
    lines = [
        [
            f"{row['title']}, {row['hidden']}",
            *(f"{row[name]['tensors'] / 1e6:.1f}" for name in (EAGER, HAND, OURS)),
            _ratio(row[OURS]["tensors"] / row[EAGER]["tensors"]),
            _ratio(row[OURS]["tensors"] / row[HAND]["tensors"]),
            *(f"{row[name]['process'] / 1e6:.1f}" for name in (EAGER, HAND, OURS)),
            _ratio(row[OURS]["process"] / max(1, row[EAGER]["process"])),
            f"{row[OURS]['kept'] / 1e6:.1f}",
        ]
        for row in rows
    ]
    header = ["workload, hidden size", "tensors: eager", "hand", "ours", "ours / eager"]
    header += ["ours / hand", "process: eager", "hand", "ours", "ours / eager", "kept in the pool"]
    return table(header, lines)


def sweep(results: Sequence[Result]) -> str:
    """Returns tables of ratios by minibatch size."""
    sizes = sorted({r.minibatch for r in results})
    by_name: dict[str, dict[int, Result]] = {}
    for r in results:
        by_name.setdefault(_name(r), {})[r.minibatch] = r
    text = ""
    for title, key in (("eager / ours", EAGER), ("hand / ours", HAND)):
        rows = [
            [name, *(_ratio(found[s].ours_against.get(key)) if s in found else "" for s in sizes)]
            for name, found in by_name.items()
        ]
        text += f"{title}:\n\n" + table(["minibatch", *map(str, sizes)], rows) + "\n"
    return text


def plot(results: Sequence[Result], path: Path) -> None:
    """Plots examples per second against minibatch size, with a panel for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_name: dict[str, list[Result]] = {}
    for r in results:
        by_name.setdefault(_name(r), []).append(r)
    variants = list(dict.fromkeys(v for r in results for v in r.timings))
    colours = {variant: f"C{k}" for k, variant in enumerate(variants)}  # equal in all panels
    columns = min(4, len(by_name))
    count = -(-len(by_name) // columns)
    figure, axes = plt.subplots(count, columns, figsize=(4 * columns, 3 * count), squeeze=False)
    for axis in axes.flat[len(by_name) :]:
        axis.set_visible(False)
    for axis, (name, found) in zip(axes.flat, by_name.items(), strict=False):
        found.sort(key=lambda r: r.minibatch)
        for variant in colours:
            points = [(r.minibatch, r.timings[variant]) for r in found if variant in r.timings]
            rates = [1e3 * size / timing.median for size, timing in points]
            axis.plot([size for size, _ in points], rates, colours[variant], marker=".")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("minibatch", fontsize=8)
        axis.set_ylabel("examples / s", fontsize=8)
    lines = [plt.Line2D([], [], color=colour, marker=".") for colour in colours.values()]
    figure.legend(lines, list(colours), loc="outside upper center", ncols=len(colours))
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=110)
