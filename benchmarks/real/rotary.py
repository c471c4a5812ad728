"""rotary-embedding-torch: attention with rotary positions, compared with padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from rotary_embedding_torch import RotaryEmbedding
from torch import Tensor, nn

from benchmarks.real.case import SINGLE, Case, lengths, model, padded

HIDDEN, HEADS = 32, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.rotary = RotaryEmbedding(dim=HIDDEN // HEADS, learned_freq=True)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.project(h).view(*h.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = parts.unbind(0)
        queries, keys = (self.rotary.rotate_queries_or_keys(t) for t in (queries, keys))
        allowed = None if mask is None else mask[:, None, None]
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=allowed)
        return self.out(attended.transpose(1, 2).reshape(h.shape))


@model("attention with learned frequencies")
def attention() -> Case:
    network = Attention()

    def one(h: Tensor) -> Tensor:
        return network(h[None]).square().sum()

    def own(minibatch: Sequence[Tensor]) -> Tensor:
        h, mask = padded(minibatch)
        return (network(h, mask).square() * mask[..., None]).sum((1, 2))

    return Case(
        network, [torch.randn(n, HIDDEN) for n in lengths(4, 19)], one, own, tolerance=SINGLE
    )
