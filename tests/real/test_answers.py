"""Models of other packages (``benchmarks/real``) match eager mode: losses, gradients and buffers,
in double precision, in blocks and in maps. Eager results are the same afterwards. The package's own
batching must match too. Otherwise a ratio to it would be meaningless.

Each package runs in a separate process, because some packages change global state, such as the
validation of distributions. ``make test-real`` installs the packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.real import PACKAGES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("package", PACKAGES)
def test_answers(package: str) -> None:
    command = [sys.executable, "-m", "benchmarks.real", "--check", "--only", package]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    failures = done.stdout.splitlines()
    assert not failures, "\n".join(["these are not eager's:", *failures])
    assert done.returncode == 0, done.stderr
