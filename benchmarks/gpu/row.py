"""Measures a workload on a device: eager, by hand, ours op by op and in cells, DGL if installed.

python -m benchmarks.gpu.row binary-tree-lstm 128 64 --device cuda --json row.json
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import cells, devices, measure, peers, suite
from benchmarks.measure import Step
from benchmarks.workload import Sources, Workload
from benchmarks.workloads import WORKLOADS

IN_CELLS = "cells"
LONG = 500  # milliseconds; profiling a step of a hundred thousand launches takes a minute


def variants_of(workload: Workload, skipped: dict[str, str]) -> dict[str, Callable[..., Step]]:
    """Returns the variants other than eager, hand and ours."""
    others = peers.available(workload, skipped, names=("dgl",))
    if workload.name in cells.CELLS:
        methods = cells.CELLS[workload.name]
        others[IN_CELLS] = lambda w, minibatch, _: cells.step(w, minibatch, methods)
    return others


def measure_row(workload: Workload, hidden: int, minibatch: int, rounds: int) -> dict[str, Any]:
    """Returns the result of suite.compare. Adds speed, launches, idle share and peak by variant."""
    skipped: dict[str, str] = {}
    others = variants_of(workload, skipped)
    plan = suite.Plan(rounds, eager_rounds=min(2, rounds), warm_up=3, peers=False)
    result = suite.compare(workload, hidden, minibatch, plan, others)
    if IN_CELLS in result.skipped:
        raise measure.MismatchError(f"{workload.name}, cells: {result.skipped[IN_CELLS]}")
    result.skipped |= skipped
    row = asdict(result)
    row["environment"] = suite.environment() | devices.environment(workload.device)
    every = {**measure.variants_of(workload), **others}
    for name, timing in row["timings"].items():
        timing["examples a second"] = 1e3 * minibatch / timing["median"]
        if name == measure.EAGER and timing["median"] > LONG:
            continue
        step = functools.partial(
            measure.run_step, every[name], workload, workload.minibatch(minibatch, 0), True
        )
        workload.model.zero_grad(set_to_none=True)  # gradients must not count
        load = devices.load(step, workload.device)
        timing["launches"] = load.launches
        timing["idle"] = None if load.busy is None else max(0.0, 1 - load.busy / timing["median"])
        timing["peak"] = load.peak
    return row


def parse(description: str, arguments: Sequence[str] | None, **more: Any) -> argparse.Namespace:
    """Parses a workload, its sizes and the device. `more` contains further options."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("hidden", type=int)
    parser.add_argument("minibatch", type=int)
    parser.add_argument("--device", default="cuda", help="as PyTorch names it, or name@module")
    for name, settings in more.items():
        parser.add_argument(f"--{name}", **settings)
    return parser.parse_args(arguments)


def make(options: argparse.Namespace) -> Workload:
    """Returns the workload, moved to its device."""
    device = devices.named(options.device)
    measure.prepare(device)
    return suite.make(WORKLOADS[options.workload], options.hidden, Sources(), device)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(
        __doc__ or "", arguments, rounds={"type": int, "default": 7}, json={"type": Path}
    )
    row = measure_row(make(options), options.hidden, options.minibatch, options.rounds)
    text = json.dumps(row, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
        ratios = ", ".join(f"{name} / ours {r:.2f}" for name, r in row["ours_against"].items())
        print(f"{ratios}, difference {row['difference']:.0e}")
    else:
        print(text)


if __name__ == "__main__":
    main()
