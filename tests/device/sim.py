"""The simulated accelerator, as ``torch.sim`` and ``torch.device("sim")``.

Importing this module registers the device with PyTorch permanently. Its C++ code is in ``csrc/``
beside this file and is built with the C++ tests (``make test``,
``setup.py build_ext --inplace --cpp-tests``).
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch_autobatch  # noqa: F401  (the device links to its library)

ROOT = Path(__file__).resolve().parents[2]


def _load() -> Any:
    name = "simulated_device"
    found = importlib.machinery.PathFinder.find_spec(name, [str(ROOT / "build" / "latest")])
    if found is None or found.loader is None:
        message = "the simulated device isn't built: setup.py build_ext --inplace --cpp-tests"
        raise ImportError(message)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


_C = _load()
Fault = _C.Fault
DEVICES: int = _C.DEVICES


def counts() -> dict[str, int]:
    """Returns the numbers of launches, of copies to device and host, and of synchronisations."""
    return dict(_C.counts())


def counts_by_op() -> dict[str, int]:
    """Returns the counts by op since ``clear_counts``: ``{"launches aten::addmm": 3}``."""
    return dict(_C.counts_by_op())


clear_counts = _C.clear_counts
allocated_bytes = _C.allocated_bytes


def plant_nothing() -> None:
    """Removes the planted fault."""
    _C.plant(Fault.NONE)


@contextlib.contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Yields a dict, which receives the counts of the block when the block ends."""
    before = counts()
    found: dict[str, int] = {}
    yield found
    found.update({name: count - before[name] for name, count in counts().items()})


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Inside the block, a synchronisation of the host raises an error, on any thread."""
    _C.forbid_synchronisation(True)
    try:
        yield
    finally:
        _C.forbid_synchronisation(False)


@contextlib.contextmanager
def planted(fault: Any) -> Iterator[None]:
    """Inside the block, the device imitates a library with this fault."""
    _C.plant(fault)
    try:
        yield
    finally:
        _C.plant(Fault.NONE)


@contextlib.contextmanager
def _kernels(present: bool, kind: str) -> Iterator[None]:
    if not present:
        getattr(_C, f"forget_{kind}")()
    try:
        yield
    finally:
        getattr(_C, f"register_{kind}")()


def region_kernels(present: bool) -> contextlib.AbstractContextManager[None]:
    """Sets whether the device has its own kernels for regions; else the library uses ATen ops."""
    return _kernels(present, "region_kernels")


def elementwise_kernel(present: bool) -> contextlib.AbstractContextManager[None]:
    """Sets whether the device has an elementwise kernel, for cells made inside the block."""
    return _kernels(present, "elementwise_kernel")


def _device_module() -> types.ModuleType:
    """The functions that PyTorch needs in ``torch.<device>``, and streams with CUDA's names."""
    module = types.ModuleType("torch.sim")
    accelerator = torch.accelerator

    def every_device(function: Any) -> Any:
        return [function(torch.device("sim", k)) for k in range(DEVICES)]

    def generator(device: Any) -> torch.Generator:
        index = device if isinstance(device, int) else torch.device(device).index
        return module.default_generators[index or 0]

    def manual_seed_all(seed: int) -> None:
        for default in module.default_generators:
            default.manual_seed(seed)

    @contextlib.contextmanager
    def stream(chosen: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream(chosen.device)
        torch.accelerator.set_stream(chosen)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)

    def device(chosen: Any) -> Any:
        index = chosen if isinstance(chosen, int) else torch.device(chosen).index
        return torch.accelerator.device_index(index)

    members: dict[str, Any] = {
        "device": device,
        "default_generators": [_C.generator_of(k) for k in range(DEVICES)],
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        # PyTorch 2.11 synchronises only a device whose module it has initialised.
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: DEVICES,
        "current_device": accelerator.current_device_index,
        "set_device": accelerator.set_device_index,
        "synchronize": accelerator.synchronize,
        "current_stream": accelerator.current_stream,
        "set_stream": accelerator.set_stream,
        "stream": stream,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "manual_seed": manual_seed_all,
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device="sim": generator(device).get_state(),
        "set_rng_state": lambda state, device="sim": generator(device).set_state(state),
        "get_rng_state_all": lambda: every_device(lambda d: generator(d).get_state()),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, member in members.items():
        setattr(module, name, member)
    return module


def _register() -> None:
    torch.utils.rename_privateuse1_backend("sim")
    module = _device_module()
    torch._register_device_module("sim", module)
    sys.modules["torch.sim"] = module
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
    _C.watch_faults()
    _C.register_region_kernels()
    _C.register_elementwise_kernel()


_register()
