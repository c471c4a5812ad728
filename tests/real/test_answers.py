"""Models of other people's packages (``benchmarks/real``) have eager's answers: losses, gradients
and buffers, in double precision, in blocks and in maps, and eager is what it was afterwards. So has
the package's own batching, or a ratio to it would compare two different things.

A process a package, since some change what the others see (validation of distributions, for one).
``make test-real`` installs the packages.
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
