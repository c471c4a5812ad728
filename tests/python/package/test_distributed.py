"""DistributedDataParallel and FSDP on two processes with different trees."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import distributed_cases
import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[3]
# Message of a process that exits while threads of gloo still run.
ABORTED_AT_EXIT = "terminate called without an active exception"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not dist.is_available() or not dist.is_gloo_available(),
        reason="needs torch.distributed with gloo",
    ),
]


def run_two(script: Path, *arguments: str) -> str:
    """Runs the script with torchrun. A deadlock ends with the timeout.

    About one process in thirty is aborted when it exits, after all of its work, also without this
    library. The script then runs once more.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    for _ in range(3):
        done = subprocess.run(
            [*command, str(script), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        )
        if done.returncode == 0 or ABORTED_AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def test_example_gives_the_gradients_of_one_process() -> None:
    out = run_two(ROOT / "examples" / "ddp_tree_lstm.py", "--check", "--steps", "2", "--hidden=16")
    found = re.findall(r"rank (\d): (\d+) of 32 trees, gradients differ .* by (\S+) of", out)
    assert sorted(rank for rank, _, _ in found) == ["0", "1"], out
    assert sum(int(trees) for _, trees, _ in found) == 32
    assert all(float(difference) < 1e-6 for _, _, difference in found)
    assert "step 2: loss" in out


def test_buckets_hooks_and_shards() -> None:
    out = run_two(Path(distributed_cases.__file__))
    for case in distributed_cases.CASES:
        for rank in range(2):
            assert f"rank {rank}: {case.__name__} passed" in out
