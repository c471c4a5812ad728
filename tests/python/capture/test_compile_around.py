"""torch.compile around a block breaks the graph there, and says nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

linear = nn.Linear(4, 3)


def score(xs: list[Tensor]) -> Tensor:
    ys = [2 * x for x in xs]
    with ab.batch():
        zs = [linear(y) for y in ys]
    return torch.stack(zs).sum()


@pytest.mark.slow
def test_it_breaks_the_graph_without_a_warning() -> None:
    xs = [torch.randn(4) for _ in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        result = torch.compile(score, backend="eager")(xs)
    assert (ab.last_report().nodes, ab.last_report().launches) == (3, 1)
    torch.testing.assert_close(result, score(xs))
