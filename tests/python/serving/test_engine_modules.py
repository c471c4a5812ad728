"""Requests that set attributes of the module they share."""

from __future__ import annotations

import torch
import torch_autobatch as ab
from torch import Tensor, nn

DOUBLE = torch.float64


class Recurrent(nn.Module):
    """Keeps its state in an attribute between two reads, as many tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=DOUBLE)
        self.hidden = torch.zeros(3, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = torch.zeros(3, dtype=DOUBLE)
        for row in x:
            self.hidden = self.layer(self.hidden + row).tanh()
            if self.hidden.sum().item() > 1e9:
                break
        return self.hidden


def test_a_request_reads_the_attribute_that_it_has_set() -> None:
    torch.manual_seed(1)
    model = Recurrent().eval()
    requests = [torch.randn(1 + n % 4, 3, dtype=DOUBLE) for n in range(24)]
    with torch.no_grad():
        expected = [model(x) for x in requests]
    with ab.Engine(model) as engine:
        found = [future.result(10) for future in [engine.submit(x) for x in requests]]
        engine._take_report()
        reasons = [flush.reason for flush in engine._loop.report.flushes]
    torch.testing.assert_close(found, expected)
    assert any("because it has set Recurrent.hidden" in reason for reason in reasons), reasons


def test_a_stream_that_sets_an_attribute_is_complete() -> None:
    model = Recurrent().eval()

    def steps(x: Tensor) -> object:
        for n in range(1, len(x) + 1):
            yield model(x[:n])

    x = torch.randn(5, 3, dtype=DOUBLE)
    with torch.no_grad():
        expected = [model(x[:n]) for n in range(1, 6)]
    with ab.Engine(steps) as engine:
        found = [list(engine.stream(x)) for _ in range(3)]
    for items in found:
        torch.testing.assert_close(items, expected)


def test_modules_are_as_before_while_no_request_runs() -> None:
    code = nn.Module.__setattr__.__code__
    model = Recurrent().eval()
    during: list[bool] = []

    def function(x: Tensor) -> Tensor:
        during.append(nn.Module.__setattr__.__code__ is code)
        return model(x)

    with ab.Engine(function) as engine:
        engine.submit(torch.randn(2, 3, dtype=DOUBLE)).result(10)
        # The action runs while no request is running.
        between: list[bool] = []
        engine.between(lambda: between.append(nn.Module.__setattr__.__code__ is code)).result(10)
    assert (during, between) == ([False], [True])
