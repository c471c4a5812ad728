"""Runs the tests of the simulated device in another process, because PyTorch can't remove a
device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(
    not list((ROOT / "build" / "latest").glob("simulated_device.*.so")),
    reason="the simulated device is built with the C++ tests: build_ext --cpp-tests",
)
@pytest.mark.parametrize(
    "tests",
    [
        ["tests/device"],
        [
            "-p",
            "tests.device.plugin",
            "tests/python/package/test_models.py",
            "-k",
            "float64 and auto",
        ],
    ],
    ids=["its own", "models"],
)
def test_on_the_simulated_device(tests: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *tests],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "AUTOBATCH_DISABLE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
