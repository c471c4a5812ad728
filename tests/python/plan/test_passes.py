"""Expressions that passes may rewrite, whose parts are used in ways that a pass must respect."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch_autobatch as ab
from helpers_switches import names, without
from torch import Tensor, nn
from torch_autobatch import _C

PASSES = [name for name in names() if _C.switches()[name][0]]
widths = itertools.count(8)

# Returns the parts of an expression and its result, [n, width].
Expression = Callable[[list[nn.Linear], Tensor], tuple[list[Tensor], Tensor]]


def sums(layers: list[nn.Linear], x: Tensor) -> tuple[list[Tensor], Tensor]:
    parts = [layer(x) for layer in layers]
    first = parts[0] + parts[1]
    second = first + parts[2]
    return [*parts, first, second], second + x


def siblings(layers: list[nn.Linear], x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Linear layers of one input, as in the gates of a recurrent cell."""
    shared = x.tanh()
    parts = [layer(shared) for layer in layers]
    return [shared, *parts], parts[0].sigmoid() * parts[1] + parts[2]


def products(layers: list[nn.Linear], x: Tensor) -> tuple[list[Tensor], Tensor]:
    joined = torch.cat([x.sin(), x.cos()], -1)
    weight = torch.cat([layers[0].weight, layers[1].weight], 1)
    result = joined @ weight.t()
    return [joined, result], result * 2


def equal(layers: list[nn.Linear], x: Tensor) -> tuple[list[Tensor], Tensor]:
    one, other = layers[0].weight.softmax(0), layers[0].weight.softmax(0)
    first, second = x @ one, x @ other
    return [one, first, second], first + second


def negations(_: list[nn.Linear], x: Tensor) -> tuple[list[Tensor], Tensor]:
    one = x.sin().neg()
    two = one.neg()
    return [one, two], two.cos()


EXPRESSIONS: list[Expression] = [sums, siblings, products, equal, negations]

# How the program uses the parts after it has computed the result. Returns further results.
Use = Callable[[list[Tensor], Tensor], list[Tensor]]


def held(parts: list[Tensor], _: Tensor) -> list[Tensor]:
    return parts


def viewed(parts: list[Tensor], _: Tensor) -> list[Tensor]:
    return [part[:1] * 3 for part in parts]


def read_twice(parts: list[Tensor], result: Tensor) -> list[Tensor]:
    return [part.exp() for part in parts] + [result.exp()]


def overwritten_in_place(parts: list[Tensor], result: Tensor) -> list[Tensor]:
    return [result.add_(1), *(part * 2 for part in parts[:1])]


def put_in_a_buffer(parts: list[Tensor], result: Tensor) -> list[Tensor]:
    buffer = result.new_zeros(len(parts), result.shape[-1])
    for i, part in enumerate(parts):
        buffer[i] = part[0, : result.shape[-1]]
    return [buffer]


def read_in_the_middle(parts: list[Tensor], result: Tensor) -> list[Tensor]:
    scale = 2 if float(parts[0].detach().sum()) > 0 else 3
    return [result * scale, *(part * scale for part in parts)]


def detached(parts: list[Tensor], result: Tensor) -> list[Tensor]:
    return [part.detach() * result.mean() for part in parts]


USES: list[Use] = [
    held,
    viewed,
    read_twice,
    overwritten_in_place,
    put_in_a_buffer,
    read_in_the_middle,
    detached,
]


def run(expression: Expression, use: Use, width: int, *, enabled: bool) -> list[Tensor]:
    torch.manual_seed(0)
    layers = [nn.Linear(width, width, dtype=torch.float64) for _ in range(3)]
    results: list[Tensor] = []
    with ab.batch(enabled=enabled, adaptive=False):
        for n in (2, 1, 3, 2):
            x = torch.rand(n, width, dtype=torch.float64) * layers[0].bias
            parts, result = expression(layers, x)
            results += use(parts, result)
            results.append(result * 1)
            del parts, result
    torch.stack([r.sum() for r in results if r.requires_grad]).sum().backward()
    parameters = [p for layer in layers for p in layer.parameters()]
    return [*(r.detach() for r in results), *(p.grad for p in parameters if p.grad is not None)]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_passes_respect_the_uses_of_parts(expression: Expression, use: Use) -> None:
    width = next(widths)
    expected = run(expression, use, width, enabled=False)
    torch.testing.assert_close(run(expression, use, width, enabled=True), expected)
    for name in PASSES:
        with without(name):
            torch.testing.assert_close(run(expression, use, width, enabled=True), expected)


def test_a_part_that_is_overwritten_later_raises_no_error() -> None:
    """`sin` would save the product, which is written to, if a pass removed both negations."""
    layer = nn.Linear(4, 4, dtype=torch.float64)
    x = torch.rand(3, 4, dtype=torch.float64)

    def program() -> Tensor:
        part = layer(x) * 1
        result = part.neg().neg().sin()
        part.add_(1)
        return result.sum()

    with ab.batch(adaptive=False):
        found = program()
    found.backward()
    gradient = layer.weight.grad
    assert gradient is not None
    layer.weight.grad = None
    program().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(gradient, layer.weight.grad)
