"""Peak memory of one training step: eager, by hand, ours, each in a separate process.

python -m benchmarks --memory

There are two figures for each variant. *Tensors*: the peak of the memory that PyTorch's CPU
allocator has allocated since the start of the step, from the events of ``torch.profiler``. The
memory pool of torch_autobatch reports to the profiler only memory that is in use. *Process*: the
increase of the process's peak resident memory. It includes everything that is not a tensor (graph,
autograd nodes, Python objects) and the unused memory of the pool.
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

SMALL = 2  # number of examples of a first step, which loads libraries and fills caches


def tensor_peak(step: Callable[[], object]) -> int:
    """Returns the peak bytes of CPU tensors during ``step``, beyond those allocated before."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))


def resident() -> int:
    """Returns the peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_one(name: str, hidden: int, minibatch: int, variant: str, sources: Sources) -> Any:
    """Returns the peaks of one variant, in bytes. Must run in a fresh process."""
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
    # The same minibatch is used, so that both figures describe the same work.
    return {"tensors": tensor_peak(lambda: step(minibatch, 0)), "process": process, "kept": kept}


def in_fresh_process(
    name: str, hidden: int, minibatch: int, variant: str, sources: Sources
) -> dict[str, int]:
    """Runs ``measure_one`` in a new interpreter."""
    command = [sys.executable, "-m", "benchmarks.memory", name, str(hidden), str(minibatch)]
    command += [variant]
    for option, path in (("--treebank", sources.treebank), ("--tags", sources.tags)):
        command += [] if path is None else [option, str(path)]
    # The threshold is fixed. Otherwise glibc raises it and allocates larger and larger tensors on
    # its heap. Small records of the profiler are between these tensors, so freed memory can't be
    # reused.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=env)
    figures: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(name: str, hidden: int, minibatch: int, sources: Sources) -> dict[str, Any]:
    """Returns one row of the table."""
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
    """Prints the figures of one variant as JSON."""
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
