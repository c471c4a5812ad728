"""Replaces indexing (``x[index]``, ``x[index] = y``) in the traces of dynamic cells by calls.

If an index depends on data (a mask, the bounds of a slice), the program first computes the numbers
of the rows, or the bounds. The selection or the write itself is then captured like any other op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_autobatch import _C
from torch_autobatch._cell_ops import MASKS, name_of


class Indexing:
    """The part of a trace that records indexing. The other methods of a trace are in `Trace`."""

    has_effects: bool

    def add_guard(self, condition: str) -> None:
        raise NotImplementedError

    def _size(self, tensor: Tensor, dim: int | None = None) -> Any:
        raise NotImplementedError

    def _expression(self, value: Any) -> str:
        raise NotImplementedError

    def _bind(self, value: Tensor, name: str, is_own: bool) -> None:
        raise NotImplementedError

    def _add_call(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        raise NotImplementedError

    def _fact(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        raise NotImplementedError

    def _index(self, func: Any, of: Tensor, index: Any) -> tuple[Any, str, tuple[Any, ...]]:
        """Returns the call that replaces indexing by a number or a mask: it is captured faster."""
        index = self._with_numbers(index)
        if isinstance(index, int) and not isinstance(index, bool):
            return Tensor.select, "select", (of, 0, index)
        # If `of` is not contiguous, indexing keeps the order of its strides, but `index_select`
        # does not.
        found = self._rows(of, index) if of.is_contiguous() else None
        if found is None:
            return func, "__getitem__", (of, index)
        self.add_guard(f"{self._expression(of)}.is_contiguous() is True")
        return Tensor.index_select, "index_select", (of, *found)

    def _rows(self, of: Tensor, index: Any) -> tuple[int, Tensor] | None:
        """Returns the dimension that a known mask indexes, and the rows that the mask selects.

        Returns None for any other index.
        """
        found = _mask_of_rows(index)
        if found is None or self.has_effects or not _C.is_known(found[1]):
            return None
        dim, mask = found
        bool(self._size(mask, 0) == self._size(of, dim))  # becomes a condition of the program
        rows = rows_of(mask)
        self._bind(rows, self._add_call(rows_of, "nonzero", (mask,), {}), is_own=True)
        return dim, rows

    def _put(self, to: Tensor, index: Any, value: Any) -> None:
        """Records ``to[index] = value``."""
        index = self._with_numbers(index)
        args = (to, index, value)
        if _puts_rows(*args):
            self._add_call(put_rows_, "put_rows_", (to, index.start, index.stop, value), {})
            return
        if not _puts_by_index(args):
            fills = _fills_by_mask(*args) and self._size(to) == self._size(index)
            put: Any = Tensor.masked_fill_ if fills else Tensor.__setitem__
            self._add_call(put, name_of(put), args, {})
            return
        found = self._rows(to, index)  # the rows of dimension 0
        given = index if isinstance(index, tuple) else (index,)
        indices = given if found is None else found[1:]
        self._add_call(Tensor.index_put_, "index_put_", (to, indices, value), {})

    def _with_numbers(self, index: Any) -> Any:
        """Replaces known tensors among the bounds of slices with numbers: ``x[start:stop]``."""
        if isinstance(index, tuple):
            return tuple(map(self._with_numbers, index))
        if not isinstance(index, slice):
            return index
        return slice(*map(self._number, (index.start, index.stop, index.step)))

    def _number(self, bound: Any) -> Any:
        if not isinstance(bound, Tensor) or not _C.is_known(bound):
            return bound
        return self._fact(Tensor.item, "item", (bound,), {}, bound.item())


def put_rows_(to: Tensor, start: int | None, stop: int | None, value: Tensor) -> None:
    to[start:stop] = value


def put_rows(to: Tensor, start: int | None, stop: int | None, value: Tensor) -> Tensor:
    """Returns a copy of `to` in which `value` replaces the rows from `start` to `stop`.

    If `start > stop`, the copy has another shape than `to`.
    """
    after = [] if stop is None else [to[stop:]]
    # `to` is always an operand, because it gets a gradient of zeros if all its rows are replaced.
    return torch.cat([to[: start or 0], value.expand_as(to[start:stop]), *after])


def _puts_rows(to: Tensor, index: Any, value: Any) -> bool:
    """Returns whether ``put_rows_`` with the bounds of `index` can replace this assignment."""
    if not isinstance(index, slice) or index.step is not None or not isinstance(value, Tensor):
        return False
    are_numbers = not any(isinstance(bound, Tensor) for bound in (index.start, index.stop))
    return are_numbers and to.dim() > 0 and value.dtype == to.dtype and value.dim() <= to.dim()


def _puts_by_index(args: Sequence[Any]) -> bool:
    """Returns whether `index_put_` with one index or mask can replace this assignment.

    `args`: the three parts of the assignment ``args[0][args[1]] = args[2]``.
    """
    to, index, value = args
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if not isinstance(index, Tensor) or not isinstance(value, Tensor):
        return False
    taken = index.dim() if index.dtype in MASKS else 1
    given = 1 if index.dtype in MASKS else index.dim()
    return bool(value.dtype == to.dtype) and value.dim() <= to.dim() - taken + given


def _fills_by_mask(to: Tensor, index: Any, value: Any) -> bool:
    """Returns whether ``to.masked_fill_(index, value)`` can replace ``to[index] = value``."""
    if not isinstance(index, Tensor) or index.dtype is not torch.bool:
        return False
    is_exact = isinstance(value, int) or (isinstance(value, float) and to.is_floating_point())
    return is_exact and index.shape == to.shape


def _mask_of_rows(index: Any) -> tuple[int, Tensor] | None:
    """Returns the dimension and the mask if an index is a mask over one dimension: `x[:, mask]`."""
    indices = index if isinstance(index, tuple) else (index,)
    masks = [(d, i) for d, i in enumerate(indices) if isinstance(i, Tensor)]
    if len(masks) != 1 or not all(isinstance(i, Tensor) or _is_whole(i) for i in indices):
        return None
    is_mask = masks[0][1].dtype is torch.bool and masks[0][1].dim() == 1
    return masks[0] if is_mask else None


def _is_whole(index: Any) -> bool:
    """Returns whether an index is `:`."""
    return isinstance(index, slice) and index.start is index.stop is index.step is None


def rows_of(mask: Tensor) -> Tensor:
    """Returns the indices of a mask's true elements. Shape: ``[number of true elements]``."""
    return mask.nonzero().view(-1)
