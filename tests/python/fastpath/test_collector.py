"""Garbage that is collected while a block runs on another thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_cycles_collected_while_a_block_runs() -> None:
    cases = Path(__file__).with_name("collector_cases.py")
    done = subprocess.run(
        [sys.executable, str(cases), "10"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
