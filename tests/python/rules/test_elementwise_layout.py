"""Elementwise ops over instances of different sizes, with any memory layout and broadcasting: one
batch, with eager's values, strides and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import check, rand
from torch import Tensor

LENGTHS = [3, 1, 5, 3, 2]
HEADS, WIDTH = 4, 6

Layout = Callable[[Tensor], Tensor]

LAYOUTS: dict[str, Layout] = {
    "row-major": lambda x: x,
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "columns": lambda x: x.mT.contiguous().mT,
    "a slice": lambda x: torch.cat([x, x], -1)[..., : x.size(-1)],
    "a slice of transposed": lambda x: torch.cat([x, x], -1).transpose(1, 2).contiguous()[
        ..., : x.size(-1)
    ].transpose(1, 2),
    "expanded": lambda x: x[:, :1].expand(x.shape),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
}  # fmt: skip

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "clone": torch.clone,
    "contiguous": lambda x: x.clone(memory_format=torch.contiguous_format),
    "logsigmoid": F.logsigmoid,
    "a number": lambda x: 2 - x,
    "a power": lambda x: x**2,
    "atan": torch.atan,
    "masked": lambda x: x.masked_fill(x > 0.3, 0.5),
}

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "scaled": lambda x, y: torch.add(x, y, alpha=3),
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 1),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(y > 0, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
}

# Sizes of operands for a result [1, HEADS, n, WIDTH].
OPERANDS: dict[str, Callable[[int], tuple[int, ...]]] = {
    "whole": lambda n: (1, HEADS, n, WIDTH),
    "of all heads": lambda n: (1, 1, n, WIDTH),
    "of each head": lambda n: (1, HEADS, 1, 1),
    "of a row": lambda n: (n, 1),
    "of a head's row": lambda n: (1, HEADS, n, 1),
    "of a column": lambda n: (WIDTH,),
    "one": lambda n: (1,),
}


def pending(x: Tensor, layout: Layout) -> Tensor:
    """Returns the tensor as a result of a captured op."""
    return layout(x * 1.5)


def native(report: ab.Report) -> None:
    assert {row.rule for row in report.signatures} == {"native"}


def strides(function: Callable[[], list[Tensor]]) -> Iterator[tuple[int, ...]]:
    for x in function():
        yield tuple(s for s, size in zip(x.stride(), x.shape, strict=True) if size != 1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", UNARY)
def test_an_op_of_one_operand(name: str, layout: Layout) -> None:
    def function(x: Tensor) -> Tensor:
        return UNARY[name](pending(x, layout))

    xs = [rand(1, HEADS, n, WIDTH) for n in LENGTHS]
    check(function, *xs)
    with ab.batch():
        ours = [function(x.requires_grad_()) for x in xs]
    assert list(strides(lambda: ours)) == list(strides(lambda: [function(x) for x in xs]))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize("name", BINARY)
def test_an_op_of_two_operands(name: str, operand: str, layout: Layout) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = pending(x, layout)
        return BINARY[name](x, y), BINARY[name](y, x)

    pairs = [(rand(1, HEADS, n, WIDTH), rand(*OPERANDS[operand](n))) for n in LENGTHS]
    check(function, *pairs)
    with ab.batch():
        ours = [r for x, y in pairs for r in function(x.requires_grad_(), y)]
    theirs = [r for x, y in pairs for r in function(x, y)]
    assert list(strides(lambda: ours)) == list(strides(lambda: theirs))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_lengths_add_no_batches(layout: Layout) -> None:
    def function(x: Tensor, position: Tensor) -> Tensor:
        x = pending(x, layout)
        return (x * position).neg().atan() + x

    def batches(lengths: list[int]) -> int:
        pairs = [(rand(1, HEADS, n, WIDTH), rand(1, 1, n, WIDTH)) for n in lengths]
        report = check(function, *pairs)
        native(report)
        return report.batches

    assert batches([2, 3, 5, 7]) == batches([3] * 4)


def test_root_mean_square_norm() -> None:
    """The code is similar to Hugging Face's models. Tensors have the shape [1, length, width]."""

    def function(weight: Tensor, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(variance + 1e-6))

    report = check(function, *[rand(1, n, WIDTH) for n in LENGTHS], parameters=[rand(WIDTH)])
    native(report)
    assert report.batches == 6


def test_rotary_embedding() -> None:
    """The code is similar to Hugging Face's models. The memory of queries is ordered by length."""

    def rotate(x: Tensor) -> Tensor:
        half = x.size(-1) // 2
        return torch.cat([-x[..., half:], x[..., :half]], dim=-1)

    def function(weight: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = (x @ weight).view(1, -1, HEADS, WIDTH).transpose(1, 2)
        return q * cos + rotate(q) * sin

    instances = [(rand(1, n, 8), rand(1, 1, n, WIDTH), rand(1, 1, n, WIDTH)) for n in LENGTHS]
    report = check(function, *instances, parameters=[rand(8, HEADS * WIDTH)])
    native(report)
    assert report.batches == 6


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_cat_of_pieces_of_any_layout(dim: int) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.transpose(1, 2).tanh(), y.tanh().transpose(1, 2)], dim)

    instances = [(rand(1, n, HEADS, WIDTH), rand(1, n, HEADS, WIDTH)) for n in LENGTHS]
    report = check(function, *instances)
    native(report)
    assert report.batches == 2


def test_cat_leaves_out_an_empty_tensor_of_one_dimension() -> None:
    """A cache of keys begins with an empty tensor of one dimension."""

    def function(x: Tensor) -> Tensor:
        return torch.cat([torch.tensor([], dtype=x.dtype), x.tanh()], dim=-2)

    report = check(function, *[rand(1, HEADS, n, WIDTH) for n in LENGTHS])
    native(report)
    assert report.batches == 2


def test_channels_last_stays_where_all_pieces_have_it() -> None:
    def function(x: Tensor) -> Tensor:
        x = pending(x, LAYOUTS["channels last"])
        return torch.cat([x, x], 1)

    xs = [rand(2, 3, 4, n) for n in (2, 3)]
    check(function, *xs)
    with ab.batch():
        ours = [function(x.requires_grad_()) for x in xs]
    assert list(strides(lambda: ours)) == list(strides(lambda: [function(x) for x in xs]))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_with_grouped_heads(causal: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q * 2, k, v, is_causal=causal, enable_gqa=True)

    instances = [
        (rand(1, HEADS, n, 8), rand(1, HEADS // 2, n, 8), rand(1, HEADS // 2, n, 8))
        for n in LENGTHS
    ]
    report = check(function, *instances)
    native(report)
    assert report.batches == 2
