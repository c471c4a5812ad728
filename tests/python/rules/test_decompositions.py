"""Ops that are computed by other ops, so that instances of any size share batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_ragged import WIDTH, Case, check_lengths
from helpers_rules import rand
from torch import Tensor

W = WIDTH

CASES: dict[str, Case] = {
    "repeat": Case(lambda x: x.tanh().repeat(2, 3), empty=False, one=False),
    "repeat_new_dimension": Case(lambda x: x.tanh().repeat(2, 1, 1), empty=False, one=False),
    "repeat_once": Case(lambda x: x.tanh().repeat(1, 1), empty=False),
    "repeat_pairs": Case(lambda x: x.tanh().repeat(len(x), 1), empty=False, one=False),
    "tile": Case(lambda x: x.tanh().tile(2), empty=False, one=False),
    "repeat_interleave": Case(lambda x: x.tanh().repeat_interleave(3, 0), empty=False, one=False),
    "repeat_interleave_pairs": Case(
        lambda x: x.tanh().repeat_interleave(len(x), 0), empty=False, one=False
    ),
    "addmm": Case(
        lambda h, a: torch.addmm(h.sin(), a.tanh(), h.tanh()),
        lambda n: (rand(n, W), rand(n, n)),
        empty=False,
    ),
    "addmm_scaled": Case(
        lambda h, a: torch.addmm(h.sin(), a.tanh(), h.tanh(), beta=0.5, alpha=2),
        lambda n: (rand(n, W), rand(n, n)),
        empty=False,
    ),
    "addmm_weight": Case(
        lambda w, x: torch.addmm(x.sin(), x.tanh(), w), parameters=[(W, W)], empty=False
    ),
    "baddbmm": Case(
        lambda x: torch.baddbmm(x.sin() @ x.mT, x.tanh(), x.mT, beta=2, alpha=0.5),
        lambda n: rand(2, n, W),
        empty=False,
    ),
    "bilinear": Case(
        lambda w, b, x: F.bilinear(x.tanh(), x.sin(), w, b),
        parameters=[(3, W, W), (3,)],
        empty=False,
        one=False,
    ),
    "bilinear_without_bias": Case(
        lambda w, x, y: F.bilinear(x.tanh(), y.sin(), w),
        lambda n: (rand(2, n, W), rand(2, n, 3)),
        parameters=[(1, W, 3)],
        empty=False,
    ),
    "matrix_vector": Case(
        lambda v, x: x.tanh() @ v, lambda n: rand(1, n, 2, W), parameters=[(W,)], empty=False
    ),
    "matrix_times_sequence": Case(
        lambda w, x: w @ x.tanh(),
        lambda n: rand(2, W, n + 1),
        parameters=[(3, W)],
        empty=False,
    ),
    "matrix_times_transposed": Case(
        lambda w, x: w @ x.tanh().transpose(1, 2),
        lambda n: rand(1, n + 1, W),
        parameters=[(3, W)],
        empty=False,
    ),
    "number_of_other_dtype": Case(lambda x: x.tanh() - x.float().amax(), empty=False),
    "where_number": Case(lambda x: torch.where(x > 0, x.tanh(), torch.tensor(-1e9).double())),
    "layer_norm_of_computed_weight": Case(
        lambda w, b, x: F.layer_norm(x.tanh(), (W,), 1 + w, b),
        parameters=[(W,), (W,)],
        empty=False,
    ),
    "linalg_norm": Case(lambda x: torch.linalg.norm(x.tanh(), dim=-1)),
    "trace": Case(lambda x: x.tanh().trace(), lambda n: rand(n, n), empty=False),
    "kron": Case(
        lambda x, y: torch.kron(x.tanh(), y),
        lambda n: (rand(n, W), rand(2, 3)),
        empty=False,
        one=False,
    ),
    "max_pool_over_time": Case(
        lambda x: F.max_pool1d(x.tanh(), x.size(2)), lambda n: rand(1, W, n), empty=False
    ),
    "max_pool_of_transposed": Case(
        lambda x: F.max_pool1d(x.tanh().transpose(1, 2), x.size(1)),
        lambda n: rand(2, n, W),
        empty=False,
        one=False,
    ),
    "adaptive_pool_of_transposed": Case(
        lambda x: F.adaptive_avg_pool1d(x.tanh().t(), 1),
        lambda n: rand(n, W),
        empty=False,
        one=False,
    ),
    "max_pool_with_ties": Case(
        lambda x: F.max_pool1d(x.relu(), x.size(1)), lambda n: rand(W, n), empty=False
    ),
    "avg_pool_over_time": Case(
        lambda x: F.avg_pool1d(x.tanh(), x.size(2)), lambda n: rand(1, W, n), empty=False
    ),
    "max_pool_of_image": Case(
        lambda x: F.max_pool2d(x.tanh(), x.shape[2:]), lambda n: rand(1, W, n, n + 1), empty=False
    ),
    "avg_pool_of_image": Case(
        lambda x: F.avg_pool2d(x.tanh(), x.size(2)), lambda n: rand(2, W, n, n), empty=False
    ),
    "adaptive_pool_over_time": Case(
        lambda x: F.adaptive_avg_pool1d(x.tanh(), 1), lambda n: rand(W, n), empty=False
    ),
    "adaptive_pool_of_image": Case(
        lambda x: F.adaptive_avg_pool2d(x.tanh(), 1), lambda n: rand(1, W, n, n + 1), empty=False
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_do_not_add_batches(name: str) -> None:
    check_lengths(CASES[name])


def test_differences_of_neighbours() -> None:
    instances = [rand(n, W).requires_grad_() for n in (3, 2, 7)]
    with ab.batch(adaptive=False) as scope:
        found = [x.tanh().diff(dim=0) for x in instances]
    assert max(row.batches for row in scope.report().signatures) == 1
    for result, x in zip(found, instances, strict=True):
        torch.testing.assert_close(result, x.tanh().diff(dim=0))


def outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        return type(error), str(error).split("\n")[0]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.addmm(x, x, x),
        lambda x: torch.addmm(x[:, :2], x.t(), x),
        lambda x: torch.addmm(x.double(), x.t(), x),
        lambda x: torch.baddbmm(x[None], x[None], x[None]),
        lambda x: x.repeat(2),
        lambda x: x.repeat(2, -1),
        lambda x: x.repeat_interleave(-1, 0),
        lambda x: F.bilinear(x, x, x[None]),
        lambda x: x[0].trace(),
        lambda x: F.max_pool1d(x, 0),
        lambda x: F.avg_pool2d(x, 3),
    ],
)
def test_errors_are_eagers(call: Callable[[Tensor], Tensor]) -> None:
    x = rand(3, W).requires_grad_()
    expected = outcome(lambda: call(x * 2))
    assert isinstance(expected, tuple), "eager accepts the call"

    def batched() -> Tensor:
        with ab.batch(adaptive=False):
            return call(x * 2)

    kind, message = outcome(batched)
    assert kind is expected[0]
    assert message.startswith(expected[1][:40])


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.repeat(0, 2),
        lambda x: x[:0].repeat(2, 2),
        lambda x: torch.addmm(x * float("nan"), x @ x.t(), x, beta=0),
        lambda x: torch.addmm(x.bfloat16(), (x @ x.t()).bfloat16(), x.bfloat16()),
        lambda x: x.long().trace(),
        lambda x: F.avg_pool2d(x[None], (3, 4), divisor_override=2),
        lambda x: F.max_pool1d(x, 4, return_indices=True)[1],
        lambda x: F.max_pool1d((x / 0).nan_to_num(float("nan")), 4),
    ],
)
def test_other_calls_have_eagers_values_and_strides(call: Callable[[Tensor], Tensor]) -> None:
    instances = [rand(3, W) for _ in range(3)]
    weight = torch.ones((), requires_grad=True)
    with ab.batch(adaptive=False):
        found = [call(x * weight) for x in instances]
    for result, x in zip(found, instances, strict=True):
        expected = call(x * weight)
        torch.testing.assert_close(result, expected, equal_nan=True, check_stride=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_eagers_dtype(dtype: torch.dtype) -> None:
    weight = torch.ones((), requires_grad=True)

    def run(x: Tensor) -> list[Tensor]:
        h = x * weight
        with torch.autocast("cpu", dtype):
            return [
                torch.addmm(h, h @ h.t(), h),
                torch.baddbmm(h[None], (h @ h.t())[None], h[None]),
                F.bilinear(h, h, torch.ones(2, W, W, dtype=h.dtype)),
                h.repeat(2, 1),
            ]

    instances = [rand(n, W) for n in (2, 3, 2)]
    with ab.batch(adaptive=False):
        found = [run(x) for x in instances]
    for results, x in zip(found, instances, strict=True):
        torch.testing.assert_close(results, run(x))


def test_a_repeated_tensor_can_be_written_to() -> None:
    x = rand(2, 3).requires_grad_()
    with ab.batch(adaptive=False):
        y = (x * 2).repeat(2, 1)
        y += 1
    torch.testing.assert_close(y, (x * 2).repeat(2, 1) + 1)
