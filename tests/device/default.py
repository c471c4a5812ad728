"""Makes a device the one on which PyTorch's factories make tensors, without a torch-function mode.

``torch.set_default_device`` is such a mode, under which calls go other ways than a program's do.
Here the factories themselves are replaced, for good: what a test makes lies on the device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors


def _on(device: str, factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **options: Any) -> Any:
        if options.get("device") is None and not _says_where(factory, args, options):
            options["device"] = device
        return factory(*args, **options)

    return made


def _says_where(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> bool:
    if options.get("generator") is not None or options.get("pin_memory"):
        return True
    out = options.get("out")
    if out is not None:
        return True
    # These leave a tensor where it is.
    keeps = factory.__name__ in ("as_tensor", "asarray")
    return keeps and bool(args) and isinstance(args[0], torch.Tensor)


def make_default(device: str) -> None:
    for factory in _device_constructors():
        module = sys.modules[getattr(factory, "__module__", None) or "torch"]
        for owner in (torch, torch.fft, module):
            if "sparse" in factory.__name__ or "nested" in factory.__name__:
                continue
            if getattr(owner, factory.__name__, None) is factory:
                setattr(owner, factory.__name__, _on(device, factory))
