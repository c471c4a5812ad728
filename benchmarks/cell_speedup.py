"""Measures the cell speed-up of a mixture of experts, where each example runs through one expert.

python -m benchmarks.cell_speedup [--rounds 9] [--device cuda] [--json out.json]

The definition of the speed-up is from Suarez and Zhu (Efficient Dynamic Batching of Large Datasets
with Infinite Structures, section 5): the time of the cells one at a time, divided by the time of
the batched cells. Both times include forward and backward, and exclude the code around the cells.
The paper's figures are for a GPU, where a single cell leaves most of the machine idle. On one core
of a CPU, most of the time is arithmetic and the reading of weights.

- One by one: the calls of the experts, and backward.
- By hand: examples sorted by expert, one call for the rows of each expert, results in the original
  order, and backward.
- Ours: schedule, gathers, batches and backward. Capture (the loop that calls the experts in the
  block) counts as code around the cells. The times in the last columns include it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
import torch_autobatch as ab
from torch import Tensor, nn

from benchmarks import devices, measure, tables
from benchmarks.measure import Step, clock

SIZE = 256
# Experts, examples, and the cell speed-up that Suarez and Zhu report.
CASES = ((1, 10_000, 1190.0), (10, 10_000, 699.0), (100, 1_000, 9.4), (1_000, 1_000, 1.41))


class Expert(nn.Module):
    """Two linear layers of size 256."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.outer = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu())


class Case:
    """Examples of shape [1, 256], and the expert for each example."""

    def __init__(
        self, experts: int, examples: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.experts = nn.ModuleList(Expert() for _ in range(experts)).to(device, dtype)
        self.cells = [ab.cell(expert) for expert in self.experts]
        self.x = torch.randn(examples, SIZE).to(device, dtype)
        self.rows = list(self.x.split(1))
        self.route = torch.randint(experts, (examples,)).tolist()

    def one_by_one(self) -> Step:
        start = clock()
        outputs = [self.experts[e](x) for x, e in zip(self.rows, self.route, strict=True)]
        devices.synchronize(self.device)
        forward = clock() - start
        joined = torch.cat(outputs)
        devices.synchronize(self.device)
        start = clock()
        return Step(forward + self.backward(joined) - start, joined, {})

    def backward(self, joined: Tensor) -> float:
        """Runs backward. Returns the time at its end."""
        joined.backward(torch.ones_like(joined))
        devices.synchronize(self.device)
        return clock()

    def by_hand(self) -> Step:
        start = clock()
        order = torch.tensor(self.route).argsort(stable=True).to(self.device)
        counts = torch.bincount(torch.tensor(self.route), minlength=len(self.experts)).tolist()
        parts = self.x[order].split(counts)
        outputs = [e(part) for e, part in zip(self.experts, parts, strict=True) if len(part)]
        joined = torch.cat(outputs)[order.argsort()]
        return Step(self.backward(joined) - start, joined, {})

    def batched(self, *, as_cells: bool) -> Step:
        experts = self.cells if as_cells else self.experts
        start = clock()
        with ab.batch():
            outputs = [experts[e](x) for x, e in zip(self.rows, self.route, strict=True)]
            joined = torch.cat(outputs)
            del outputs
            captured = clock()
        end = self.backward(joined)
        return Step(end - captured, joined, {}, {"capture": captured - start})


VARIANTS: dict[str, Callable[[Case], Step]] = {
    "one": Case.one_by_one,
    "hand": Case.by_hand,
    "op": lambda case: case.batched(as_cells=False),
    "cell": lambda case: case.batched(as_cells=True),
}


def check(case: Case) -> None:
    """Checks that the results of all variants are equal, for a case in double precision.

    In single precision, rounding changes the sign of a few inputs of `relu`, so that gradients
    differ by more than rounding.
    """
    expected: Step | None = None
    for name, run in VARIANTS.items():
        case.experts.zero_grad(set_to_none=True)
        step = run(case)
        step.losses = step.losses.detach()
        step.gradients = {n: p.grad for n, p in case.experts.named_parameters()}
        expected = expected or step
        measure.check(expected, step, f"{len(case.experts)} experts, {name}", tolerance=1e-9)


def measure_case(case: Case, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each variant in each round, without and with capture."""
    seconds: dict[str, list[float]] = {}
    for turn in range(rounds + 2):
        for name, run in VARIANTS.items():
            case.experts.zero_grad(set_to_none=True)
            devices.synchronize(case.device)
            step = run(case)
            if turn < 2:  # warm-up
                continue
            seconds.setdefault(name, []).append(step.seconds)
            whole = step.seconds + step.stages.get("capture", 0.0)
            seconds.setdefault(f"{name}, captured", []).append(whole)
    return seconds


# Columns: the two variants that are compared, and the title.
RATIOS = {
    ("one", "hand"): "by hand",
    ("one", "op"): "op by op",
    ("one", "cell"): "cells",
    ("hand", "op"): "op by op by hand",
    ("hand", "cell"): "cells by hand (goal 0.95)",
    ("hand", "op, captured"): "op by op with capture by hand",
    ("hand", "cell, captured"): "cells with capture by hand",
}


def compare(
    experts: int, examples: int, reported: float, rounds: int, device: torch.device
) -> dict[str, float]:
    """Returns a row of the table: for each column, the median ratio of times over the rounds."""
    check(Case(experts, examples, device, torch.float64))
    seconds = measure_case(Case(experts, examples, device), rounds)
    row: dict[str, float] = {"experts": experts, "examples": examples}
    for (a, b), title in RATIOS.items():
        row[title] = median(x / y for x, y in zip(seconds[a], seconds[b], strict=True))
    row["Suarez and Zhu, on a GPU"] = reported
    return row


def as_table(rows: Sequence[dict[str, float]]) -> str:
    """Formats the rows as a Markdown table."""
    ratios = RATIOS.values()
    lines = [
        [f"{value:.2f}" if key in ratios else f"{value:g}" for key, value in row.items()]
        for row in rows
    ]
    return tables.table(list(rows[0]), lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", help="as PyTorch names it, or name@module")
    parser.add_argument("--fewer", type=int, default=1, help="divides the numbers of examples")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args(arguments)
    device = devices.named(options.device)
    measure.prepare(device)
    rows = []
    for experts, examples, reported in CASES:
        fewer = examples // options.fewer
        rows.append(compare(experts, fewer, reported, options.rounds, device))
        if options.json:
            options.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    print(as_table(rows))


if __name__ == "__main__":
    main()
