"""States of PyTorch's random number generators, for the CPU and an accelerator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# For each generator: a module with `set_rng_state`, the arguments of this function after the state,
# and the state.
States = list[tuple[Any, tuple[int, ...], Tensor]]


def random_states() -> States:
    """Returns the current states, which ``restore`` can set again."""
    states: States = [(torch, (), torch.get_rng_state())]
    module = _module_of_accelerator()
    if module is not None:
        if hasattr(module, "get_rng_state_all"):
            states += [(module, (i,), s) for i, s in enumerate(module.get_rng_state_all())]
        else:
            states.append((module, (), module.get_rng_state()))
    return states


def restore(states: States) -> None:
    """Sets the states. The generators then draw the same random numbers again."""
    for module, device, state in states:
        module.set_rng_state(state, *device)


def differ(before: States, after: States) -> bool:
    """Whether random numbers were drawn after ``before`` was read and before ``after`` was."""
    return len(before) != len(after) or any(
        not torch.equal(a[-1], b[-1]) for a, b in zip(before, after, strict=True)
    )


def _module_of_accelerator() -> Any:
    """Returns ``torch.cuda`` or a similar module if it is in use and its generators can be read."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device)
    in_use = getattr(module, "is_initialized", lambda: True)()
    # While a CUDA graph is captured, the generator belongs to the graph and can't be read.
    is_capturing = in_use and getattr(module, "is_current_stream_capturing", lambda: False)()
    return module if in_use and not is_capturing and hasattr(module, "get_rng_state") else None
