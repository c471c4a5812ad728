"""Runs tests of ``tests/python`` on the simulated device: ``pytest -p tests.device.plugin``.

What a test makes lies on the device, as if it had named it. Tests of what only a CPU has are left
out, and ``left_out.py`` says why; a test that hands the device's memory to NumPy is skipped there.
"""

from __future__ import annotations

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


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    try:
        return (yield)
    except TypeError as error:
        if "device type tensor to numpy" not in str(error):
            raise
        pytest.skip("on the simulated device: NumPy takes memory of the host alone")
