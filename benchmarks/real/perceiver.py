"""perceiver-pytorch: images of different sizes, compared with masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from perceiver_pytorch import Perceiver, PerceiverIO
from torch import Tensor

from benchmarks.real.case import Case, lengths, model, padded


@model("Perceiver, images of different sizes")
def images() -> Case:
    network = Perceiver(
        num_freq_bands=3, depth=2, max_freq=10.0, input_axis=2, input_channels=3, num_latents=6,
        latent_dim=24, cross_heads=1, latent_heads=2, cross_dim_head=8, latent_dim_head=8,
        num_classes=5,
    )  # fmt: skip

    def one(image: Tensor) -> Tensor:
        return -network(image[None]).log_softmax(-1)[0, 0]

    sizes = zip(lengths(6, 10, 16), lengths(5, 11, 16), strict=True)
    return Case(
        network, [torch.randn(height, width, 3) for height, width in sizes], one, cells=[network]
    )


@model("Perceiver IO, sequences")
def sequences() -> Case:
    network = PerceiverIO(
        depth=2, dim=12, queries_dim=8, logits_dim=4, num_latents=6, latent_dim=24, cross_heads=1,
        latent_heads=2, cross_dim_head=8, latent_dim_head=8,
    )  # fmt: skip

    def score(rows: Tensor, queries: Tensor, mask: Tensor | None = None) -> Tensor:
        logits = network(rows, mask=mask, queries=queries)
        return F.softplus(logits).sum((1, 2))

    def one(example: Any) -> Tensor:
        rows, queries = example
        return score(rows[None], queries[None])[0]

    def own(minibatch: Sequence[Any]) -> Tensor:
        rows, mask = padded([rows for rows, _ in minibatch])
        return score(rows, torch.stack([queries for _, queries in minibatch]), mask)

    examples = [(torch.randn(n, 12), torch.randn(3, 8)) for n in lengths(4, 19)]
    return Case(network, examples, one, own, cells=[network])
