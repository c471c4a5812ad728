"""mixture-of-experts: an expert's capacity depends on the sentence, so the package can't batch."""

from __future__ import annotations

import torch
from mixture_of_experts import HeirarchicalMoE, MoE
from torch import Tensor, nn

from benchmarks.real.case import Case, lengths, model

HIDDEN = 16


# With these options, the words for the second expert are not chosen at random.
ALL = {"second_policy_train": "all", "second_policy_eval": "all"}


def case(network: nn.Module) -> Case:
    def one(h: Tensor) -> Tensor:
        out, auxiliary = network(h[None])
        return out.square().mean() + auxiliary

    return Case(network, [torch.randn(n, HIDDEN) for n in lengths(4, 11)], one)


@model("four experts")
def experts() -> Case:
    return case(MoE(dim=HIDDEN, num_experts=4, hidden_dim=32, **ALL))


@model("two levels of experts")
def levels() -> Case:
    return case(HeirarchicalMoE(dim=HIDDEN, num_experts=(2, 2), hidden_dim=32, **ALL))
