"""torch.vmap: the per-example function over examples of one shape.

vmap can't batch examples of different structure, so a minibatch is grouped by length. Trees and
parsers are excluded, because each group would contain one example.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import collate
from benchmarks.measure import Step, timed_losses
from benchmarks.workload import Workload


def _by_length(
    minibatch: Sequence[Any], name: str, function: Callable[[Tensor, Tensor], Tensor], target: str
) -> Tensor:
    """Runs the function on each group. Returns the losses in the order of the minibatch."""
    groups: dict[int, list[int]] = defaultdict(list)
    for i, example in enumerate(minibatch):
        groups[len(getattr(example, name))].append(i)
    losses, order = [], []
    for members in groups.values():
        ids = collate.tensor(np.stack([getattr(minibatch[i], name) for i in members]))
        targets = collate.tensor(np.stack([getattr(minibatch[i], target) for i in members]))
        losses.append(torch.vmap(function)(ids, targets))
        order += members
    return torch.cat(losses).index_select(0, collate.tensor(np.argsort(order)))


def bag_of_words(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    model: Any = workload.model

    def loss(words: Tensor, target: Tensor) -> Tensor:
        total = model.embedding(words[0])
        for word in words[1:]:
            total = total + model.embedding(word)
        return F.cross_entropy(model.classifier(total), target)

    return _by_length(minibatch, "word_ids", loss, "target_id")


def tagger(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    model: Any = workload.model

    def run(cell: Any, xs: Sequence[Tensor]) -> list[Tensor]:
        state, hidden = None, []
        for x in xs:
            state = cell(x, state)
            hidden.append(state[0])
        return hidden

    def loss(words: Tensor, tags: Tensor) -> Tensor:
        xs = [model.embedding(word).unsqueeze(0) for word in words]
        forward, backward = run(model.left_to_right, xs), run(model.right_to_left, xs[::-1])[::-1]
        losses = [
            F.cross_entropy(model.tagger(torch.cat(pair, dim=-1)), tag.unsqueeze(0))
            for *pair, tag in zip(forward, backward, tags, strict=True)
        ]
        return torch.stack(losses).sum()

    return _by_length(minibatch, "word_ids", loss, "tag_ids")


LOSSES: dict[str, Callable[[Workload, Sequence[Any]], Tensor]] = {
    "bag-of-words": bag_of_words,
    "tagger-gates": tagger,  # nn.LSTMCell has no batching rule
}


def variants(workload: Workload) -> dict[str, Callable[..., Step]]:
    """Returns the workload's step if vmap can express it."""
    losses = LOSSES.get(workload.name)
    return {} if losses is None else {"vmap": timed_losses(losses)}
