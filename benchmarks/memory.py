"""The most memory that one training step needs: eager, by hand, ours, each in a process of its own.

python -m benchmarks --memory

Two figures for each. *Tensors*: what PyTorch's CPU allocator has handed out beyond what it had at
the start of the step, at its highest, from the events of ``torch.profiler``. The pool of ours tells
the profiler what is in use and what waits in it, so that what waits is left out. *Process*: by how
much the step raised the most memory that the process ever had resident, all that is no tensor
included: graph, autograd nodes, Python's objects, and what waits in the pool.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch_autobatch as ab

from benchmarks import measure, suite
from benchmarks.measure import VARIANTS
from benchmarks.workload import Sources
from benchmarks.workloads import WORKLOADS

SMALL = 2  # examples of the step that loads libraries and fills caches


def tensor_peak(step: Callable[[], object]) -> int:
    """Bytes that CPU tensors needed at most while ``step`` ran, beyond those there were before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))


def resident() -> int:
    """The most that this process ever had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_one(name: str, hidden: int, minibatch: int, variant: str, sources: Sources) -> Any:
    """Peaks of one variant, in bytes. For a fresh process."""
    torch.set_num_threads(1)
    workload = suite.make(WORKLOADS[name], hidden, sources)

    def step(size: int, turn: int) -> None:
        done = measure.run_step(VARIANTS[variant], workload, workload.minibatch(size, turn), True)
        done.report = None

    step(SMALL, suite.WARM_UP)
    workload.model.zero_grad(set_to_none=True)
    before = resident()
    step(minibatch, 0)
    process = resident() - before
    kept = ab.empty_cache()
    workload.model.zero_grad(set_to_none=True)
    # The same minibatch, so that the figures belong together.
    return {"tensors": tensor_peak(lambda: step(minibatch, 0)), "process": process, "kept": kept}


def in_fresh_process(
    name: str, hidden: int, minibatch: int, variant: str, sources: Sources
) -> dict[str, int]:
    """The same, from a new interpreter."""
    command = [sys.executable, "-m", "benchmarks.memory", name, str(hidden), str(minibatch)]
    command += [variant]
    for option, path in (("--treebank", sources.treebank), ("--tags", sources.tags)):
        command += [] if path is None else [option, str(path)]
    # A fixed threshold: else glibc takes ever larger tensors from its heap, where the profiler's
    # small notes lie between them, and what is freed can't be used again.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    figures: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(name: str, hidden: int, minibatch: int, sources: Sources) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {
        "workload": name,
        "title": WORKLOADS[name].title,
        "hidden": hidden,
        "minibatch": minibatch,
    }
    for variant in VARIANTS:
        row[variant] = in_fresh_process(name, hidden, minibatch, variant, sources)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one variant's figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("hidden", type=int)
    parser.add_argument("minibatch", type=int)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--treebank", type=Path)
    parser.add_argument("--tags", type=Path)
    o = parser.parse_args(arguments)
    sources = Sources(o.treebank, o.tags)
    print(json.dumps(measure_one(o.workload, o.hidden, o.minibatch, o.variant, sources)))


if __name__ == "__main__":
    main()
