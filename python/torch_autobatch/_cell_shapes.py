"""Finds the origins of the sizes of results in the trace of a dynamic cell.

If the size of a result is known to be the size of an argument, the program uses the argument's
size. Conditions on this size can then be checked before the first op, and calls with the same sizes
can be recognized as equal. Otherwise the program reads the size from the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torch_autobatch._cell_ops import is_pointwise
from torch_autobatch._cell_sizes import is_traced

# Ops whose result has the sizes of the first argument.
_LIKE_FIRST = frozenset(
    (
        *("dropout", "layer_norm", "rms_norm", "group_norm", "batch_norm", "softmax"),
        *("log_softmax", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_fill"),
        *("index_copy", "cumsum", "clone", "contiguous", "detach", "to", "float", "double"),
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
        *("triu", "tril", "flip", "roll"),
    )
)
_FACTORIES = ("zeros", "ones", "empty", "full", "rand", "randn")
_NEW = ("new_zeros", "new_ones", "new_empty", "new_full")


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a tensor in one dimension, which the program has not read yet."""

    variable: str
    dim: int
    value: int


# For each dimension: a traced number, a `Size`, an int that is equal in all calls, or None if
# unknown.
Sizes = Sequence[Any]
Given = dict[str, Any]


class Origins:
    """The origins of sizes. `name_of` returns the variable of a tensor."""

    def __init__(self, name_of: Callable[[Any], str]) -> None:
        self._name_of = name_of
        self._known: dict[tuple[str, int], Any] = {}

    def find(self, size: Size) -> Any:
        """Returns the program's number for a size, or the `Size` that the program must read."""
        known = self._known.get((size.variable, size.dim))
        if known is None:
            return size
        return self.find(known) if isinstance(known, Size) else known

    def set(self, size: Size, number: Any) -> None:
        self._known[size.variable, size.dim] = number

    def clear(self) -> None:
        self._known.clear()

    def add(
        self, target: str, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Records the origins of the sizes of a call's result, if the result is a tensor."""
        if not isinstance(result, Tensor):
            return
        sizes = self._sizes(name, args, kwargs, result)
        if len(sizes) != result.dim():
            return
        for dim, size in enumerate(sizes):
            value = size.value if is_traced(size) or isinstance(size, Size) else size
            if value == result.shape[dim]:
                self._known[target, dim] = size

    def _sizes(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor
    ) -> Sizes:
        if name in _FACTORIES or name in _NEW:
            given = args[1:] if name in _NEW else args
            sizes = given[0] if given and isinstance(given[0], (tuple, list)) else given
            return tuple(sizes)
        if not args or not isinstance(args[0], Tensor):
            return ()
        first = self._of(args[0])
        is_in_place = name.endswith("_") and not name.endswith("__")
        if name in _LIKE_FIRST or is_in_place:
            return first
        if is_pointwise(name):
            return self._broadcast([*args, *kwargs.values()], result)
        rule = _RULES.get(name)
        return () if rule is None else rule(self, first, args, kwargs)

    def _of(self, tensor: Tensor) -> list[Any]:
        name = self._name_of(tensor)
        if name[0] == "k":  # the tensor is a constant
            return list(tensor.shape)
        return [self.find(Size(name, dim, size)) for dim, size in enumerate(tensor.shape)]

    def _broadcast(self, values: Sequence[Any], result: Tensor) -> Sizes:
        tensors = [value for value in values if isinstance(value, Tensor)]
        sizes: list[Any] = []
        for dim in range(-result.dim(), 0):
            found = {_key(self._of(t)[dim]): self._of(t)[dim] for t in tensors if t.dim() >= -dim}
            if len(found) > 1:
                found.pop(1, None)
            sizes.append(next(iter(found.values())) if len(found) == 1 else None)
        return sizes

    def _linear(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        return [*first[:-1], self._of(args[1])[0] if len(args) > 1 else None]

    def _conv(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        """Takes the number of channels from the kernel, and unchanged lengths from the input."""
        if len(args) < 2 or len(first) != args[1].dim():
            return ()
        given = dict(zip(("stride", "padding", "dilation"), args[3:6], strict=False)) | kwargs
        stride, padding, dilation = (
            _each(given.get(name, default), len(first) - 2)
            for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        reach = [d * (k - 1) for d, k in zip(dilation, args[1].shape[2:], strict=True)]
        keeps = [
            s == 1 and (p == "same" or (type(p) is int and 2 * p == r))
            for s, p, r in zip(stride, padding, reach, strict=True)
        ]
        lengths = [size if kept else None for size, kept in zip(first[2:], keeps, strict=True)]
        return [first[0], self._of(args[1])[0], *lengths]

    def _embedding(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        return [*first, self._of(args[1])[-1] if len(args) > 1 else None]

    def _reduce_last(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        is_last = dims in (-1, [-1], (-1,)) and not len(args) > 2
        if not is_last:
            return ()
        return [*first[:-1], 1] if kwargs.get("keepdim") else first[:-1]

    def _attention(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        if len(args) < 3:
            return ()
        others = [self._of(tensor) for tensor in args[1:3]]
        batch = len(first) - (3 if kwargs.get("enable_gqa") else 2)  # number of leading dimensions
        same = all([*map(_key, o[:batch])] == [*map(_key, first[:batch])] for o in others)
        return [*first[:-1], others[1][-1]] if same and batch >= 0 else ()

    def _gather(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        index = args[2] if len(args) > 2 else kwargs.get("index")
        return self._of(index) if isinstance(index, Tensor) else ()

    def _index_select(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        if len(args) < 3 or not first:
            return ()
        sizes = list(first)
        sizes[int(args[1])] = (self._of(args[2]) or [None])[0]
        return sizes

    def _expand_as(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        return self._of(args[1]) if len(args) > 1 else ()

    def _view(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        sizes = args[1] if len(args) > 1 and isinstance(args[1], (tuple, list)) else args[1:]
        return [_rest(first, sizes) if type(s) is int and s < 0 else s for s in sizes]

    def _expand(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        sizes = args[1] if len(args) > 1 and isinstance(args[1], (tuple, list)) else args[1:]
        kept = [*[None] * (len(sizes) - len(first)), *first]
        pairs = zip(kept, sizes, strict=True)
        return [old if type(new) is int and new < 0 else new for old, new in pairs]

    def _transpose(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        if len(args) < 3 or not first:
            return ()
        sizes = list(first)
        a, b = int(args[1]), int(args[2])
        sizes[a], sizes[b] = sizes[b], sizes[a]
        return sizes

    def _unsqueeze(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        if len(args) < 2:
            return ()
        sizes = list(first)
        dim = int(args[1])
        sizes.insert(dim if dim >= 0 else dim + len(first) + 1, 1)
        return sizes

    def _select(self, first: Sizes, args: Sequence[Any], kwargs: Given) -> Sizes:
        return first[1:] if args[1:2] == (0,) else ()


def _each(value: Any, dims: int) -> Sequence[Any]:
    """Returns a list with one value for each dimension. `value` may be one number for all."""
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    return values if len(values) == dims else values[:1] * dims


def _rest(first: Sizes, sizes: Sequence[Any]) -> Any:
    """Returns the size that -1 in `sizes` means for an input of sizes `first`; None: unknown."""
    numbers = [math.prod(s for s in of if type(s) is int and s >= 0) for of in (first, sizes)]
    left = [size for size in first if type(size) is not int]
    for size in sizes:
        if type(size) is int:
            continue
        found = next((i for i, other in enumerate(left) if _key(other) == _key(size)), None)
        if found is None:
            return None
        del left[found]
    is_exact = 0 not in numbers and numbers[0] % numbers[1] == 0
    if not left and is_exact:
        return numbers[0] // numbers[1]
    return left[0] if len(left) == 1 and numbers[0] == numbers[1] else None


def _key(size: Any) -> Any:
    return size.name if is_traced(size) else size


_RULES: dict[str, Callable[[Origins, Sizes, Sequence[Any], Given], Sizes]] = {
    "conv1d": Origins._conv,
    "conv2d": Origins._conv,
    "conv3d": Origins._conv,
    "linear": Origins._linear,
    "embedding": Origins._embedding,
    "gather": Origins._gather,
    "scaled_dot_product_attention": Origins._attention,
    "mean": Origins._reduce_last,
    "sum": Origins._reduce_last,
    "expand": Origins._expand,
    "index_select": Origins._index_select,
    "expand_as": Origins._expand_as,
    "view": Origins._view,
    "reshape": Origins._view,
    "transpose": Origins._transpose,
    "unsqueeze": Origins._unsqueeze,
    "select": Origins._select,
}
