"""Cases found by the op sweep, and corner cases of other ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import DOUBLE, rand
from torch import Tensor, nn


def test_statistics_that_pending_ops_read_are_written_after_them() -> None:
    """Batch norm's schema does not declare that it writes to its running statistics."""
    bn = nn.BatchNorm1d(3)
    weight = torch.ones(3, requires_grad=True)
    with ab.batch():
        before = weight * bn.running_mean
        bn(torch.randn(4, 3) + 5)
        after = weight * bn.running_mean
    assert torch.equal(before, torch.zeros(3))
    assert torch.equal(after, bn.running_mean)
    assert (after != 0).all()


def test_a_copy_on_another_device_is_there() -> None:
    """The argument of `to` is a different device than the operands' device."""
    weight = torch.ones(3, requires_grad=True)
    with ab.batch():
        x = weight * 2
        copies = [x.to("meta"), x.to("meta", torch.float64)]
        same = x.to("cpu", torch.float64)
    assert all(copy.is_meta for copy in copies)
    assert torch.equal(same, torch.full((3,), 2.0, dtype=DOUBLE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.int64, torch.bool])  # fmt: skip # noqa: E501
def test_casts_of_any_length_are_one_batch(dtype: torch.dtype) -> None:
    """Tests `x.to(dtype)` of instances of different lengths, and its gradient."""
    weight = torch.ones(3, dtype=DOUBLE, requires_grad=True)
    with ab.batch() as scope:
        results = [(weight * torch.rand(n, 3, dtype=DOUBLE)).to(dtype) for n in (1, 4, 2)]
        back = [x.to(DOUBLE).sum() for x in results]
    assert all(x.dtype == dtype for x in results)
    rows = [row for row in scope.report().signatures if row.op == "aten::_to_copy"]
    assert [(row.rule, row.largest) for row in rows] == [("native", 3)] * 2
    if dtype.is_floating_point or dtype.is_complex:
        (gradient,) = torch.autograd.grad(sum(back), weight)
        assert gradient.dtype == DOUBLE
        assert (gradient != 0).all()
    else:
        assert not back[0].requires_grad


def test_computed_weights_are_one_batch() -> None:
    """A weight that differs from instance to instance does not split the batch."""
    base = torch.rand(4, 3, dtype=DOUBLE, requires_grad=True)

    def instances() -> list[Tensor]:
        return [
            F.layer_norm(rand(5, 3) * base[0], (3,), base[i] * 2, base[i] * 3) for i in range(4)
        ]

    torch.manual_seed(1)
    expected = instances()
    torch.manual_seed(1)
    with ab.batch() as scope:
        results = instances()
    for result, right in zip(results, expected, strict=True):
        assert torch.allclose(result, right)
    (row,) = [row for row in scope.report().signatures if row.op == "aten::layer_norm"]
    assert (row.rule, row.largest) == ("native", 4)
    # The products by 2 and by 3 may share a batch, if earlier tests had such products.
    assert all(row.largest >= 4 for row in scope.report().signatures)
    ours, theirs = (torch.autograd.grad(torch.stack(r).sum(), base) for r in (results, expected))
    assert torch.allclose(ours[0], theirs[0])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.atleast_2d(x),
        lambda x: torch.broadcast_tensors(x, x[:, None])[0],
        lambda x: torch.meshgrid(x, x, indexing="ij")[0],
        lambda x: torch.unsafe_split(x, 2)[0],
        lambda x: x.sum_to_size(3),
        lambda x: torch.conj_physical(x),
        lambda x: F.alpha_dropout(x, 0.0, True),
        lambda x: F.dropout2d(x.view(1, 3, 1, 1), training=False),
    ],
)
def test_views_that_no_schema_tells_share_memory(view: Callable[[Tensor], Tensor]) -> None:
    """A write to the result also writes to the operand, as in eager mode."""
    with ab.batch():
        x = torch.ones(3, requires_grad=True).detach() * torch.ones((), requires_grad=True)
        x = x.detach()
        result = view(x)
    with torch.no_grad():
        result.view(-1)[:1].fill_(7) if result.is_contiguous() else result[0].fill_(7)
    assert x[0] == 7
