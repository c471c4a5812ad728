"""Runs tests of ``tests/python`` on an accelerator: ``pytest -p tests.device.plugin``.

The device is the simulated device, or the device in the environment variable
``AUTOBATCH_TEST_DEVICE`` (``cuda``). By default, tests make tensors on the device. ``left_out.py``
lists the tests that apply to the CPU only, with reasons. A test that mixes in tensors on the CPU is
skipped.
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
        # Only errors of eager mode: an error of an op in a block mentions torch_autobatch.
        if not ELSEWHERE.search(str(error)) or "torch_autobatch" in str(error):
            raise
        pytest.skip(f"on {DEVICE}: the test puts tensors on the CPU itself")
    finally:
        end_process_if_device_is_lost()


def end_process_if_device_is_lost() -> None:
    """Ends the process after a failed assertion in a CUDA kernel, since CUDA then fails in this
    process. pytest-xdist reports that the test ended its worker, and starts another worker."""
    if DEVICE != "cuda":
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the device is lost: {error}", file=sys.stderr, flush=True)
        os._exit(1)
