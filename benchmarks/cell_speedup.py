"""Cell speed-up of a mixture of experts: each example through one expert, one by one and batched.

python -m benchmarks.cell_speedup [--rounds 5]

As Suarez and Zhu define it (Efficient Dynamic Batching of Large Datasets with Infinite Structures,
section 5): the time that the cells take one at a time by the time they take batched, forward and
backward, whatever else a program does around them. By hand examples are sorted by expert, and each
expert runs once on its rows. Their figures are of a GPU, where a cell that is alone leaves most of
the machine idle; on one core of a CPU arithmetic and the reading of weights are most of the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
import torch_autobatch as ab
from torch import Tensor, nn

from benchmarks import tables
from benchmarks.measure import clock

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

    def one_by_one(self) -> tuple[float, Tensor]:
        """Seconds in cells, and what they give."""
        start = clock()
        outputs = [self.experts[e](x) for x, e in zip(self.rows, self.route, strict=True)]
        forward = clock() - start
        joined = torch.cat(outputs)
        start = clock()
        joined.backward(torch.ones_like(joined))
        return forward + clock() - start, joined

    def by_hand(self) -> tuple[float, Tensor]:
        """Sorted by expert. Bringing rows together and back is in the time, as it is in ours."""
        start = clock()
        order = torch.tensor(self.route).argsort(stable=True)
        counts = torch.bincount(torch.tensor(self.route), minlength=len(self.experts)).tolist()
        parts = self.x[order].split(counts)
        outputs = [e(part) for e, part in zip(self.experts, parts, strict=True) if len(part)]
        joined = torch.cat(outputs)[order.argsort()]
        forward = clock() - start
        start = clock()
        joined.backward(torch.ones_like(joined))
        return forward + clock() - start, joined

    def batched(self, *, as_cells: bool) -> tuple[float, Tensor]:
        """The loop in a block; capturing it is not in the time, scheduling it is."""
        experts = self.cells if as_cells else self.experts
        with ab.batch():
            outputs = [experts[e](x) for x, e in zip(self.rows, self.route, strict=True)]
            joined = torch.cat(outputs)
            del outputs
            start = clock()
        forward = clock() - start
        start = clock()
        joined.backward(torch.ones_like(joined))
        return forward + clock() - start, joined


def compare(experts: int, examples: int, reported: float, rounds: int) -> list[str]:
    """A row of the table."""
    case = Case(experts, examples)
    variants: dict[str, Callable[[], tuple[float, Tensor]]] = {
        "one": case.one_by_one,
        "hand": case.by_hand,
        "op": lambda: case.batched(as_cells=False),
        "cell": lambda: case.batched(as_cells=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        results = {}
        for name, run in variants.items():
            case.experts.zero_grad(set_to_none=True)
            taken, results[name] = run()
            results[name] = results[name].detach()
            if turn > 0:  # warm
                seconds[name].append(taken)
        for result in results.values():
            torch.testing.assert_close(result, results["one"], rtol=1e-4, atol=1e-5)

    def speedup(name: str) -> float:
        return median(a / b for a, b in zip(seconds["one"], seconds[name], strict=True))

    by_hand = speedup("hand")
    return [
        str(experts),
        str(examples),
        f"{by_hand:.2f}",
        f"{speedup('op'):.2f}",
        f"{speedup('cell'):.2f}",
        f"{max(speedup('op'), speedup('cell')) / by_hand:.2f}",
        f"{reported:g}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [compare(*case, options.rounds) for case in CASES]
    header = ["experts", "examples", "by hand", "ours op by op", "ours in cells"]
    header += ["best of ours by hand (goal 0.95)", "Suarez and Zhu, on a GPU"]
    print(tables.table(header, rows))


if __name__ == "__main__":
    main()
