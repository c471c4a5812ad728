"""Counts the launches of a step on the simulated device, for eager, hand-batched and our code.

python -m benchmarks.launches                                all workloads, as a table
python -m benchmarks.launches --only tagger,graphs --by-op   also by op

The counts are the same on every machine. They cover kernel launches, copies to the device and to
the host, and waits of the host. The device is the tests' simulated device (``tests/device``). It
splits ATen's composite ops into the same parts as CUDA. One launch here may be two or three kernels
on CUDA, and many launches here may be one kernel on CUDA for ``_foreach`` ops.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor

from benchmarks import cells, collate, suite
from benchmarks.arguments import some_of
from benchmarks.measure import EAGER, HAND, OURS, eager_losses
from benchmarks.workload import Sources, Workload
from benchmarks.workloads import WORKLOADS
from tests.device import default, sim
from tests.device.move import moved, sent


@dataclass
class Counts:
    """The counts of one step: forward (with the flush) and backward."""

    forward: dict[str, int]
    backward: dict[str, int]
    by_op: Counter[str]

    def of(self, what: str) -> int:
        return self.forward[what] + self.backward[what]


def eager(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    return torch.stack(eager_losses(workload, minibatch))


def hand(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    plan = sent(workload.collate(minibatch))
    made_on_host = collate.tensor
    collate.tensor = lambda ids: sent(made_on_host(ids))  # for tensors made during the step
    try:
        return workload.hand(plan)
    finally:
        collate.tensor = made_on_host


def ours(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    with ab.batch(adaptive=False):
        mapped = workload.reads
        losses = ab.map(workload.loss, minibatch) if mapped else eager_losses(workload, minibatch)
        return torch.stack(losses)


def in_cells(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    with cells.as_cells(workload.model, cells.CELLS[workload.name]):
        return ours(workload, minibatch)


IN_CELLS = "cells"
VARIANTS: dict[str, Callable[[Workload, Sequence[Any]], Tensor]] = {
    EAGER: eager,
    HAND: hand,
    OURS: ours,
    IN_CELLS: in_cells,
}


def count(run: Callable[..., Tensor], workload: Workload, minibatch: Sequence[Any]) -> Counts:
    """Returns the counts of the third step. The first two fill caches."""
    for _ in range(3):
        workload.model.zero_grad(set_to_none=True)
        torch.accelerator.synchronize()
        sim.clear_counts()
        losses = run(workload, minibatch)
        forward = sim.counts()
        with sim.counting() as backward:
            losses.sum().backward()
        by_op = Counter(sim.counts_by_op())
    return Counts(forward, backward, by_op)


def row(name: str, found: dict[str, Counts]) -> str:
    """Returns a row of the table: launches of each variant, and our copies and waits."""
    columns = [name]
    for kind in VARIANTS:
        c = found.get(kind)
        columns.append(f"{c.forward['launches']} + {c.backward['launches']}" if c else "")
    by_hand = found[HAND].of("launches")
    for kind in (OURS, IN_CELLS):
        c = found.get(kind)
        columns.append(f"{c.of('launches') / by_hand:.2f}" if c else "")
    others = [str(found[OURS].of(what)) for what in ("to_device", "to_host", "synchronisations")]
    return "| " + " | ".join([*columns, *others]) + " |"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.launches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", type=some_of(WORKLOADS), metavar="NAMES", help=f"some of {', '.join(WORKLOADS)}"
    )
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=32, help="counts don't depend on it")
    parser.add_argument("--by-op", action="store_true", help="name the ops of ours and of hand")
    return parser.parse_args()


def main() -> int:
    options = parse()
    names = options.only or WORKLOADS
    made = [suite.make(WORKLOADS[name], options.hidden, Sources(None, None)) for name in names]
    default.make_default("sim")  # the device of tensors that models and `hand` make
    print(
        "| workload | eager | by hand | ours | in cells | ours / by hand | in cells / by hand "
        "| to device | to host | waits |"
    )
    print("| --- " + "| ---: " * 9 + "|")
    failed = 0
    for workload in made:
        minibatch = moved((workload, workload.minibatch(options.minibatch, 0)))
        try:
            found = {
                kind: count(run, *minibatch)
                for kind, run in VARIANTS.items()
                if kind != IN_CELLS or workload.name in cells.CELLS
            }
        except RuntimeError as error:
            failed += 1
            print(f"| {workload.name} | failed: {str(error).splitlines()[0]} |", flush=True)
            continue
        print(row(workload.title, found), flush=True)
        if options.by_op:
            for kind, counts in found.items():
                if kind == EAGER:
                    continue
                print(f"\n{kind}:")
                for op, times in counts.by_op.most_common():
                    print(f"  {times:6} {op}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
