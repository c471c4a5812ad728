"""Compares results of ops with the results of eager execution."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

TOLERANCE = {  # relative to the largest expected magnitude
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 4e-2,
}


class Different(Exception):  # noqa: N818
    """A result differs from eager's. The message describes the difference."""


def tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def same_metadata(got: Tensor, expected: Tensor, strides: bool) -> None:
    for what in ("shape", "dtype", "layout", "device", "requires_grad"):
        a, b = getattr(got, what), getattr(expected, what)
        if a != b:
            raise Different(f"{what} {a}, eager has {b}")
    if strides and expected.layout == torch.strided and expected.numel() > 0:
        a, b = (
            [s for s, size in zip(x.stride(), x.shape, strict=True) if size > 1]
            for x in (got, expected)
        )
        if a != b:
            raise Different(f"strides {got.stride()}, eager has {expected.stride()}")


def same_values(
    got: Tensor, expected: Tensor, dtype: torch.dtype, least: float = 1e-30, slack: float = 1
) -> None:
    """Raises Different if values differ by more than rounding.

    Differences are relative to the largest expected magnitude, or to `least` if it is larger.
    `slack` is a factor for the tolerance.
    """
    if expected.layout != torch.strided:
        got, expected = got.to_dense(), expected.to_dense()
    if expected.is_complex() and expected.element_size() == 4:  # complex numbers of 16-bit floats
        got, expected = got.to(torch.complex64), expected.to(torch.complex64)
    got, expected = got.detach().resolve_conj(), expected.detach().resolve_conj()
    if expected.is_quantized:
        got, expected = got.dequantize(), expected.dequantize()
    if expected.dtype not in TOLERANCE:
        if not torch.equal(got, expected):
            raise Different(f"values differ: {describe(got)}, eager has {describe(expected)}")
        return
    tolerance = slack * max(TOLERANCE[expected.dtype], TOLERANCE.get(dtype, 0))
    finite = expected[expected.isfinite()].abs()
    scale = max(finite.max().item(), least) if finite.numel() else 1.0
    if torch.allclose(got, expected, rtol=0, atol=tolerance * scale, equal_nan=True):
        return
    difference = (got - expected).abs().nan_to_num(0, 0, 0).max().item()
    raise Different(
        f"values differ by {difference / scale:.1e}: {describe(got)}, eager: {describe(expected)}"
    )


def describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.flatten()[:4].tolist())[:60]}"


def same(got: Any, expected: Any, dtype: torch.dtype, values: bool = True) -> None:
    ours, theirs = tree_leaves(got), tree_leaves(expected)
    if type(got) is not type(expected) or len(ours) != len(theirs):
        raise Different(f"{type(got)} of {len(ours)}, eager has {type(expected)} of {len(theirs)}")
    for a, b in zip(ours, theirs, strict=True):
        if type(a) is not type(b):
            raise Different(f"{type(a)}, eager has {type(b)}")
        if isinstance(b, Tensor):
            same_metadata(a, b, strides=True)
            if values:
                same_values(a, b, dtype)
        elif a != b and values and not (a != a and b != b):
            raise Different(f"{a}, eager has {b}")


def aliases(results: Any, inputs: Any) -> list[bool]:
    """Returns for each pair of a result and an input whether they share memory."""

    def memory(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0

    return [
        memory(x) == memory(y) != 0 and x.numel() > 0
        for x in tensors(results)
        for y in tensors(inputs)
    ]


def same_gradients(
    got: list[Tensor | None], expected: list[Tensor | None], dtype: torch.dtype, slack: float
) -> None:
    """Raises Different if gradients differ by more than rounding.

    Differences are relative to the largest gradient, or to 1 if the largest gradient is smaller.
    The root gradients have magnitudes of about 1, and their sums may cancel.
    """
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if (a is None) != (b is None):
            raise Different(f"gradient {i} is {a if a is None else describe(a)}, eager's is {b}")
        if a is not None and b is not None:
            try:
                same_metadata(a, b, strides=False)
                same_values(a, b, dtype, least=1, slack=slack)
            except Different as error:
                raise Different(f"gradient {i}: {error}") from None


def same_distribution(got: Tensor, expected: Tensor) -> None:
    """Raises Different if the two samples have different distributions.

    Uses the Kolmogorov-Smirnov test, which limits the largest distance between the two empirical
    distribution functions.
    """
    if got.numel() != expected.numel():
        raise Different(f"{got.numel()} numbers, eager draws {expected.numel()}")
    n = got.numel()
    if n == 0:
        return
    at = torch.cat([got, expected]).sort().values
    below = [torch.searchsorted(x.sort().values, at, right=True) / n for x in (got, expected)]
    distance = (below[0] - below[1]).abs().max().item()
    # Whole channels may share one draw, so there are fewer draws than numbers.
    if distance > 4 / math.sqrt(n / 2) and distance > 0.1:
        raise Different(f"another distribution: distance {distance:.2f} of {n} numbers")
