"""Code that the tests of contexts share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    """Sets the dtype of tensors that are made from numbers."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)
