"""Draws docs/speed.svg, the chart in README, from the tables in docs/benchmarks.md.

python scripts/speed_chart.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parents[1] / "docs"
# The keys are row names in the tables. The values are names in the chart.
WORKLOADS = {
    "binary Tree-LSTM, 256": "binary Tree-LSTM",
    "child-sum Tree-LSTM, sentence pairs, 150": "child-sum Tree-LSTM",
    "BiLSTM tagger, gates by hand, 256": "BiLSTM tagger",
    "transition parser, 256": "transition parser",
    "mixture of 64 experts, 256": "mixture of experts",
}
PEERS = {"dynet (autobatch 1)": "DyNet", "torchfold": "TorchFold", "dgl": "DGL"}
COLORS = {
    "eager": "#c9ced6",
    "DyNet": "#e0b36a",
    "TorchFold": "#b7a3d0",
    "DGL": "#8fbf9f",
    "by hand": "#7f8fa6",
    "torch-autobatch": "#1f5fa8",
}


def table(section: str) -> dict[str, dict[str, str]]:
    """Returns the cells of the first table below a heading, by row name and column name."""
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    text = text[text.index(f"## {section}\n") :]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in re.search(r"(^\|.*\n)+", text, re.MULTILINE)[0].splitlines()  # type: ignore[index]
    ]
    return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def speeds() -> dict[str, dict[str, float]]:
    """Returns the speeds relative to eager, by workload and variant."""
    steps, others = table("Training step"), table("Other libraries")
    result = {}
    for row, name in WORKLOADS.items():
        ours = float(steps[row]["eager / ours"])
        found = {"eager": 1.0}
        for column, peer in PEERS.items():
            if re.match(r"[\d.]+$", others[row][column]):
                found[peer] = ours / float(others[row][column])
        found["by hand"] = float(steps[row]["eager / hand"])
        found["torch-autobatch"] = ours
        result[name] = found
    return result


def main() -> None:
    mpl.rcParams.update({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": "0"})
    _, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
    place, ticks = 0.0, []
    for found in speeds().values():
        first = place
        for way, speed in found.items():
            bar = axes.bar(place, speed, 0.9, color=COLORS[way])
            axes.bar_label(bar, fmt="%.0f", fontsize=7, padding=1)
            place += 1
        ticks.append((first + place - 1) / 2)
        place += 1
    axes.set_xticks(ticks, list(WORKLOADS.values()), fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("training step,\ntimes as fast as eager", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    axes.legend(
        handles, list(COLORS), ncols=len(COLORS), fontsize=8, frameon=False, loc="upper center"
    )
    axes.set_ylim(top=34)
    plt.savefig(DOCS / "speed.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
