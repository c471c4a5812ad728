"""What the names of PyTorch's functions tell of them, for the traces of dynamic cells."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

_OPERATORS = re.compile(
    "__r?(add|sub|mul|truediv|floordiv|mod|pow|matmul|neg|abs|invert|and|or|xor|eq|ne|lt|le|gt|ge)__"
)
_ARITHMETIC_IN_PLACE = re.compile("(add|sub|mul|div)_|__i(add|sub|mul|truediv)__")
_MASKS = (torch.bool, torch.uint8)
_MATMUL = ("__matmul__", "__rmatmul__")
# Not all schemas tell that an op draws random numbers or keeps statistics.
_IMPURE = re.compile(
    ".*(dropout|rand|bernoulli|normal_|multinomial|poisson|batch_norm|instance_norm).*"
)


def name_of(function: Any) -> str:
    """That of PyTorch's own methods and functions; of any other one a name that nothing knows.

    ``__get__T`` and ``__set__data`` are those of attributes.
    """
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return str(function)
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        function = function.__self__
        name += getattr(function, "__name__", "")
    owner = getattr(function, "__objclass__", None)
    module = str(getattr(function, "__module__", None) or getattr(owner, "__module__", ""))
    return str(name) if module.partition(".")[0] == "torch" else f"{module}.{name}"


def may_write(function: Any) -> bool:
    """Whether an op that is called by ``torch.ops`` writes to its arguments."""
    if isinstance(function, OpOverloadPacket):
        return any(op._schema.is_mutable for op in _all_overloads(function) if "out" not in str(op))
    return isinstance(function, OpOverload) and function._schema.is_mutable


def _all_overloads(packet: OpOverloadPacket) -> Iterable[OpOverload]:
    return (getattr(packet, name) for name in packet._overload_names)


@functools.cache
def _aten(name: str) -> tuple[OpOverload, ...]:
    packet = getattr(torch.ops.aten, name, None)
    found = _all_overloads(packet) if isinstance(packet, OpOverloadPacket) else ()
    return tuple(op for op in found if "aten::" in op._schema.name)


def _overloads(name: str) -> list[OpOverload]:
    """Those that write to nothing."""
    return [op for op in _aten(name) if not op._schema.is_mutable]


def _takes_tensor(op: OpOverload) -> bool:
    return any(str(argument.type) == "Tensor" for argument in op._schema.arguments)


def makes_memory(name: str, args: Sequence[Any]) -> bool:
    """Whether results have memory of their own."""
    if name == "__getitem__" and len(args) == 2:
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(index, (torch.Tensor, list)) for index in indices)
    return _makes_memory(name)


@functools.cache
def _makes_memory(name: str) -> bool:
    if _OPERATORS.fullmatch(name):
        return True
    returned = [r for op in _overloads(name) for r in op._schema.returns]
    return bool(returned) and all(r.alias_info is None for r in returned)


@functools.cache
def is_pointwise(name: str) -> bool:
    """Whether the result has the sizes that the tensors among the arguments broadcast to."""
    if _OPERATORS.fullmatch(name):
        return name not in _MATMUL
    of_tensors = [op for op in _overloads(name) if _takes_tensor(op)]  # `add` joins lists too
    return bool(of_tensors) and all(torch.Tag.pointwise in op.tags for op in of_tensors)


@functools.cache
def is_pure(name: str) -> bool:
    """Whether two calls with the same arguments give the same, and do nothing else."""
    if _OPERATORS.fullmatch(name) or name == "__getitem__":
        return True
    if name.startswith("__get__"):
        return name in ("__get__T", "__get__mT")
    overloads = [] if _IMPURE.fullmatch(name) else _overloads(name)
    return bool(overloads) and not any(
        torch.Tag.nondeterministic_seeded in op.tags for op in overloads
    )


@functools.cache
def changes_shape(name: str) -> bool:
    """Whether the call gives its argument another shape in place: ``t_``, ``unsqueeze_``."""
    return any(torch.Tag.inplace_view in op.tags for op in _aten(name))


def keeps_type(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether arithmetic in place gives the type that it would give otherwise."""
    if _ARITHMETIC_IN_PLACE.fullmatch(name) is None or kwargs.get("out") is not None:
        return False
    numbers = [*args[:2], *kwargs.values()]
    if not all(isinstance(value, (torch.Tensor, int, float)) for value in numbers):
        return False
    return len(args) > 1 and bool(torch.result_type(args[0], args[1]) == args[0].dtype)


def puts_by_index(args: Sequence[Any]) -> bool:
    """Whether `args[0][args[1]] = args[2]` is what `index_put_` does with one index or mask."""
    to, index, value = args
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if not isinstance(index, torch.Tensor) or not isinstance(value, torch.Tensor):
        return False
    taken = index.dim() if index.dtype in _MASKS else 1
    given = 1 if index.dtype in _MASKS else index.dim()
    return bool(value.dtype == to.dtype) and value.dim() <= to.dim() - taken + given


def selects_by_values(name: str, args: Sequence[Any]) -> bool:
    """Whether values say which elements the call takes or writes: `x[mask]`."""
    if name not in ("__getitem__", "index_put_"):
        return name in ("masked_select", "nonzero", "argwhere", "repeat_interleave", "unique")
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, torch.Tensor) and i.dtype in _MASKS for i in indices)


def gives_its_argument(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call does nothing, on tensors of any sizes: dropout that is off."""
    if "dropout" not in name or not args:
        return False
    p = args[1] if len(args) > 1 else kwargs.get("p")
    trains = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train"))
    return trains is False or (type(p) in (int, float) and p == 0)
