"""Sets the default device of PyTorch's factories without a torch-function mode.

``torch.set_default_device`` installs a mode, which changes how calls are dispatched. This module
permanently replaces the factories themselves.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._decomp.decompositions_for_jvp  # compiles functions that call the factories
from torch.utils._device import _device_constructors

device = "cpu"  # the default
_paused = False


def _on(device: str, factory: Callable[..., Any]) -> Callable[..., Any]:
    # Not functools.wraps: unwrapping would give a builtin, which `inspect` can't read.
    def made(*args: Any, **options: Any) -> Any:
        if _paused or options.get("device") is not None or _says_where(factory, args, options):
            return factory(*args, **options)
        generator = options.get("generator")
        if generator is None:
            return factory(*args, device=device, **_without_device(options))
        drawn = factory(*args, **{**options, "requires_grad": False})  # on the generator's device
        return drawn.to(device).requires_grad_(options.get("requires_grad", False))

    made.__name__ = made.__qualname__ = factory.__name__
    made.__module__ = factory.__module__ or "torch"
    return made


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Inside the block, factories use their original default device, on all threads."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def _without_device(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "device"}


def _says_where(
    factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> bool:
    if options.get("pin_memory") or options.get("out") is not None:
        return True
    # These functions keep the device of a tensor argument.
    keeps = factory.__name__ in ("as_tensor", "asarray")
    return keeps and bool(args) and isinstance(args[0], torch.Tensor)


def make_default(name: str) -> None:
    global device
    device = name
    for factory in _device_constructors():
        module = sys.modules[getattr(factory, "__module__", None) or "torch"]
        for owner in (torch, torch.fft, module):
            if "sparse" in factory.__name__ or "nested" in factory.__name__:
                continue
            if getattr(owner, factory.__name__, None) is factory:
                setattr(owner, factory.__name__, _on(name, factory))


def use(device: str) -> None:
    """Does the same as ``make_default``. For ``sim``, registers the simulated device first."""
    if device == "sim":
        from tests.device import sim  # noqa: F401
    make_default(device)
