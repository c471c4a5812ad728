"""Row-major copies of tensors in any order of dimensions, of any size and dtype."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor

DTYPES = [
    *(torch.bool, torch.int16, torch.bfloat16, torch.float32, torch.int64),
    *(torch.float64, torch.complex64, torch.complex128),
]


def made(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    count = torch.arange(torch.Size(sizes).numel()).view(sizes)
    return (count % 2 == 0) if dtype == torch.bool else (count % 97).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[1:])
def test_copies_are_eagers(order: tuple[int, ...], dtype: torch.dtype) -> None:
    sizes = [(2, 3, 17, 5), (1, 33, 4, 1), (3, 1, 2, 40)]
    with ab.batch(adaptive=False) as scope:
        pending = [
            torch.zeros(s, dtype=dtype).logical_or(made(s, dtype))
            if dtype == torch.bool
            else torch.zeros(s, dtype=dtype) + made(s, dtype)
            for s in sizes
        ]
        assert all(map(ab.is_pending, pending))
        found = [x.permute(order).contiguous() for x in pending]
        stepped = [x.permute(order)[..., ::2].contiguous() for x in pending]
        expanded = [x[..., :1].expand(-1, -1, -1, 3).permute(order).contiguous() for x in pending]
    for i, s in enumerate(sizes):
        x = made(s, dtype)
        assert torch.equal(found[i], x.permute(order).contiguous())
        assert torch.equal(stepped[i], x.permute(order)[..., ::2].contiguous())
        assert torch.equal(
            expanded[i], x[..., :1].expand(-1, -1, -1, 3).permute(order).contiguous()
        )
    copies = [row for row in scope.report().signatures if row.op == "aten::clone"]
    assert {row.rule for row in copies} == {"native"}
    assert max(row.largest for row in copies) >= 3  # copies of different sizes share a batch
