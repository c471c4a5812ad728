"""Autocast: eager's dtypes and values, with native rules over all instances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import Blocks, same
from helpers_contexts import autocast
from torch import Tensor, nn

BF16 = 3e-2  # relative to the largest value; for eight bits and another order of sums


def instances(n: int = 4, size: int = 6) -> list[Tensor]:
    return [torch.randn(2, size, requires_grad=True) for _ in range(n)]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)),
    "norms": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Softmax(-1)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.ReLU()),
    "attention": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("frozen", [False, True])
def test_modules(name: str, frozen: bool) -> None:
    def program(block: Blocks) -> Any:
        model = MODELS[name]().requires_grad_(not frozen)
        xs = instances()
        with block(), autocast():
            results = [model(x) for x in xs]
        torch.stack([r.float().square().sum() for r in results]).sum().backward()
        return results, xs, list(model.parameters())

    same(program, tolerance=BF16)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_linear_is_one_product_for_all_instances(frozen: bool, grad: bool) -> None:
    layer = nn.Linear(6, 3).requires_grad_(not frozen)
    with torch.set_grad_enabled(grad), ab.batch() as scope, autocast():
        results = [layer(x) for x in instances(8)]
    assert all(r.dtype == torch.bfloat16 for r in results)
    rows = [row for row in scope.report().signatures if row.op == "aten::linear"]
    assert [(row.rule, row.instances, row.batches) for row in rows] == [("native", 8, 1)]


def test_weights_that_autocast_does_not_keep_are_cast_once() -> None:
    """Tests frozen weights, and autocast without cache. A write causes a new cast."""

    def program(block: Blocks) -> Any:
        frozen, xs = torch.randn(3, 6), instances()
        trained = nn.Linear(6, 3)
        with block(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            first = [F.linear(x, frozen) + trained(x) for x in xs]
            frozen.mul_(2)
            with torch.no_grad():
                trained.weight.add_(1)
                quiet = [trained(x) for x in xs]
            second = [F.linear(x, frozen) + trained(x) for x in xs]
        sum(r.float().sum() for r in second).backward()
        return first, quiet, second, xs, list(trained.parameters())

    same(program, tolerance=BF16)


def test_one_autocast_around_several_blocks() -> None:
    """The cache of autocast then contains casts from a block, which outlive the block."""

    def program(block: Blocks) -> Any:
        model, losses = nn.LSTMCell(6, 3), []
        with autocast():
            for _ in range(2):
                h = c = torch.zeros(2, 3)
                with block():
                    for x in instances():
                        h, c = model(x, (h, c))
                    losses.append((h * c).float().sum())
                losses.append(model(torch.ones(2, 6))[0].float().sum())
        sum(losses).backward()
        return losses, list(model.parameters())

    same(program, tolerance=BF16)


def test_an_error_within() -> None:
    """The cache of autocast, which outlives the block, contains no lost tensors."""

    def program(block: Blocks) -> Any:
        layer, x, kept = nn.Linear(6, 3), torch.ones(2, 6), []

        def run() -> None:
            with block():
                kept.append(layer(x))
                layer(torch.ones(2, 5))

        with autocast():
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                run()
            again = layer(x)
        (again.float().sum() * 2).backward()
        return kept, again, list(layer.parameters())

    same(program, tolerance=BF16)


def test_cells_run_op_by_op() -> None:
    def program(block: Blocks) -> Any:
        layer = nn.Linear(6, 3)
        function: Callable[[Tensor], Tensor] = lambda x: layer(x).tanh()  # noqa: E731
        called = ab.cell(function) if block.enabled else function
        xs = instances()
        with block():
            with autocast():
                results = [called(x * 1) for x in xs]
            plain = [called(x * 1) for x in xs]
        sum(r.float().sum() for r in [*results, *plain]).backward()
        return results, plain, xs, list(layer.parameters())

    report = same(program, tolerance=BF16)
    assert any("autocast" in row.reason for row in report.at_once)
