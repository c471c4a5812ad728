"""Instances of a map that set attributes of a module they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

DOUBLE = torch.float64


class Spiking(nn.Module):
    """Keeps its state in attributes between two reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(3, 3, dtype=DOUBLE)
        self.state: Any = None
        self.register_buffer("last", torch.zeros(3, dtype=DOUBLE))

    def step(self, x: Tensor, before: Tensor) -> Tensor:
        if self.kind == "tensor":
            self.state = before
        elif self.kind == "tuple":
            self.state = (before, [before])
        elif self.kind == "buffer":
            self.last = before
        elif self.kind == "None":
            self.state = None
        spike = 1.0 if self.layer(x).sum().item() > 0 else 0.5
        if self.kind == "None":
            before = before if self.state is None else self.state * 100
            self.state = before
        held = {"tuple": lambda: self.state[1][0], "buffer": lambda: self.last}
        before = held.get(self.kind, lambda: self.state)()
        return self.layer(before).tanh() * spike + x


def inputs() -> list[Tensor]:
    return [torch.randn(n, 3, dtype=DOUBLE) for n in (2, 3, 4, 2, 1, 3)]


def run(module: Spiking) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        h = torch.zeros(3, dtype=DOUBLE)
        for row in x:
            h = module.step(row, h)
        return h.sum()

    return function


@pytest.mark.parametrize("kind", ["tensor", "tuple", "buffer", "None"])
def test_an_instance_reads_what_it_has_set(kind: str) -> None:
    module = Spiking(kind)
    parameters = list(module.parameters())

    def outcome(mapped: Callable[..., Any]) -> list[Any]:
        module.state = None
        module.last = torch.zeros(3, dtype=DOUBLE)
        module.zero_grad()
        results = mapped(run(module), inputs())
        torch.stack(results).sum().backward()
        return [*(r.detach() for r in results), *(p.grad.clone() for p in parameters)]  # type: ignore[union-attr]

    torch.manual_seed(1)
    expected = outcome(lambda function, xs: [function(x) for x in xs])
    torch.manual_seed(1)
    torch.testing.assert_close(outcome(ab.map), expected)


def test_sums_over_instances_are_complete() -> None:
    layer = nn.Linear(3, 3, dtype=DOUBLE)

    class Summing(nn.Module):
        total = torch.zeros((), dtype=DOUBLE)

        def forward(self, x: Tensor) -> Tensor:
            first = layer(x).sum().item()  # the examples take turns here
            self.total = self.total + first
            return layer(x) * layer(x).tanh().sum().item()

    xs = inputs()
    module, other = Summing(), Summing()
    results = ab.map(module, xs)
    assert ab.last_report().flushes, "no example waited"
    torch.testing.assert_close(results, [other(x) for x in xs])
    torch.testing.assert_close(module.total, other.total)


def test_the_report_names_the_attribute() -> None:
    with ab.batch(adaptive=False) as scope:
        ab.map(run(Spiking("tensor")), inputs())
    found = [finding for finding in scope.report().findings if "Spiking.state" in finding.what]
    assert found, scope.report()
    assert "local variable" in found[0].remedy


def test_numbers_and_new_modules_do_not_end_the_turns() -> None:
    class Counting(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3, dtype=DOUBLE)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            scale = nn.Linear(3, 3, dtype=DOUBLE)  # sets attributes of a new module
            with torch.no_grad():
                scale.weight.fill_(0.5), scale.bias.zero_()
            return scale(x) if self.layer(x).sum().item() > 0 else x

    module = Counting()
    with ab.batch() as scope:
        ab.map(module, inputs())
    assert module.calls == 6
    reads = [f.count for f in scope.report().flushes if "read" in f.reason or "item" in f.reason]
    assert reads == [1], scope.report().flushes


def test_pytorch_is_as_before_after_a_map() -> None:
    original = nn.Module.__setattr__
    code = original.__code__
    during = ab.map(lambda x: nn.Module.__setattr__.__code__ is code, inputs())
    assert during == [False] * 6
    assert nn.Module.__setattr__ is original
    assert original.__code__ is code
    with pytest.raises(ValueError, match="no"):
        ab.map(lambda x: (_ for _ in ()).throw(ValueError("no")), inputs())
    assert original.__code__ is code


def test_errors_of_assignments_are_pytorchs() -> None:
    def function(x: Tensor) -> str:
        module = nn.Linear(2, 2)
        module.extra = x
        assert module.extra is x
        with pytest.raises(TypeError, match="cannot assign") as caught:
            module.bias = x  # type: ignore[assignment]
        return str(caught.value)

    assert ab.map(function, inputs()) == [function(x) for x in inputs()]


def test_compiled_modules_may_set_attributes_after_a_map() -> None:
    class Keeping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last + 1

    ab.map(lambda x: x.tanh().sum().item(), inputs())
    module = Keeping()
    x = torch.ones(3)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), x * 2 + 1)
    torch.testing.assert_close(module.last, x * 2)
