"""Converts the views of a tape (sizes, strides, offset) to ops that accept any layout."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class UnsupportedError(Exception):
    """A body can't be compiled. The message gives the reason."""


def row_major(sizes: Sequence[int]) -> list[int]:
    """Returns the strides of a contiguous tensor."""
    strides, step = [0] * len(sizes), 1
    for d in reversed(range(len(sizes))):
        strides[d], step = step, step * sizes[d]
    return strides


def _is_row_major(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    triples = zip(sizes, strides, row_major(sizes), strict=True)
    return all(size == 1 or a == b for size, a, b in triples)


def _refined(numel: int, strides: Sequence[int]) -> list[int] | None:
    """Returns sizes of a contiguous tensor that has a dimension with each of the strides."""
    steps = sorted({1, *strides} - {0}, reverse=True)
    whole = [numel, *steps]
    pairs = list(zip(whole, steps, strict=False))
    return None if any(a % b for a, b in pairs) else [a // b for a, b in pairs]


def _starts(
    sizes: Sequence[int], strides: Sequence[int], dims: Sequence[int], offset: int
) -> dict[int, int] | None:
    """Returns the index in each dimension of the element at the offset; None if none is there."""
    start = dict.fromkeys(range(len(sizes)), 0)
    for d in dims:
        if strides[d] == 0:
            return None
        start[d], offset = divmod(offset, strides[d])
        if start[d] >= sizes[d]:
            return None
    return start if offset == 0 else None


def _matched(
    x: Tensor,
    lead: int,
    strides: Sequence[int],
    to: Sequence[int],
    to_strides: Sequence[int],
    offset: int,
) -> Tensor | None:
    """Returns the view if each of its dimensions is a slice of a dimension of x, or is expanded."""
    sizes = list(x.shape[lead:])
    free = sorted((d for d in range(len(sizes)) if sizes[d] > 1), key=lambda d: -strides[d])
    start = _starts(sizes, strides, free, offset)
    if start is None:
        return None
    # For each dimension of the view: the dimension of x, or None (size 1, or expanded).
    sources: list[int | None] = []
    for size, stride in zip(to, to_strides, strict=True):
        if size == 1 or stride == 0:
            sources.append(None)
            continue
        for d in free:  # searches for the largest stride that fits
            step, rest = divmod(stride, strides[d])
            if rest == 0 and step > 0 and start[d] + (size - 1) * step < sizes[d]:
                break
        else:
            return None
        free.remove(d)
        stop = start[d] + (size - 1) * step + 1
        if size < sizes[d]:
            x = torch.ops.aten.slice.Tensor(x, lead + d, start[d], stop, step)
        sources.append(d)
    order = [d for d in sources if d is not None]
    gone = [d for d in range(len(sizes)) if d not in order]
    for d in reversed(gone):
        x = x.select(lead + d, start[d])
    order = [sum(e not in gone for e in range(d)) for d in order]
    if order != sorted(order):
        x = x.permute(*range(lead), *(lead + d for d in order))
    for at, source in enumerate(sources):
        if source is None:
            x = x.unsqueeze(lead + at)
    return x.expand(*(-1 for _ in range(lead)), *to) if list(x.shape[lead:]) != list(to) else x


def view(
    x: Tensor,
    lead: int,
    strides: Sequence[int],
    to: Sequence[int],
    to_strides: Sequence[int],
    offset: int,
) -> Tensor:
    """Applies ``as_strided`` to each member of x, [*members, *sizes].

    Args:
        x: a tensor of any layout.
        lead: number of leading dimensions, which count members.
        strides: strides of the other dimensions of x in the tape.
        to: sizes of the view, without the leading dimensions.
        to_strides: strides of the view in the tape.
        offset: first element of the view, counted from the start of a member.

    Returns:
        The view, [*members, *to]. It may be a copy.

    Raises:
        UnsupportedError: if the view is not a slice, permutation, expansion or reshape, or has no
            elements.
    """
    sizes = list(x.shape[lead:])
    if math.prod(to) == 0:
        raise UnsupportedError("a view has no elements")
    dense = _is_row_major(sizes, strides)
    whole = offset == 0 and math.prod(sizes) == math.prod(to)
    if dense and whole and _is_row_major(to, to_strides):
        return x.reshape(*x.shape[:lead], *to)
    out = _matched(x, lead, strides, to, to_strides, offset)
    if out is None and dense:
        given = [stride for size, stride in zip(to, to_strides, strict=True) if size > 1]
        fine = _refined(math.prod(sizes), given)
        if fine is not None:
            flat = x.reshape(*x.shape[:lead], *fine)
            out = _matched(flat, lead, row_major(fine), to, to_strides, offset)
    if out is None:
        raise UnsupportedError("a view is not a slice, permutation or reshape")
    return out
