"""Cell speed-up of a mixture of experts: each example through one expert, one by one and batched.

python -m benchmarks.cell_speedup [--rounds 9]

As Suarez and Zhu define it (Efficient Dynamic Batching of Large Datasets with Infinite Structures,
section 5): the time that the cells take one at a time by the time they take batched, forward and
backward, whatever else a program does around them. Their figures are of a GPU, where a cell that is
alone leaves most of the machine idle; on one core of a CPU most of the time is arithmetic and the
reading of weights.

- One by one: the calls of the experts and backward.
- By hand: examples sorted by expert, one call for each expert's rows, results put back, backward.
- Ours: schedule, gathering, running and backward. Capture, the loop that calls the experts in the
  block, is what the program does around them; the last columns have it in the time too.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
import torch_autobatch as ab
from torch import Tensor, nn

from benchmarks import measure, tables
from benchmarks.measure import Step, clock

SIZE = 256
# Experts, examples, and the cell speed-up that Suarez and Zhu report.
CASES = ((1, 10_000, 1190.0), (10, 10_000, 699.0), (100, 1_000, 9.4), (1_000, 1_000, 1.41))


class Expert(nn.Module):
    """Two layers of 256."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.outer = nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu())


class Case:
    """Examples, [1, 256] each, and which expert each goes to."""

    def __init__(self, experts: int, examples: int) -> None:
        torch.manual_seed(0)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.cells = [ab.cell(expert) for expert in self.experts]
        self.x = torch.randn(examples, SIZE)
        self.rows = list(self.x.split(1))
        self.route = torch.randint(experts, (examples,)).tolist()

    def one_by_one(self) -> Step:
        start = clock()
        outputs = [self.experts[e](x) for x, e in zip(self.rows, self.route, strict=True)]
        forward = clock() - start
        joined = torch.cat(outputs)
        start = clock()
        joined.backward(torch.ones_like(joined))
        return Step(forward + clock() - start, joined, {})

    def by_hand(self) -> Step:
        start = clock()
        order = torch.tensor(self.route).argsort(stable=True)
        counts = torch.bincount(torch.tensor(self.route), minlength=len(self.experts)).tolist()
        parts = self.x[order].split(counts)
        outputs = [e(part) for e, part in zip(self.experts, parts, strict=True) if len(part)]
        joined = torch.cat(outputs)[order.argsort()]
        joined.backward(torch.ones_like(joined))
        return Step(clock() - start, joined, {})

    def batched(self, *, as_cells: bool) -> Step:
        experts = self.cells if as_cells else self.experts
        start = clock()
        with ab.batch():
            outputs = [experts[e](x) for x, e in zip(self.rows, self.route, strict=True)]
            joined = torch.cat(outputs)
            del outputs
            captured = clock()
        joined.backward(torch.ones_like(joined))
        end = clock()
        return Step(end - captured, joined, {}, {"capture": captured - start})


def compare(experts: int, examples: int, reported: float, rounds: int) -> list[str]:
    """A row of the table."""
    case = Case(experts, examples)
    variants: dict[str, Callable[[], Step]] = {
        "one": case.one_by_one,
        "hand": case.by_hand,
        "op": lambda: case.batched(as_cells=False),
        "cell": lambda: case.batched(as_cells=True),
    }
    seconds: dict[str, list[float]] = {}
    for turn in range(rounds + 2):
        expected: Step | None = None
        for name, run in variants.items():
            case.experts.zero_grad(set_to_none=True)
            step = run()
            step.losses = step.losses.detach()
            if turn >= 2:  # warm
                seconds.setdefault(name, []).append(step.seconds)
                whole = step.seconds + step.stages.get("capture", 0.0)
                seconds.setdefault(f"{name}, captured", []).append(whole)
                continue
            step.gradients = {n: p.grad for n, p in case.experts.named_parameters()}
            expected = expected or step
            measure.check(expected, step, f"{experts} experts, {name}")

    def ratio(a: str, b: str) -> str:
        return f"{median(x / y for x, y in zip(seconds[a], seconds[b], strict=True)):.2f}"

    return [
        str(experts),
        str(examples),
        *(ratio("one", name) for name in ("hand", "op", "cell")),
        *(ratio("hand", name) for name in ("op", "cell")),
        *(ratio("hand", name) for name in ("op, captured", "cell, captured")),
        f"{reported:g}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure.keep_freed_memory()
    rows = [compare(*case, options.rounds) for case in CASES]
    header = ["experts", "examples", "by hand", "op by op", "cells"]
    header += ["op by op by hand", "cells by hand (goal 0.95)"]
    header += [
        "op by op with capture by hand",
        "cells with capture by hand",
        "Suarez and Zhu, on a GPU",
    ]
    print(tables.table(header, rows))


if __name__ == "__main__":
    main()
