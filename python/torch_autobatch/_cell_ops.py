"""Properties of PyTorch's functions, by name, for the traces of dynamic cells."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

_OPERATORS = re.compile(
    "__r?(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|neg|abs|invert|and|or|xor|lshift|rshift|"
    "eq|ne|lt|le|gt|ge)__"
)
# Ops that call other ops, and return neither an argument nor a view of an argument.
_COPYING = frozenset(
    (
        *("matmul", "linear", "bilinear", "layer_norm", "group_norm", "rms_norm", "batch_norm"),
        *("softmax", "log_softmax", "scaled_dot_product_attention", "dropout", "embedding_bag"),
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"),
        *("one_hot", "take_along_dim", "hstack", "vstack", "dstack", "stack", "kron", "pad"),
        *("cosine_similarity", "pairwise_distance", "cross_entropy_loss", "nll_loss_nd"),
        *("binary_cross_entropy_with_logits", "kl_div", "l1_loss", "gru_cell", "lstm_cell"),
        *("max_pool1d", "max_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "std", "var"),
        *("diff", "cov", "corrcoef", "trapezoid", "logdet", "pinverse", "matrix_power", "norm"),
        *("repeat_interleave", "nanmean", "quantile", "argsort"),
    )
)
_ARITHMETIC_IN_PLACE = re.compile("(add|sub|mul|div)_|__i(add|sub|mul|truediv)__")
MASKS = (torch.bool, torch.uint8)
_MATMUL = ("__matmul__", "__rmatmul__")
_RANDOM = re.compile("(?!un).*(dropout|rand|bernoulli|normal_|multinomial|poisson).*")
# The out-of-place forms of these ops return row-major results. The in-place forms keep the strides
# of the argument.
ROW_MAJOR = frozenset(
    (
        *("scatter_", "scatter_add_", "scatter_reduce_", "index_add_", "index_copy_"),
        *("masked_fill_", "put_rows_"),
    )
)
# Ops that draw random numbers or keep statistics. Not all schemas declare this.
_IMPURE = re.compile(
    ".*(dropout|rand|bernoulli|normal_|multinomial|poisson|batch_norm|instance_norm).*"
)


def name_of(function: Any) -> str:
    """Returns the name of a method or function of PyTorch.

    If the function does not belong to PyTorch, its name starts with its module, so that no table
    contains the name. Attributes have names such as ``__get__T`` and ``__set__data``.
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
    """Returns whether an op that is called through ``torch.ops`` writes to its arguments."""
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
    """Returns the overloads of an op that do not write to an argument.

    Excludes the overloads for named tensors in PyTorch 2.11 (``sum.dim_DimnameList``), because they
    call the other overloads.
    """
    return [op for op in _aten(name) if not op._schema.is_mutable and not _takes_names(op)]


def _takes_names(op: OpOverload) -> bool:
    return "name" in op._schema.overload_name.lower()


def _takes_tensor(op: OpOverload) -> bool:
    return any(str(argument.type) == "Tensor" for argument in op._schema.arguments)


def makes_memory(name: str, args: Sequence[Any]) -> bool:
    """Returns whether no result shares memory with an argument."""
    if name == "__getitem__" and len(args) == 2:
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(map(_takes_elements, indices))
    return _makes_memory(name)


def _takes_elements(index: Any) -> bool:
    """Returns whether indexing copies elements (the index is a list, a mask or a tensor).

    Indexing with a number returns a view instead.
    """
    if isinstance(index, torch.Tensor):
        return index.dim() > 0 or index.dtype in MASKS
    return isinstance(index, list)


@functools.cache
def _makes_memory(name: str) -> bool:
    if _OPERATORS.fullmatch(name) or is_pointwise(name):
        return True
    returned = [r for op in _overloads(name) for r in op._schema.returns]
    if not returned or any(r.alias_info is not None for r in returned):
        return False
    # The schema of an op that calls other ops does not declare aliases. For example, `einsum` may
    # return a view.
    return name in _COPYING or not any(map(_calls_others, _overloads(name)))


