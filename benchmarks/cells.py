"""Cells: compares capturing whole functions with capturing the same functions op by op.

python -m benchmarks.cells [--only tagger,mv-rnn] [--minibatch 64] [--rounds 9] [--compile]
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch_autobatch as ab
from torch import nn

from benchmarks import measure, tables
from benchmarks.arguments import some_of
from benchmarks.measure import Step, clock, run_step
from benchmarks.suite import WARM_UP
from benchmarks.workload import Sources, Workload
from benchmarks.workloads import WORKLOADS

# Methods that become cells, by workload. In a list of modules, each module becomes a cell.
CELLS: dict[str, tuple[str, ...]] = {
    "binary-tree-lstm": ("leaf", "node", "node_loss"),
    "child-sum-pairs": ("encoder.node", "log_probabilities"),
    "tagger": ("left_to_right", "right_to_left", "tagger"),
    "tagger-gates": ("left_to_right.forward", "right_to_left.forward", "tagger"),
    "transition-parser": (
        "buffer_cell",
        "stack_cell",
        "action_cell",
        "composition",
        "action_loss",
    ),
    "mixture-of-experts": ("experts",),
    "neural-modules": ("functions", "classify"),
    "mv-rnn": ("leaf", "node", "node_loss"),
    "graphs": ("nodes",),
}
# Methods whose tensors differ in size between examples.
DYNAMIC = frozenset(("nodes",))


# Each cell is made only once, because a cell keeps state from earlier calls.
_made: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], Any]] = WeakKeyDictionary()


def cells_of(owner: nn.Module, name: str, compiled: bool) -> Any:
    """Returns a method as a cell, or a list of modules as a list of cells."""
    made = _made.setdefault(owner, {})
    if (name, compiled) not in made:
        options = {"dynamic": True} if name in DYNAMIC else {"compile": compiled}
        cell = functools.partial(ab.cell, **options)
        found = getattr(owner, name)
        several = isinstance(found, nn.ModuleList)
        made[name, compiled] = [cell(module) for module in found] if several else cell(found)
    return made[name, compiled]


@contextmanager
def as_cells(model: nn.Module, methods: Sequence[str], compiled: bool = False) -> Iterator[None]:
    """Replaces methods of the model and its parts by cells inside the ``with``."""
    owners: list[tuple[nn.Module, str]] = []
    for path in methods:
        owner, _, name = path.rpartition(".")
        owners.append((model.get_submodule(owner), name))
    cells = [cells_of(owner, name, compiled) for owner, name in owners]
    for (owner, name), cell in zip(owners, cells, strict=True):
        owner.__dict__[name] = cell
    try:
        yield
    finally:
        for owner, name in owners:
            del owner.__dict__[name]


def step(
    workload: Workload, minibatch: Sequence[Any], methods: Sequence[str], compiled: bool = False
) -> Step:
    """Runs a training step with these methods as cells. Without methods, captures op by op."""
    scope = ab.batch()
    with as_cells(workload.model, methods, compiled):
        start = clock()
        with scope:
            stacked = torch.stack(measure.eager_losses(workload, minibatch))
            captured = clock()
        flushed = clock()
        end = measure.finish(stacked, True)
    stages = {"capture": captured - start, "flush": flushed - captured, "backward": end - flushed}
    return Step(end - start, stacked, {}, stages, scope.report())


def check(variants: dict[str, Callable[..., Step]], workload: Workload, minibatch: int) -> float:
    """Returns the largest difference between losses and gradients of a variant and of eager mode.

    Runs two minibatches, because a cell keeps state from earlier calls.
    """
    worst = 0.0
    for turn in range(2):
        examples = workload.minibatch(min(minibatch, 16), WARM_UP + turn)
        expected = run_step(measure.eager, workload, examples, True)
        for name, run in variants.items():
            what = f"{workload.name}, {name}"
            found = measure.check_variant(run, expected, workload, examples, True, what)
            worst = max(worst, found)
    return worst


def compare(
    workload: Workload, hidden: int, minibatch: int, rounds: int, compiled: bool
) -> list[str]:
    """Returns one row: the ratios of hand's time to ours, op by op and in cells, and our stages."""
    methods = CELLS[workload.name]
    variants: dict[str, Callable[..., Step]] = {
        "hand": measure.hand,
        "op": lambda w, m, _: step(w, m, ()),
        "cell": lambda w, m, _: step(w, m, methods),
    }
    if compiled:
        variants["compiled"] = lambda w, m, _: step(w, m, methods, compiled=True)
    difference = check(variants, workload, minibatch)
    steps: dict[str, list[Step]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        examples = workload.minibatch(minibatch, turn)
        for name, run in variants.items():
            taken = run_step(run, workload, examples, True)
            taken.gradients = {}
            if turn >= 2:  # after the warm-up
                steps[name].append(taken)

    def ratio(a: str, b: str) -> str:
        pairs = zip(steps[a], steps[b], strict=True)
        return f"{median(x.seconds / y.seconds for x, y in pairs):.2f}"

    def stage(name: str, of: str) -> str:
        return f"{median(s.stages[of] for s in steps[name]) * 1e3:.1f}"

    report = steps["cell"][-1].report
    assert report is not None
    return [
        f"{workload.title}, {hidden}",
        ratio("hand", "op"),
        ratio("hand", "cell"),
        *([ratio("hand", "compiled")] if compiled else []),
        stage("op", "capture"),
        stage("cell", "capture"),
        stage("cell", "flush"),
        stage("cell", "backward"),
        str(report.batches),
        f"{difference:.0e}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", type=some_of(CELLS), metavar="NAMES", help=f"some of {', '.join(CELLS)}"
    )
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="cell(compile=True) as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.only or CELLS:
        kind = WORKLOADS[name]
        for hidden in kind.sizes:
            workload = kind(hidden, Sources(), seed=0)
            rows.append(
                compare(workload, hidden, options.minibatch, options.rounds, options.compile)
            )
    header = ["workload, hidden size", "hand / op by op", "hand / cells"]
    header += ["hand / compiled cells"] if options.compile else []
    header += ["capture ms op by op", "capture ms cells", "flush ms", "backward ms", "batches"]
    header += ["largest difference"]
    print(tables.table(header, rows))


if __name__ == "__main__":
    main()
