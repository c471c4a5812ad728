"""Many instances, many reads, in bounded memory."""

from __future__ import annotations

import resource

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn


def peak() -> int:
    """Returns the peak memory of this process, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


@pytest.mark.slow
@pytest.mark.parametrize("max_live", [None, 500])
def test_ten_thousand_instances_with_a_hundred_reads_each(max_live: int | None) -> None:
    """Only instances that have started have a stack."""
    layer = nn.Linear(4, 4)
    xs = torch.randn(10_000, 4).unbind()

    def function(x: Tensor) -> int:
        steps = 0
        with torch.no_grad():
            for _ in range(100):
                x = layer(x).tanh()
                steps += int(x.sum().item() > 0)
        return steps

    before = peak()
    results = ab.map(function, xs, max_live=max_live)
    grown = peak() - before
    with torch.no_grad():
        x, expected = torch.stack(xs), torch.zeros(10_000, dtype=torch.long)
        for _ in range(100):
            x = layer(x).tanh()
            expected += x.sum(-1) > 0
    differ = sum(a != b for a, b in zip(results, expected.tolist(), strict=True))
    assert differ <= 20  # sums near zero may round to the other sign
    assert grown < (120 if max_live else 900)


def test_what_ended_instances_leave_is_freed() -> None:
    """Memory does not grow with the number of maps."""
    layer = nn.Linear(4, 4)
    xs = torch.randn(100, 4).unbind()

    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = layer(x).tanh()
            if x.sum() > 1:
                break
        return x.sum()

    def run() -> None:
        torch.stack(ab.map(function, xs)).sum().backward()

    for _ in range(20):
        run()
    before = peak()
    for _ in range(100):
        run()
    assert peak() - before < 20
