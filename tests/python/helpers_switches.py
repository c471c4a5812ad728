"""Turns optimizations off in a test (``csrc/autobatch/common/switches.h``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_autobatch import _C


def names() -> list[str]:
    """Returns all switches of the library."""
    return list(_C.switches())


def uses(name: str) -> int:
    """Returns the number of rewrites, or of captured calls, since the library was loaded."""
    return _C.switches()[name][2]


@contextmanager
def without(*switches: str) -> Iterator[None]:
    """Turns the switches off inside the ``with``. No block may be open at its beginning and end."""
    before = {name: _C.switches()[name][1] for name in switches}
    for name in switches:
        _C.set_switch(name, False)
    try:
        yield
    finally:
        for name, on in before.items():
            _C.set_switch(name, on)
