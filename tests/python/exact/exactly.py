"""Runs a program eagerly and in blocks, and compares everything that a user can observe."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _C

DOUBLE = torch.float64
LENGTHS = (2, 3, 1, 2)  # the rows of each instance

TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


class Blocks:
    """Opens the blocks of a program, and keeps their scopes for the reports."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scopes: list[ab.batch] = []

    def __call__(self, **options: Any) -> ab.batch:
        self.scopes.append(ab.batch(enabled=self.enabled, **options))
        return self.scopes[-1]


Program = Callable[[Blocks], Any]


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def outcome(program: Program, enabled: bool) -> tuple[Any, list[ab.batch]]:
    """Returns what the program returned, or the exception that it raised, and its scopes."""
    seed()
    blocks = Blocks(enabled)
    try:
        return program(blocks), blocks.scopes
    except Exception as error:
        return error, blocks.scopes


def same(
    program: Program, *, raises: type[Exception] | None = None, tolerance: float = 0.0
) -> ab.Report:
    """Checks that a program behaves the same with blocks; returns the report of the last block.

    The program returns everything to compare: tensors, numbers and strings, nested in containers.
    If ``raises`` is given, the program must raise this exception eagerly and in blocks.
    ``tolerance`` is relative to the largest value. It is for values that were computed at a lower
    precision than their dtype has.
    """
    expected, _ = outcome(program, False)
    if isinstance(expected, Exception) and not (raises and isinstance(expected, raises)):
        raise expected  # a mistake in the test
    assert raises is None or isinstance(expected, Exception), "eager raised nothing"
    result, scopes = outcome(program, True)
    if isinstance(result, Exception) and not isinstance(expected, Exception):
        raise result
    compare("result", result, expected, tolerance)
    assert aliases(result) == aliases(expected), "other tensors share memory than in eager"
    return scopes[-1].report()


# --- comparing ---


def compare(what: str, result: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Fails if the two differ in anything that a user can observe."""
    if isinstance(expected, Exception):
        compare_errors(what, result, expected)
    elif isinstance(expected, Tensor):
        compare_tensors(what, result, expected, tolerance)
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-9, err_msg=what)
        assert result.dtype == expected.dtype, what
    elif isinstance(expected, dict):
        assert list(result) == list(expected), what
        for key in expected:
            compare(f"{what}[{key!r}]", result[key], expected[key], tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(result) == len(expected), f"{what}: {len(result)}, eager has {len(expected)}"
        for i, (r, e) in enumerate(zip(result, expected, strict=True)):
            compare(f"{what}[{i}]", r, e, tolerance)
    elif isinstance(expected, float):
        assert type(result) is float, what
        np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-9, err_msg=what)
    else:
        assert type(result) is type(expected), f"{what}: {result!r}, eager has {expected!r}"
        assert result == expected, f"{what}: {result!r}, eager has {expected!r}"


def compare_errors(what: str, result: Any, expected: Exception) -> None:
    """Fails if the types differ, or if our message lacks the first words of eager's message."""
    assert type(result) is type(expected), f"{what}: {result!r}, eager raises {expected!r}"
    words = str(expected).split("\n", maxsplit=1)[0][:50]
    assert words in str(result), f"{what}: {result}\n\neager: {expected}"


def metadata(t: Tensor) -> dict[str, Any]:
    """Returns the metadata of a tensor, which does not depend on its values."""
    known: dict[str, Any] = {
        "type": type(t),
        "dtype": t.dtype,
        "layout": t.layout,
        "device": t.device,
        "requires_grad": t.requires_grad,
        "is_leaf": t.is_leaf,
        "has a grad_fn": t.grad_fn is not None,
        "is_inference": t.is_inference(),
        "is_conj": t.is_conj(),
        "is_neg": t.is_neg(),
    }
    if not t.is_nested:
        known["shape"] = tuple(t.shape)
    if t.layout is torch.strided and not t.is_nested and t.numel() > 0:
        pairs = zip(t.shape, t.stride(), strict=True)
        known["strides"] = [stride for size, stride in pairs if size > 1]
    return known


def plain(t: Tensor) -> Tensor:
    """Returns the values of a tensor of any kind as an ordinary tensor."""
    t = t.detach()
    if t.is_nested:
        return torch.cat([part.reshape(-1) for part in t.unbind()])
    if t.layout is not torch.strided:
        return t.to_dense()
    if t.is_quantized:
        return t.dequantize()
    return t.as_subclass(Tensor).resolve_conj().resolve_neg()


def compare_tensors(what: str, result: Any, expected: Tensor, tolerance: float) -> None:
    """Compares values, metadata, autograd's flags, and the gradient if there is one."""
    assert isinstance(result, Tensor), f"{what}: {result!r}, eager has a tensor"
    ours, eagers = metadata(result), metadata(expected)
    differing = {
        key: (ours.get(key), eagers[key]) for key in eagers if ours.get(key) != eagers[key]
    }
    assert not differing, f"{what}: ours and eager's {differing}"
    if expected.is_meta:
        return
    value, other = plain(result), plain(expected)
    allowed = max(TOLERANCE.get(other.dtype, 0.0), tolerance)
    numbers = other if other.is_floating_point() or other.is_complex() else other.to(DOUBLE)
    finite = numbers[numbers.isfinite()].abs().to(DOUBLE)
    torch.testing.assert_close(
        value,
        other,
        rtol=allowed,
        atol=allowed * max(1.0, finite.max().item() if finite.numel() else 0.0),
        equal_nan=True,
        msg=lambda message: f"{what}: {message}",
    )
    if expected.is_leaf or expected.retains_grad:
        if expected.grad is None:
            assert result.grad is None, f"{what}: a gradient where eager has none"
        else:
            compare_tensors(f"{what}.grad", result.grad, expected.grad, tolerance)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yields all tensors in nested lists, tuples and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)


