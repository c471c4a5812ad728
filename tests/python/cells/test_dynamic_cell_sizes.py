"""Dynamic cells whose behavior depends on sizes: conditions, ints, sizes of results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_dynamic_cells import WIDTH, Counted, Function, alone, compare, rows
from torch import Tensor
from torch_autobatch._cell_by_sizes import _Results
from torch_autobatch._cell_program import MISMATCH


@pytest.fixture
def xs() -> list[Tensor]:
    return rows()


def test_a_comparison_gives_two_programs(xs: list[Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() if x.size(0) > 4 else x.cos()

    runs, why = compare(function, alone(xs) * 2)
    assert runs <= 4
    assert why == ""


COUNTS: dict[str, Function] = {
    "range": lambda x: sum(x[i] for i in range(x.size(0) // 4 + 1)),
    "list": lambda x: torch.stack([x.sum()] * (x.size(0) // 4 + 1)),
    "key": lambda x: x * {1: 1.0, 2: 3.0}.get(x.size(0) // 4, 2.0),
    "text": lambda x: x * len(f"{x.size(0) * 3}"),
    "root": lambda x: x * math.sqrt(x.size(0)),
    "rows": lambda x: sum(row.exp() for row in x),
    "unbind": lambda x: sum(row.exp() for row in x.unbind(0)),
    "split": lambda x: torch.stack([part.sum() for part in x.split(3)]),
    "len": lambda x: x * len(x),
    "bits": lambda x: x * x.size(0).bit_length(),
    "numpy": lambda x: x * np.sqrt(x.size(0)) + torch.from_numpy(np.arange(x.size(0)))[:, None],
    "divmod": lambda x: x * divmod(x.size(0), 3)[0] + pow(x.size(0), 2, 5),
    "bitwise": lambda x: x * (x.size(0) ^ 3) + (5 & x.size(0)) + ~x.size(0),
    "rounding": lambda x: x * round(x.size(0) / 2) + math.ceil(0.5 * x.size(0)) - abs(-x.size(0)),
    "broadcast_shapes": lambda x: x + torch.zeros(torch.broadcast_shapes(x.shape, (1, WIDTH))),
    "its shape": lambda x: (x.exp(), x.shape),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_counts_by_a_size(name: str, xs: list[Tensor]) -> None:
    """The trace records the use or fails. Results match eager mode for any first sizes."""
    compare(COUNTS[name], alone(xs) * 2)
    compare(COUNTS[name], alone(xs[::-1]) * 2)


PIECES: dict[str, Function] = {
    "chunk": lambda x: sum(part.sum() for part in x.chunk(2)),
    "chunk by keyword": lambda x: torch.stack([p.sum() for p in torch.chunk(x, dim=0, chunks=3)]),
    "chunk by a size": lambda x: torch.stack([p.sum() for p in x.chunk(x.size(1) // 2)]),
    "split": lambda x: torch.stack([part.sum() for part in x.split(3)]),
    "split by a size": lambda x: torch.stack([part.sum() for part in x.split(x.size(0))]),
}


@pytest.mark.parametrize("has_effect", [False, True])
@pytest.mark.parametrize("name", PIECES)
def test_pieces_of_nothing(name: str, has_effect: bool, xs: list[Tensor]) -> None:
    calls = torch.zeros(())

    def function(x: Tensor) -> Tensor:
        if has_effect:
            calls.add_(1)
        pieces: Tensor = PIECES[name](x)
        return pieces

    xs = [xs[0], xs[0][:0], *xs[1:], xs[0][:0], xs[0][:0]]
    for order in (1, -1):
        calls.zero_()
        cell = ab.cell(function, dynamic=True)
        with ab.batch(adaptive=False):
            found = [cell(x) for x in xs[::order]]
        assert calls == has_effect * len(xs)
        torch.testing.assert_close(found, [function(x) for x in xs[::order]])


def test_results_of_many_sizes_are_dropped() -> None:
    """Results without memory of their own, and sizes that a program rejects, count too."""
    limited, rejected = _Results(lambda n: (n,)), _Results(lambda n: MISMATCH)
    for n in range(100_000):
        assert limited(n) == (n,)
        assert rejected(n) is MISMATCH
    assert len(limited._known) < 70_000
    assert len(rejected._known) < 70_000


def test_sizes_that_may_be_keys_need_not(xs: list[Tensor]) -> None:
    """einops caches results by shape if a shape can be a key."""
    known: dict[Any, Any] = {}

    def halves(size: Any) -> Any:
        try:
            return known.setdefault(size, size // 2)
        except TypeError:
            return size // 2

    runs, why = compare(lambda x: x[: halves(x.size(0)) + 1].exp(), alone(xs))
    assert runs == 3
    assert why == ""


def test_the_number_of_dimensions_may_follow_from_sizes(xs: list[Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x[:, :1].t().squeeze()  # 0-dimensional if there is one row
        return y.exp() if y.dim() == 0 else y.sin()

    runs, why = compare(function, alone(xs) * 2)
    assert runs <= 4
    assert why == ""


def test_ints_are_arguments_too(xs: list[Tensor]) -> None:
    def function(x: Tensor, n: int, *, scale: int = 2) -> Tensor:
        return x.new_zeros(n + 1, WIDTH).index_add(0, torch.arange(x.size(0)) % n, x) * scale

    assert compare(function, [(x, i + 2) for i, x in enumerate(xs)])[0] == 2


def test_sizes_that_never_differ_are_conditions(xs: list[Tensor]) -> None:
    counted = Counted(lambda x: x * torch.Size(x.shape[1:]).numel())
    cell = ab.cell(counted, dynamic=True)
    others = [torch.randn(n, WIDTH + 2, dtype=torch.double) for n in (2, 5, 3)]
    with ab.batch():
        found = [cell(x) for x in xs + others]
    torch.testing.assert_close(found, [x * x.size(1) for x in xs + others])
    assert counted.runs == 4


def test_sizes_that_are_known_from_others(xs: list[Tensor]) -> None:
    """Each size is read from a result, and equals a size of the argument."""
    w = torch.randn(8, WIDTH, dtype=torch.double)

    def function(x: Tensor) -> Tensor:
        n = x.size(0)
        pairs = (x[:, None] * x[None]).view(n, -1)
        assert pairs.size(1) == n * WIDTH
        h = F.linear(x.tanh(), w).relu().view(-1, 2, 4).transpose(0, 1)
        h = h.new_zeros(2, n, 4).scatter_add_(1, torch.zeros(2, n, 4, dtype=torch.long), h)
        return h.sum(-1).unsqueeze(-1).expand(2, n, 3) * h.size(1) + h.shape[2] + pairs.mean()

    assert compare(function, alone(xs)) == (2, "")


RESHAPED: dict[str, Function] = {
    "t_": lambda y: y.t_(),
    "transpose_": lambda y: y.transpose_(0, 1),
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "squeeze_": lambda y: y.unsqueeze(0).squeeze_(0),
}


@pytest.mark.parametrize("name", RESHAPED)
@pytest.mark.parametrize("sizes", [((3, 3), (5, 5), (4, 7), (2, 6)), ((4, 7), (2, 6), (5, 5))])
def test_shapes_that_change_in_place(name: str, sizes: tuple[tuple[int, int], ...]) -> None:
    """Facts about one size do not apply to another size, even if the first examples are square."""

    def function(x: Tensor) -> Tensor:
        y = x * 1
        before = y.size(0)
        RESHAPED[name](y)
        return torch.zeros(y.size(0)) + before + y.size(1)

    compare(function, [(torch.randn(size),) for size in sizes])


def test_sizes_that_expand_keeps(xs: list[Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x[:1].expand(x.size(0), -1) + x[:, :1].expand(-1, WIDTH)
        return y * y.size(0) + y.size(1) + x[None].expand(2, -1, -1).size(1)

    assert compare(function, alone(xs)) == (2, "")
