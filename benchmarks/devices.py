"""Support for accelerators: moves tensors, waits for a step's end, and counts launches.

Devices have the same names as in PyTorch: ``cpu``, ``cuda``. If importing a module registers the
device, its name is written ``name@module``. If that module has a function ``counts()``, this
function gives the number of launches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

CPU = torch.device("cpu")
_modules: dict[str, Any] = {}  # by device type


def named(name: str) -> torch.device:
    """Returns the device with this name. Imports its module if necessary."""
    name, _, module = name.partition("@")
    loaded = importlib.import_module(module) if module else None
    device = torch.device(name)
    _modules[device.type] = loaded
    return device


def synchronize(device: torch.device) -> None:
    """Waits for all work launched on the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def environment(device: torch.device) -> dict[str, str]:
    """Returns the device properties on which measurements depend."""
    if device.type != "cuda":
        return {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "CUDA": str(torch.version.cuda),
    }


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Returns a copy of an example or a plan with each tensor replaced by ``change(tensor)``."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: with_tensors(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(with_tensors(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return replace(value, **with_tensors(parts, change))
    return value


def moved(value: Any, device: torch.device) -> Any:
    """Returns a copy of examples on the device. A shared tensor is copied once."""
    if device.type == "cpu":
        return value
    there: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in there:
            there[id(tensor)] = tensor.to(device)
        return there[id(tensor)]

    return with_tensors(value, move)


def sent(plan: Any, device: torch.device) -> Any:
    """Returns a copy of a minibatch's plan on the device.

    One copy sends all tensors of a dtype, as in code by an expert.
    """
    if device.type == "cpu":
        return plan
    here: dict[torch.dtype, list[Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            here.setdefault(tensor.dtype, []).append(tensor)
        return tensor

    with_tensors(plan, note)
    there: dict[int, Tensor] = {}
    for tensors in here.values():
        packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
        if device.type == "cuda":
            packed = packed.pin_memory()
        parts = packed.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            there[id(tensor)] = part.view(tensor.shape)
    return with_tensors(plan, lambda tensor: there.get(id(tensor), tensor))


# ---------------------------------------------------------------- the load of a step


@dataclass
class Load:
    """The device load of one step. A field is None if the device has no such figure."""

    launches: int | None = None  # kernels, copies and fills
    busy: float | None = None  # milliseconds in which at least one kernel, copy or fill ran
    peak: int | None = None  # maximum bytes of tensors, beyond those allocated before the step


def load(step: Callable[[], object], device: torch.device) -> Load:
    """Measures ``step``. Runs it several times: for memory, launches, and under the profiler."""
    if device.type == "cpu":
        from benchmarks.memory import tensor_peak

        return Load(peak=tensor_peak(step))
    found = Load(peak=_peak(step, device))
    counts = getattr(_modules.get(device.type), "counts", None)
    if counts is not None:
        before = counts()["launches"]
        step()
        found.launches = counts()["launches"] - before
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
            synchronize(device)
        spans = list(_on_device(profiler))
        found.launches, found.busy = len(spans), _union(spans) / 1e6
    return found


def _peak(step: Callable[[], object], device: torch.device) -> int | None:
    synchronize(device)
    try:
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        step()
        synchronize(device)
        return (torch.accelerator.max_memory_allocated(device) - before) or None
    except (AttributeError, NotImplementedError, RuntimeError):  # these figures are not available
        return None


def _on_device(profiler: profile) -> Iterable[tuple[int, int]]:
    """Yields start and end of all work on the device, in nanoseconds.

    The profiler also reports ranges of the host as device events. These are left out.
    """
    ranges = {e.name() for e in _events(profiler) if e.device_type() == DeviceType.CPU}
    for event in _events(profiler):
        if event.device_type() != DeviceType.CPU and event.name() not in ranges:
            yield event.start_ns(), event.start_ns() + event.duration_ns()


def _events(profiler: profile) -> list[Any]:
    events: list[Any] = profiler.profiler.kineto_results.events()
    return events


def _union(spans: list[tuple[int, int]]) -> int:
    total = reached = 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
