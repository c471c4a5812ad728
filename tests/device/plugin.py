"""Runs tests of ``tests/python`` on an accelerator: ``pytest -p tests.device.plugin``.

The device is the simulated one, or what the environment variable ``AUTOBATCH_TEST_DEVICE`` names
(``cuda``). What a test makes lies on the device, as if it had named it. Tests of what only a CPU
has are left out, and ``left_out.py`` says why; a test that puts tensors on the CPU itself is
skipped there.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.device import default
from tests.device.left_out import reason

DEVICE = os.environ.get("AUTOBATCH_TEST_DEVICE", "sim")
default.use(DEVICE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        why = reason(item.nodeid)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=f"on {DEVICE}: {why}"))


ELSEWHERE = re.compile(
    "device type tensor to numpy|the same device|at least two devices|expected device cpu"
)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    try:
        return (yield)
    except (TypeError, RuntimeError) as error:
        # Of eager: an error of an op in a block names the block.
        if not ELSEWHERE.search(str(error)) or "torch_autobatch" in str(error):
            raise
        pytest.skip(f"on {DEVICE}: the test puts tensors on the CPU itself")
    finally:
        end_process_if_device_is_lost()


def end_process_if_device_is_lost() -> None:
    """After an assertion in a kernel nothing runs on CUDA in this process any more. pytest-xdist
    reports that the test has ended its worker, and starts another."""
    if DEVICE != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the device is lost: {error}", file=sys.stderr, flush=True)
        os._exit(1)
