"""Attention with masks over instances of different lengths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers_attention import LENGTHS, SDPA, batches_of, check_native, heads
from helpers_rules import DOUBLE, check, rand, rules_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sdpa = F.scaled_dot_product_attention

MASKS: dict[str, Callable[[int], Tensor]] = {
    "keys": lambda t: torch.arange(t).lt(max(1, t - 2)).view(1, 1, 1, t).expand(2, 1, 1, t),
    "pairs": lambda t: torch.ones(t, t, dtype=torch.bool).tril(),
    "heads": lambda t: torch.ones(2, 3, t, t, dtype=torch.bool).tril(1),
    "none for some": lambda t: torch.arange(t).gt(0).view(t, 1).expand(t, t).contiguous(),
    "numbers": lambda t: torch.arange(t * t, dtype=DOUBLE).view(t, t) / t - 1,
    "infinite": lambda t: torch.zeros(1, 3, t, t, dtype=DOUBLE).masked_fill(
        torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf
    ),
}


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, backend: SDPBackend) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, MASKS[name](q.size(-2)))

    check_native(attend, *[heads(t) for t in LENGTHS])


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_one_mask_for_all(backend: SDPBackend) -> None:
    mask = rand(6, 6)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, mask)

    check_native(attend, *[heads(6) for _ in range(4)])


LEARNED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "part": lambda bias, t: bias[0, :t, :t],
    "heads": lambda bias, t: bias[:, :t, :t] * 2,
    "batch": lambda bias, t: bias[:, :t, :t].exp()[None],
    "keys": lambda bias, t: bias[:, :1, :t].exp(),
    "queries": lambda bias, t: bias[:1, :t, :1] * 3,
    "relative": lambda bias, t: (
        bias[0, torch.arange(t)[:, None] - torch.arange(t) + 11, :3].permute(2, 0, 1).unsqueeze(0)
    ),
    "expanded": lambda bias, t: bias[:1, :t, :t].expand(3, t, t),
}


@pytest.mark.parametrize("dropout", [0.0, 1.0])
@pytest.mark.parametrize("name", LEARNED)
def test_a_mask_that_is_learned(name: str, dropout: float) -> None:
    def attend(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, LEARNED[name](bias, q.size(-2)), dropout)

    report = check(attend, *[heads(t) for t in LENGTHS], parameters=[rand(3, 23, 12)])
    if name != "expanded":
        assert rules_of(report)[SDPA] == "native", report
        assert batches_of(report, SDPA) == 1, report


def test_one_mask_that_is_learned_for_all() -> None:
    def attend(bias: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, bias)

    report = check(attend, *[heads(6) for _ in range(4)], parameters=[rand(3, 6, 6)])
    assert batches_of(report, SDPA) == 1, report


def test_a_mask_alone_is_learned() -> None:
    def attend(bias: Tensor, x: Tensor) -> Tensor:
        x = x.detach()
        return sdpa(x, x, x, bias[: x.size(-2), : x.size(-2)])

    xs = [heads(t, 1) for t in LENGTHS]
    report = check(attend, *xs, parameters=[rand(12, 12)])
    assert batches_of(report, SDPA) == 1, report
