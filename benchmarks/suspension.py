"""Compares the cost of suspending and resuming an instance of ``ab.map`` with its parts.

python -m benchmarks.suspension

A read in a map consists of ``item()`` on a pending tensor and two greenlet switches (to another
fiber and back). The cost is the time of the map, minus the time of the same ops in lockstep, plus
the time to read a computed value. In lockstep, the first read of a round computes all values, and
the other reads find computed values. So the difference is the cost of suspending and resuming. To
measure the read of a computed value, each value is read twice.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import greenlet
import torch
import torch_autobatch as ab
from torch import nn

INSTANCES, READS, ROUNDS = 64, 100, 15
GOAL = 2.0  # maximum cost, relative to two bare switches and an eager item()


def eager_items() -> None:
    """Calls ``item()`` on ordinary tensors."""
    for value in VALUES:
        value.item()


def bare_switches() -> None:
    """Runs greenlets that only switch."""
    hub = greenlet.getcurrent()

    def body() -> None:
        for _ in range(READS):
            hub.switch()

    fibers = [greenlet.greenlet(body) for _ in range(INSTANCES)]
    for _ in range(READS):
        for fiber in fibers:
            fiber.switch()


def mapped() -> None:
    """Alternates an op and a read in each instance of a map."""

    def body(_: int) -> None:
        for _ in range(READS):
            (WEIGHT + 1).item()

    ab.map(body, range(INSTANCES))


def together(times: int = 1) -> None:
    """Runs the ops and reads of ``mapped`` with hand-written code, all instances in lockstep."""
    with ab.batch():
        for _ in range(READS):
            made = [WEIGHT + 1 for _ in range(INSTANCES)]
            for _ in range(times):
                for value in made:
                    value.item()


def together_twice() -> None:
    """Does the same as ``together``, but reads each value twice."""
    together(2)


VALUES = torch.randn(INSTANCES * READS).unbind()
WEIGHT = nn.Parameter(torch.ones(1))


def microseconds(run: Callable[[], None]) -> float:
    """Returns the microseconds of one read."""
    start = time.process_time()
    run()
    return (time.process_time() - start) / (INSTANCES * READS) * 1e6


def main() -> None:
    """Prints a table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    runs = (eager_items, bare_switches, mapped, together, together_twice)
    for run in runs:
        run()
    rounds = [[microseconds(run) for run in runs] for _ in range(ROUNDS)]
    item, switch, whole, without, twice = (median(c) for c in zip(*rounds, strict=True))
    costs = [w - 2 * t + t2 for _, _, w, t, t2 in rounds]
    ratio = median(c / (i + s) for c, (i, s, *_) in zip(costs, rounds, strict=True))
    print("| | µs |\n| --- | --: |")
    print(f"| eager item() | {item:.2f} |")
    print(f"| a bare switch there and back | {switch:.2f} |")
    print(f"| an op and a read in ab.map | {whole:.2f} |")
    print(f"| the same in lockstep by hand | {without:.2f} |")
    print(f"| a read of a value that is there | {twice - without:.2f} |")
    print(f"| suspension, resumption and read | {median(costs):.2f} |")
    print(f"| by switch and item() | {ratio:.2f} (goal {GOAL}) |")


if __name__ == "__main__":
    main()
