"""Runs tests of ``tests/python`` on the simulated device: ``pytest -p tests.device.plugin``.

What a test makes lies on the device, as if it had named it. Tests of what only a CPU has are left
out, and ``left_out.py`` says why; a test that puts tensors on the CPU itself is skipped there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.device import default, sim  # noqa: F401  (makes the device known)
from tests.device.left_out import reason

default.make_default("sim")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        why = reason(item.nodeid)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=f"on the simulated device: {why}"))


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
        pytest.skip("on the simulated device: the test puts tensors on the CPU itself")
