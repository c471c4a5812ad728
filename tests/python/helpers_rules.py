"""Code that the tests of rules share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}


DOUBLE = torch.float64


def rand(*sizes: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(sizes, dtype=dtype)


def tensors_of(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in tensors_of(v)]


def assert_same(what: str, value: Tensor | None, expected: Tensor | None) -> None:
    assert (value is None) == (expected is None), f"{what}: {value}, eager has {expected}"
    if value is None or expected is None:
        return
    assert value.dtype == expected.dtype, f"{what}: {value.dtype}, eager has {expected.dtype}"
    assert value.layout == expected.layout, f"{what}: {value.layout}, eager has {expected.layout}"
    value, expected = value.detach().to_dense(), expected.detach().to_dense()
    exact = not (expected.is_floating_point() or expected.is_complex())
    finite = expected[expected.isfinite()]
    largest = 1.0 if exact or finite.numel() == 0 else max(finite.abs().max().item(), 1.0)
    tolerance = 0 if exact else RELATIVE.get(expected.dtype, 1e-2)
    torch.testing.assert_close(
        value,
        expected,
        rtol=tolerance,
        atol=tolerance * largest,
        equal_nan=True,
        msg=lambda message: f"{what}: {message}",
    )


def gradient_or_error(loss: Tensor, leaf: Tensor) -> Any:
    """Runs backward. Returns the gradient of the leaf, or the error."""
    try:
        loss.backward()
    except (RuntimeError, TypeError, ZeroDivisionError) as error:
        return type(error), str(error)[:60]
    return leaf.grad


def assert_same_outcome(outcome: Callable[[bool], Any]) -> Any:
    """Compares outcome(True), which batches, with outcome(False). Returns the second one."""
    ours, eagers = outcome(True), outcome(False)
    if isinstance(eagers, Tensor):
        assert_same("gradient", ours, eagers)
    else:
        assert ours == eagers
    return eagers


def run(
    function: Callable[..., Any],
    instances: Sequence[Any],
    parameters: Sequence[Tensor],
    enabled: bool,
) -> tuple[list[Tensor], list[Tensor | None], ab.Report]:
    def fresh(value: Any, grad: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        differentiable = value.is_floating_point() or value.is_complex()
        return value.detach().clone().requires_grad_(grad and differentiable)

    torch.manual_seed(0)
    leaves = [fresh(p, True) for p in parameters]
    inputs = [[fresh(v, True) for v in (x if isinstance(x, tuple) else (x,))] for x in instances]
    with ab.batch(enabled=enabled) as scope:
        results = [function(*leaves, *x) for x in inputs]
    flat = tensors_of(results)
    total = torch.zeros((), dtype=DOUBLE)
    for i, r in enumerate(flat):
        if r.requires_grad:  # a different weight for each element
            real = torch.view_as_real(r.resolve_conj()) if r.is_complex() else r
            weights = torch.arange(1, real.numel() + 1, dtype=DOUBLE).view(real.shape) / (i + 2)
            total = total + (real.double() * weights).sum()
    if total.requires_grad:
        total.backward()
    wanted = leaves + [v for x in inputs for v in x if isinstance(v, Tensor)]
    return flat, [v.grad for v in wanted], scope.report()


def check(
    function: Callable[..., Any], *instances: Any, parameters: Sequence[Tensor] = ()
) -> ab.Report:
    """Asserts that ``function(*parameters, *instance)`` gives eager's results and gradients."""
    expected, expected_grads, _ = run(function, instances, parameters, False)
    results, grads, report = run(function, instances, parameters, True)
    assert len(results) == len(expected)
    for i, (result, other) in enumerate(zip(results, expected, strict=True)):
        assert_same(f"result {i}", result, other)
        assert result.requires_grad == other.requires_grad
    for i, (grad, other_grad) in enumerate(zip(grads, expected_grads, strict=True)):
        assert_same(f"gradient {i}", grad, other_grad)
    return report


def check_strides(function: Callable[[Tensor], Tensor], instances: Sequence[Tensor]) -> None:
    """Asserts that ``function(x)`` has eager's values, strides and gradients."""
    expected = [function(x) for x in instances]
    with ab.batch(adaptive=False):
        found = [function(x) for x in instances]
    for x, result, wanted in zip(instances, found, expected, strict=True):
        torch.testing.assert_close(result, wanted)
        assert result.stride() == wanted.stride()
        if wanted.requires_grad:
            weights = torch.linspace(1, 2, wanted.numel()).view(wanted.shape)
            gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (result, wanted)]
            torch.testing.assert_close(*gradients)


def rules_of(report: ab.Report) -> dict[str, str]:
    return {s.op: s.rule for s in report.signatures}


def raises_as_eager(function: Callable[[], Any]) -> str:
    """Asserts that the error in a block begins like eager's error. Returns the message."""
    with pytest.raises((RuntimeError, IndexError, ValueError)) as expected:
        function()
    with pytest.raises(type(expected.value)) as raised, ab.batch():
        _held = function()  # a value without references isn't computed
    assert str(raised.value).startswith(str(expected.value).splitlines()[0])
    return str(raised.value)


UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "exp": torch.exp,
    "log": lambda x: (x.abs() + 0.1).log(),
    "sqrt": lambda x: (x.abs() + 0.1).sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "neg": torch.neg,
    "abs": torch.abs,
    "square": torch.square,
    "sin": torch.sin,
    "cos": torch.cos,
    "reciprocal": torch.reciprocal,
    "silu": F.silu,
    "logsigmoid": F.logsigmoid,
    "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.5),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.3),
    "clone": torch.clone,
    "add": lambda x: x + 2,
    "sub": lambda x: x - 1.5,
    "rsub": lambda x: 2 - x,
    "rsub_alpha": lambda x: torch.rsub(x, 3, alpha=2),
    "mul": lambda x: 3 * x,
    "div": lambda x: x / 3,
    "rdiv": lambda x: 2 / x,
    "pow": lambda x: x**2,
    "pow_0": lambda x: x**0,
    "pow_negative": lambda x: x.pow(-3),
}


BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=3),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=0.5),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "pow": lambda x, y: x.abs() ** y,
}


Sizes = tuple[int, ...]


Op = Callable[[Tensor], Any]


LABELS = [[1, 2, 3], [2, 2], [0], [4, 1, 2, 2], [2]]


BOTH = pytest.mark.parametrize("dtype", [DOUBLE, torch.float32], ids=["float64", "float32"])
