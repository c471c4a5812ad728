"""Times each variant with pytest-benchmark: ``pytest benchmarks``. Gives wall times of one step.

For ratios use ``python -m benchmarks``, which runs the variants in turn. The times in this table
are measured minutes apart, so changes in the load of the machine affect them.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch

from benchmarks import measure
from benchmarks.workload import Sources, Workload
from benchmarks.workloads import WORKLOADS

MINIBATCH = int(os.environ.get("BENCH_MINIBATCH", "8"))


@functools.lru_cache(maxsize=1)
def made(name: str) -> tuple[Workload, list[Any], measure.Step]:
    """Returns a workload, a minibatch, and the eager results for it."""
    torch.set_num_threads(1)
    kind = WORKLOADS[name]
    workload = kind(kind.sizes[0], Sources(), seed=0)
    minibatch = workload.minibatch(MINIBATCH, 0)
    return workload, minibatch, measure.run_step(measure.eager, workload, minibatch, True)


@pytest.mark.parametrize("variant", list(measure.VARIANTS))
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_training_step(benchmark: Any, name: str, variant: str) -> None:
    workload, minibatch, expected = made(name)
    run = measure.VARIANTS[variant]
    benchmark.group = name
    step = benchmark.pedantic(
        measure.run_step, (run, workload, minibatch, True), rounds=3, warmup_rounds=1
    )
    measure.check(expected, step, f"{name}, {variant}")
    benchmark.extra_info.update(step.stages, minibatch=MINIBATCH)
