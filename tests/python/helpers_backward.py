"""Code that the tests of backward share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor, nn

DOUBLE = torch.float64


SIZES = (3, 1, 5, 2)  # the number of steps of each instance


Block = Callable[[], ab.batch]


def rand(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=DOUBLE)


class Chain(nn.Module):
    """A recurrent cell over rows, with a parameter of each kind. ``states`` returns all steps."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.cell = nn.Linear(2 * width, width, dtype=DOUBLE)
        self.scale = nn.Parameter(rand(width))
        self.table = nn.Embedding(7, width, dtype=DOUBLE)
        self.start = nn.Parameter(rand(1, width))

    def states(self, ids: Tensor) -> list[Tensor]:
        states = [self.start]
        for i in ids.unbind():
            row = self.table(i).unsqueeze(0)
            states.append(torch.tanh(self.cell(torch.cat([states[-1], row], 1))) * self.scale)
        return states[1:]

    def forward(self, ids: Tensor) -> Tensor:
        return self.states(ids)[-1].square().sum()


def tensors_of(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_of(v)]
    return [value.detach().clone() if isinstance(value, Tensor) else value]


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def assert_close(values: Any, expected: Any) -> None:
    values, expected = tensors_of(values), tensors_of(expected)
    assert len(values) == len(expected)
    for i, (value, other) in enumerate(zip(values, expected, strict=True)):
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            torch.testing.assert_close(
                value,
                other,
                rtol=1e-9,
                atol=1e-9 * max(1.0, other.abs().max().item() if other.numel() else 0.0),
                msg=lambda message, i=i: f"value {i}: {message}",
            )
        else:
            assert value is other or value == other, f"value {i}: {value}, eager has {other}"


def same(scenario: Callable[[Block], Any]) -> Any:
    """Asserts that ``scenario(block)`` returns the same with and without batching."""

    def run(enabled: bool) -> Any:
        torch.manual_seed(1)
        return tensors_of(scenario(lambda: ab.batch(enabled=enabled)))

    eager = run(False)
    batched = run(True)
    assert_close(batched, eager)
    return batched


def losses_in(block: Block, model: nn.Module, instances: Sequence[Any]) -> list[Tensor]:
    with block():
        return [model(x) for x in instances]


def backward_sum(losses: list[Tensor]) -> None:
    torch.stack(losses).sum().backward()


def backward_each(losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward()
