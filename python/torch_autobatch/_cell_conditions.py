"""Reads the sizes and the global state that PyTorch calls in a dynamic cell depend on.

The sizes determine which dimensions a call removes, and how many results a call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SizeOf = Callable[[Tensor, int], Any]  # returns the size, which may be a traced number


def ask_ones(size_of: SizeOf, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Reads the sizes that determine which dimensions `squeeze` removes.

    Comparing a traced number adds a condition to the program.
    """
    given = args[1] if len(args) > 1 else kwargs.get("dim", range(args[0].dim()))
    for dim in given if isinstance(given, (tuple, list, range)) else (given,):
        bool(size_of(args[0], dim) == 1)


def ask_count(
    size_of: SizeOf, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> bool:
    """Reads the size that determines how many results `unbind`, `chunk` and `split` have.

    Returns False if `name` is none of these three functions.
    """
    if name == "unbind":
        dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        return bool(size_of(args[0], dim) == count)
    if name not in ("chunk", "split"):
        return False
    named = [value for key, value in kwargs.items() if key not in ("dim", "input")]
    given = args[1] if len(args) > 1 else named[0]
    if isinstance(given, (tuple, list)):  # the call gives one size for each result
        return True
    size = size_of(args[0], args[2] if len(args) > 2 else kwargs.get("dim", 0))
    if bool(size == 0):  # `split` returns one result, `chunk` the given number of results
        return name == "split" or bool(given == count)
    piece = -(-size // given) if name == "chunk" else given
    return bool(-(-size // piece) == count)


def context() -> tuple[Any, ...]:
    """Returns the global state that the results of PyTorch's calls depend on."""
    return (
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_default_dtype(),
        torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    )