def _calls_others(op: OpOverload) -> bool:
    overload = op._schema.overload_name
    name = f"{op._schema.name}.{overload}" if overload else op._schema.name
    key = "CompositeImplicitAutograd"
    if not torch._C._dispatch_has_kernel(name):  # the dispatcher does not know this op
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


@functools.cache
def is_pointwise(name: str) -> bool:
    """Returns whether the result has the sizes to which the tensor arguments broadcast."""
    if _OPERATORS.fullmatch(name):
        return name not in _MATMUL
    of_tensors = [op for op in _overloads(name) if _takes_tensor(op)]  # `add` also accepts lists
    return bool(of_tensors) and all(torch.Tag.pointwise in op.tags for op in of_tensors)


@functools.cache
def is_pure(name: str) -> bool:
    """Returns whether calls with equal arguments return equal results and have no side effects."""
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
    """Returns whether the call changes the shape of its argument: ``t_``, ``unsqueeze_``."""
    return any(torch.Tag.inplace_view in op.tags for op in _aten(name))


def draws(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call draws random numbers."""
    if name == "scaled_dot_product_attention":
        dropout = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0)
        return not (isinstance(dropout, (int, float)) and dropout == 0)
    overloads = _aten(name)
    return any(torch.Tag.nondeterministic_seeded in op.tags for op in overloads) or bool(
        _RANDOM.fullmatch(name)
    )


def keeps_type(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether an in-place op and its out-of-place form give the same dtype and strides."""
    if name in ROW_MAJOR:
        return bool(args[0].is_contiguous())
    if _ARITHMETIC_IN_PLACE.fullmatch(name) is None or kwargs.get("out") is not None:
        return False
    numbers = [*args[:2], *kwargs.values()]
    if not all(isinstance(value, (torch.Tensor, int, float)) for value in numbers):
        return False
    return len(args) > 1 and bool(torch.result_type(args[0], args[1]) == args[0].dtype)


def selects_by_values(name: str, args: Sequence[Any]) -> bool:
    """Returns whether values determine which elements the call reads or writes: `x[mask]`."""
    if name not in ("__getitem__", "index_put_"):
        return name in ("masked_select", "nonzero", "argwhere", "repeat_interleave", "unique")
    indices = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(i, torch.Tensor) and i.dtype in MASKS for i in indices)


def gives_its_argument(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Returns whether the call returns its argument unchanged for all sizes (disabled dropout)."""
    if "dropout" not in name or not args:
        return False
    p = args[1] if len(args) > 1 else kwargs.get("p")
    trains = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train"))
    return trains is False or (type(p) in (int, float) and p == 0)


def draws_elsewhere(constant: Any) -> bool:
    """Returns whether random numbers may come from a generator other than the CPU's default."""
    is_elsewhere = isinstance(constant, torch.Tensor) and constant.device.type != "cpu"
    return is_elsewhere or isinstance(constant, torch.Generator)


_IN_PLACE = re.compile(
    "__(setitem|i(add|sub|mul|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift))__"
)


def is_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether the call writes to its first argument or to ``out``."""
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        return True
    return bool(_IN_PLACE.fullmatch(name)) or (name.endswith("_") and not name.endswith("__"))


def keeps_statistics(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the call is a normalization that updates running statistics."""
    if name not in ("batch_norm", "instance_norm"):
        return False
    trains = args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))
    return trains is not False


def tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def has_tensors(value: Any) -> bool:
    """Whether the result of a call is a tensor or contains one."""
    if isinstance(value, (tuple, list)):
        return any(has_tensors(item) for item in value)
    return isinstance(value, Tensor)


def reads_values(name: str) -> str:
    """Returns the reason why a function with this call is not replayed."""
    return f"{name.removeprefix('__get__')} reads values"
