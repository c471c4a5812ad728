"""zuko: normalizing flows on sets of different sizes, compared with one merged set."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import zuko
from torch import Tensor

from benchmarks.real.case import Case, lengths, model

FEATURES, CONTEXT = 3, 4


def case(flow: zuko.flows.Flow) -> Case:
    def one(example: tuple[Tensor, Tensor]) -> Tensor:
        points, context = example
        return -flow(context).log_prob(points).mean()

    def own(minibatch: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        points, contexts = zip(*minibatch, strict=True)
        sizes = [len(part) for part in points]
        context = torch.stack(contexts).repeat_interleave(torch.tensor(sizes), dim=0)
        densities = flow(context).log_prob(torch.cat(points))
        return torch.stack([-part.mean() for part in densities.split(sizes)])

    examples = [(torch.randn(n, FEATURES), torch.randn(CONTEXT)) for n in lengths(3, 10, 16)]
    return Case(flow, examples, one, own)


@model("neural spline flow")
def spline() -> Case:
    return case(zuko.flows.NSF(FEATURES, CONTEXT, transforms=2, bins=4, hidden_features=[16]))


@model("masked autoregressive flow")
def autoregressive() -> Case:
    return case(zuko.flows.MAF(FEATURES, CONTEXT, transforms=2, hidden_features=[16]))
