"""entmax: attention with few nonzero weights, compared with padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from entmax import Entmax15Loss, entmax15, entmax_bisect, sparsemax
from torch import Tensor, nn

from benchmarks.real.case import Case, lengths, model, padded

HIDDEN, CLASSES = 32, 6


class Attention(nn.Module):
    """A query that attends to any number of rows, and a classifier with a sparse loss."""

    def __init__(self, weights: Callable[..., Tensor]) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.key, self.value = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, CLASSES)
        self.weights = weights

    def forward(self, query: Tensor, rows: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.key(rows) @ self.query(query).unsqueeze(-1)
        if mask is not None:
            scores = scores.masked_fill(~mask[..., None], -1e9)
        attended = self.weights(scores, dim=-2).transpose(-1, -2) @ self.value(rows)
        return self.out(attended.squeeze(-2))


def case(weights: Callable[..., Tensor]) -> Case:
    network = Attention(weights)
    loss = Entmax15Loss(reduction="none")

    def one(example: Any) -> Tensor:
        query, rows, label = example
        return loss(network(query, rows)[None], label)[0]

    def own(minibatch: Sequence[Any]) -> Tensor:
        rows, mask = padded([rows for _, rows, _ in minibatch])
        queries = torch.stack([query for query, _, _ in minibatch])
        labels = torch.cat([label for _, _, label in minibatch])
        return loss(network(queries, rows, mask), labels)

    examples = [
        (torch.randn(HIDDEN), torch.randn(n, HIDDEN), torch.randint(CLASSES, (1,)))
        for n in lengths(4, 19)
    ]
    return Case(network, examples, one, own)


@model("sparsemax")
def sparse() -> Case:
    return case(sparsemax)


@model("1.5-entmax")
def entmax() -> Case:
    return case(entmax15)


@model("entmax by bisection")
def bisection() -> Case:
    return case(lambda scores, dim: entmax_bisect(scores, alpha=1.3, dim=dim))
