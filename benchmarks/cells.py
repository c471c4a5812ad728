"""Cells: what capturing whole functions saves, against the same functions captured op by op.

python -m benchmarks.cells [--minibatch 64] [--rounds 9] [--compile]

The granularity trade-off of Zha et al. 2019 (Just-in-Time Dynamic Batching), section 4: analysis
(capture and schedule) and the number of batches against the unit of capture. The last table is what
a cell's call costs, capture and schedule, beside an eager addition of one-element tensors.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch_autobatch as ab
from torch import Tensor, nn

from benchmarks import measure, tables
from benchmarks.measure import Step, clock, run_step
from benchmarks.workload import Sources, Workload
from benchmarks.workloads import WORKLOADS

# Methods that are made cells, by workload; of a list of modules, each of them.
CELLS: dict[str, tuple[str, ...]] = {
    "binary-tree-lstm": ("leaf", "node", "node_loss"),
    "child-sum-pairs": ("encoder.node", "log_probabilities"),
    "tagger": ("left_to_right", "right_to_left", "tagger"),
    "tagger-gates": ("left_to_right.forward", "right_to_left.forward", "tagger"),
    "mixture-of-experts": ("experts",),
    "mv-rnn": ("leaf", "node", "node_loss"),
}


# Made once, as by a decorator: a cell learns from its uses.
_made: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], Any]] = WeakKeyDictionary()


def cells_of(owner: nn.Module, name: str, compiled: bool) -> Any:
    """The method as a cell; of a list of modules, each of them."""
    made = _made.setdefault(owner, {})
    if (name, compiled) not in made:
        cell = functools.partial(ab.cell, compile=compiled)
        found = getattr(owner, name)
        several = isinstance(found, nn.ModuleList)
        made[name, compiled] = [cell(module) for module in found] if several else cell(found)
    return made[name, compiled]


@contextmanager
def as_cells(model: nn.Module, methods: Sequence[str], compiled: bool = False) -> Iterator[None]:
    """These methods of the model and its parts are cells meanwhile."""
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
    workload: Workload, minibatch: Sequence[Any], granularity: str, compiled: bool = False
) -> Step:
    """A training step with the workload's cells, captured whole or op by op."""
    scope = ab.batch(granularity=granularity)
    with as_cells(workload.model, CELLS[workload.name], compiled):
        start = clock()
        with scope:
            losses = measure.eager_losses(workload, minibatch)
            captured = clock()
        flushed = clock()
        stacked = torch.stack(losses)
        end = measure.finish(stacked, True)
    stages = {"capture": captured - start, "flush": flushed - captured, "backward": end - flushed}
    return Step(end - start, stacked, {}, stages, scope.report())


def compare(
    workload: Workload, hidden: int, minibatch: int, rounds: int, compiled: bool
) -> list[str]:
    """One row: hand's time by ours, op by op and in cells, and where ours goes."""
    variants = {
        "hand": measure.hand,
        "op": lambda w, m, _: step(w, m, "op"),
        "cell": lambda w, m, _: step(w, m, "cell"),
    }
    if compiled:
        variants["compiled"] = lambda w, m, _: step(w, m, "cell", compiled=True)
    steps: dict[str, list[Step]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        examples = workload.minibatch(minibatch, turn)
        for name, run in variants.items():
            taken = run_step(run, workload, examples, True)
            if turn >= 2:  # warm
                steps[name].append(taken)
        found = {name: taken[-1] for name, taken in steps.items() if taken}
        if turn == 2:  # batches of other sizes round otherwise
            for name in set(found) - {"hand", "op"}:
                torch.testing.assert_close(found[name].losses, found["op"].losses)

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
    ]


def call_costs() -> list[list[str]]:
    """Capture and schedule of a cell's call by an eager addition under no_grad."""
    x, w = torch.rand(1, 1), nn.Parameter(torch.rand(1, 1))
    calls = 2000

    def chain(ops: int) -> Any:
        @ab.cell
        def body(value: Tensor) -> Tensor:
            for _ in range(ops):
                value = (value * w).tanh()
            return value

        return body

    def eager() -> float:
        with torch.no_grad():
            start = clock()
            for _ in range(calls):
                x + x
            return clock() - start

    def captured(body: Any) -> float:
        with ab.batch(), torch.no_grad():
            pending = torch.nn.functional.linear(x, w)
            body(pending)
            start = clock()
            for _ in range(calls):
                body(pending)
            return clock() - start

    rows = []
    for ops in (1, 4, 8):
        body = chain(ops)
        pairs = [(captured(body), eager()) for _ in range(15)]
        rows.append([f"a cell of {2 * ops} ops", f"{median(a / b for a, b in pairs):.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compile", action="store_true", help="cell(compile=True) as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in WORKLOADS.values():
        for hidden in kind.sizes if kind.name in CELLS else ():
            workload = kind(hidden, Sources(), seed=0)
            rows.append(
                compare(workload, hidden, options.minibatch, options.rounds, options.compile)
            )
    header = ["workload, hidden size", "hand / op by op", "hand / cells"]
    header += ["hand / compiled cells"] if options.compile else []
    header += ["capture ms op by op", "capture ms cells", "flush ms", "backward ms", "batches"]
    print(tables.table(header, rows))
    print(tables.table(["capturing", "by an eager addition (goal 2)"], call_costs()))


if __name__ == "__main__":
    main()
