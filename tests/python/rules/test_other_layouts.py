"""Ops on transposed tensors, windows and expanded tensors of different sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers_ragged import WIDTH, Case, check_lengths
from helpers_rules import check_strides, rand
from torch import Tensor

W = WIDTH


def sequence(n: int) -> Tensor:
    return rand(1, n + 1, W)  # with one row, the transposed tensor is row-major


def of_columns(function: Callable[..., Tensor], *parameters: tuple[int, ...]) -> Case:
    """The function takes the parameters and a transposed sequence [1, W, n]."""
    return Case(
        lambda *a: function(*a[:-1], a[-1].tanh().transpose(1, 2)),
        sequence,
        parameters=parameters,
        empty=False,
    )


CASES: dict[str, Case] = {
    "sum": of_columns(lambda x: x.sum(-1)),
    "sum_keeps_dim": of_columns(lambda x: x.sum(1, keepdim=True)),
    "sum_of_two_dims": of_columns(lambda x: x.sum((1, 2))),
    "mean": of_columns(lambda x: x.mean(2)),
    "amax": of_columns(lambda x: x.amax(-1)),
    "amin": of_columns(lambda x: x.amin(1)),
    "max": of_columns(lambda x: x.max(-1).values),
    "min_keeps_dim": of_columns(lambda x: x.min(1, keepdim=True)[0]),
    "argmax": of_columns(lambda x: x * x.argmax(-1, keepdim=True)),
    "logsumexp": of_columns(lambda x: x.logsumexp(-1)),
    "std": of_columns(lambda x: x.std(1)),
    "var": of_columns(lambda x: x.var(1, correction=0)),
    "norm": of_columns(lambda x: x.norm(dim=1)),
    "normalize": of_columns(lambda x: F.normalize(x, dim=1)),
    "cumsum": of_columns(lambda x: x.cumsum(-1)),
    "log_softmax_over_time": of_columns(lambda x: x.log_softmax(-1)),
    "linear": of_columns(lambda w, x: F.linear(x.transpose(1, 2)[:, ::2], w), (3, W)),
    "linear_of_columns": Case(
        lambda w, b, x: F.linear(x.tanh().view(1, W, 3, -1).transpose(1, 3)[0], w, b),
        lambda n: rand(1, W, 3, n + 1),
        parameters=[(3, W), (3,)],
        empty=False,
    ),
    "layer_norm": Case(
        lambda w, x: F.layer_norm(x.tanh().transpose(1, 2), (W,), w),
        lambda n: rand(1, W, n + 1),
        parameters=[(W,)],
        empty=False,
    ),
    "batch_norm": Case(
        lambda w, x: F.batch_norm(x.tanh().transpose(1, 2), None, None, w, training=True),
        lambda n: rand(1, n + 1, W),
        parameters=[(W,)],
        empty=False,
    ),
    "instance_norm": Case(
        lambda x: F.instance_norm(x.tanh().transpose(1, 2)),
        lambda n: rand(1, n + 1, W),
        empty=False,
    ),
    "group_norm": Case(
        lambda x: F.group_norm(x.tanh().transpose(1, 2), 2),
        lambda n: rand(1, n + 1, W),
        empty=False,
    ),
    "glu": of_columns(lambda x: F.glu(x, 1)),
    "glu_of_channels": Case(lambda x: F.glu(x.tanh(), 1), lambda n: rand(2, W, n), empty=False),
    "roll": of_columns(lambda x: x.roll(1, -1)),
    "roll_channels": of_columns(lambda x: x.roll(-2, 1)),
    "cross_entropy": Case(
        lambda x, y: F.cross_entropy(x.sin().transpose(1, 2), y),
        lambda n: (rand(1, n, W), torch.arange(n)[None] % W),
        empty=False,
    ),
    "cross_entropy_of_image": Case(
        lambda w, x, y: F.cross_entropy(x.sin(), y, w.detach(), reduction="none"),
        lambda n: (rand(2, W, n, 3), torch.arange(6 * n).view(2, n, 3) % W),
        parameters=[(W,)],
        empty=False,
        one=False,
    ),
    "nll_loss": Case(
        lambda x, y: F.nll_loss(x.log_softmax(-1).transpose(1, 2), y, ignore_index=1),
        lambda n: (rand(1, n, W), torch.arange(n)[None] % W),
        empty=False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_do_not_add_batches(name: str) -> None:
    check_lengths(CASES[name])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, 2),
    "last_two": lambda x: x.transpose(1, 2),
    "rotated": lambda x: x.permute(1, 2, 0),
    "gaps": lambda x: x.transpose(1, 2)[:, ::2],
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1),
    "windows": lambda x: x.unfold(1, 2, 1),
}
OPS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, d: x.sum(d),
    "mean_keeps_dim": lambda x, d: x.mean(d, keepdim=True),
    "sum_of_two": lambda x, d: x.sum((d, (d + 1) % x.dim())),
    "max": lambda x, d: x.max(d, keepdim=True)[0],
    "amin": lambda x, d: x.amin(d),
    "argmin": lambda x, d: x.argmin(d),
    "prod": lambda x, d: x.prod(d),
    "std": lambda x, d: x.std(d),
    "norm": lambda x, d: torch.linalg.vector_norm(x, 1, d, keepdim=True),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "cumsum": lambda x, d: x.cumsum(d),
    "softmax": lambda x, d: x.softmax(d),
    "glu": lambda x, d: F.glu(torch.cat([x, x + 1], d), d),
    "layer_norm": lambda x, _: F.layer_norm(x, x.shape[-1:]),
    "linear": lambda x, _: F.linear(x, torch.eye(x.shape[-1], dtype=x.dtype)[:2]),
    "roll": lambda x, d: x.roll(1, d),
    "roll_by_nothing": lambda x, d: x.roll(0, d),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_results_have_eagers_values_and_strides(layout: str, op: str, dim: int) -> None:
    def one(x: Tensor) -> Tensor:
        return OPS[op](LAYOUTS[layout](x * 2), dim)

    check_strides(one, [rand(2, 3, n).requires_grad_() for n in (4, 5, 4)])