def aliases(value: Any) -> list[int]:
    """Returns, for each tensor with memory, the first tensor with the same storage."""
    seen: dict[int, int] = {}
    result = []
    for i, t in enumerate(tensors(value)):
        dense = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_nested
        if dense and not t.is_meta and t.numel() > 0:
            result.append(seen.setdefault(t.untyped_storage().data_ptr(), i))
    return result


# --- material for programs ---


def rand(*sizes: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(sizes, dtype=dtype)


def weight(*sizes: int, dtype: torch.dtype = DOUBLE) -> nn.Parameter:
    return nn.Parameter(rand(*(sizes or (3, 3)), dtype=dtype))


def inputs(lengths: Sequence[int] = LENGTHS, width: int = 3) -> list[Tensor]:
    """Returns the rows of each instance."""
    return [rand(n, width) for n in lengths]


def differentiate(*values: Any) -> None:
    """Runs backward of all tensors that require grad, with a different weight for each element."""
    roots = [t for t in tensors(values) if t.requires_grad]
    gradients = [torch.linspace(1, 2, t.numel()).view(t.shape).to(t) for t in roots]
    if roots:
        torch.autograd.backward(roots, gradients)


def each(case: Callable[[Tensor], Any], lengths: Sequence[int] = LENGTHS) -> Program:
    """Returns a program that applies ``case`` to a pending tensor per instance. Runs backward."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs(lengths)
        with block():
            results = [case(F.linear(x, w) * 2) for x in xs]
        differentiate(results)
        return results, w

    return program


def is_pending(t: Tensor) -> bool:
    return _C.capture_key in str(torch._C._dispatch_keys(t))


def assert_deferred(report: ab.Report, batches: int | None = None) -> None:
    """Asserts that all ops ran at the block's end, in at most this number of batches."""
    early = sorted({f.reason for f in report.flushes[:-1]})
    assert not early, f"{len(report.flushes)} flushes: {early}"
    assert report.flushes[-1].reason.startswith("the end of the block")
    assert report.nodes > 0
    if batches is not None:
        assert report.batches <= batches, str(report)


def line() -> int:
    """Returns the line number of the caller."""
    return sys._getframe(1).f_lineno
