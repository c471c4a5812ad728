"""Copies models and data to the simulated device."""

from __future__ import annotations

import dataclasses
import io
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def moved(value: T, device: str = "sim") -> T:
    """Returns a copy with its tensors on the device. A shared tensor stays shared."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    loaded: T = torch.load(buffer, map_location=device, weights_only=False)
    return loaded


def sent(value: Any, device: str = "sim") -> Any:
    """Copies nested data to the device from pinned memory, so that the host does not wait."""
    if isinstance(value, torch.Tensor):
        return value.pin_memory().to(device, non_blocking=True) if value.is_cpu else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(sent(member, device) for member in value))
    if isinstance(value, list | tuple):
        return type(value)(sent(member, device) for member in value)
    if isinstance(value, dict):
        return {name: sent(member, device) for name, member in value.items()}
    for name in _attributes(value):
        object.__setattr__(value, name, sent(getattr(value, name), device))
    return value


def _attributes(value: Any) -> list[str]:
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", ()))
