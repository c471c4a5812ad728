"""x-transformers: many kinds of attention, compared with masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from x_transformers import AutoregressiveWrapper, Decoder, Encoder, TransformerWrapper

from benchmarks.real.case import SINGLE, Case, lengths, model, padded

WORDS, HIDDEN = 50, 32


@model("decoder, rotary positions, GLU")
def decoder() -> Case:
    layers = Decoder(
        dim=HIDDEN, depth=2, heads=4, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True,
        use_rmsnorm=True,
    )  # fmt: skip
    network = AutoregressiveWrapper(
        TransformerWrapper(num_tokens=WORDS, max_seq_len=32, attn_layers=layers)
    )

    def one(words: Tensor) -> Tensor:
        return network(words[None])

    def own(minibatch: Sequence[Tensor]) -> Tensor:
        words, mask = padded(minibatch)
        logits = network.net(words[:, :-1], mask=mask[:, :-1])
        losses = F.cross_entropy(logits.transpose(1, 2), words[:, 1:], reduction="none")
        return (losses * mask[:, 1:]).sum(1) / mask[:, 1:].sum(1)

    examples = [torch.randint(WORDS, (n,)) for n in lengths(4, 19)]
    return Case(network, examples, one, own, own_tolerance=SINGLE, cells=[network])


def encoder(**options: Any) -> Case:
    layers = Encoder(dim=HIDDEN, depth=2, heads=4, attn_dim_head=8, **options)
    network = TransformerWrapper(
        num_tokens=WORDS, max_seq_len=32, attn_layers=layers, use_abs_pos_emb=False
    )

    def one(words: Tensor) -> Tensor:
        losses = F.cross_entropy(network(words[None])[0], words, reduction="none")
        return losses.mean()

    def own(minibatch: Sequence[Tensor]) -> Tensor:
        words, mask = padded(minibatch)
        logits = network(words, mask=mask).transpose(1, 2)
        losses = F.cross_entropy(logits, words, reduction="none")
        return (losses * mask).sum(1) / mask.sum(1)

    examples = [torch.randint(WORDS, (n,)) for n in lengths(4, 19)]
    return Case(network, examples, one, own, own_tolerance=SINGLE, cells=[network])


@model("encoder, ALiBi")
def alibi() -> Case:
    return encoder(alibi_pos_bias=True)


@model("encoder, talking heads, sandwich norm")
def talking_heads() -> Case:
    return encoder(attn_pre_talking_heads=True, sandwich_norm=True, rel_pos_bias=True)
