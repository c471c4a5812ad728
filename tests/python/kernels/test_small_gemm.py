"""Rows times a weight, in a separate process, because only the first shapes get kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_products_in_a_fresh_process() -> None:
    cases = Path(__file__).with_name("small_gemm_cases.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
