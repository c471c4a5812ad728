"""Dynamic cells with BatchNorm in training: conditions are checked before the statistics change."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

WIDTH = 8


class Net(nn.Module):
    def __init__(self, head: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.strided = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.head = head
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.head(self, self.norm(self.conv(x)).relu())


def gated(net: Net, h: Tensor) -> Tensor:
    a, b = h.chunk(2, 1)
    return (a * b.sigmoid()).mean(-1)


HEADS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "contiguous": lambda net, h: net.linear(h.transpose(1, 2).contiguous()).mean(1),
    "chunk": gated,
    "split": lambda net, h: h.split(WIDTH // 2, 1)[1].mean(-1),
    "squeeze": lambda net, h: h.squeeze(0).mean(-1),
    "squeeze all": lambda net, h: h.mean(-1).squeeze(),
    "unbind": lambda net, h: h.unbind(0)[0].mean(-1),
    "strided": lambda net, h: net.strided(h).mean(-1),
}
LATE: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "odd length": lambda net, h: (
        F.pad(net.strided(h), (0, net.strided(h).shape[-1] % 2)).mean(-1)
        if net.strided(h).shape[-1] % 2
        else net.strided(h).mean(-1)
    ),
    "write after contiguous": lambda net, h: h.transpose(1, 2).contiguous().mul_(2).mean(1),
}


def trained(net: nn.Module, model: nn.Module) -> list[Tensor]:
    """Returns results, gradients and statistics after two steps."""
    torch.manual_seed(1)
    found: list[Tensor] = []
    for _ in range(2):
        with ab.batch():
            results = [net(torch.randn(1, WIDTH, n)) for n in (9, 12, 7, 10, 15)]
            torch.cat([result.flatten() for result in results]).sum().backward()
        found += results
    return found + [p.grad for p in model.parameters() if p.grad is not None] + [*model.buffers()]


@pytest.mark.parametrize("name", HEADS | LATE)
def test_heads(name: str) -> None:
    model = Net((HEADS | LATE)[name])
    eager = copy.deepcopy(model)
    with ab.eager():
        expected = trained(eager, eager)
    found = trained(ab.cell(model, dynamic=True), model)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert model.runs == (2 if name in HEADS else 10)
