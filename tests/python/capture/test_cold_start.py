"""The first use of an op in a process imports no modules of PyTorch's compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("cold_start_cases.py")


@pytest.mark.parametrize("which", ["ops", "rest"])
def test_nothing_of_the_compiler_is_imported(which: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CASES), which], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
