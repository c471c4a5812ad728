"""Each Python binding in the table of elementwise ops is captured by its fast path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch_autobatch as ab
from helpers_switches import uses
from torch import Tensor, nn

TABLE = Path(__file__).resolve().parents[3] / "csrc/autobatch/kernels/elementwise_ops.inc"
BINDINGS = sorted(
    set(re.findall(r"\b(METHOD|TORCH|NN)\((\w+)\)", TABLE.read_text().split("#endif\n\n")[-1]))
)
MODULES = sorted(set(re.findall(r"\bNN(?:_INPLACE)?_MODULE\((\w+), \w+\)", TABLE.read_text())))


def call(kind: str, op: str, x: Tensor) -> Tensor:
    if kind == "METHOD":
        return getattr(x, op)()
    return getattr(torch if kind == "TORCH" else torch._C._nn, op)(x)


WEIGHT = torch.ones(3, dtype=torch.float64, requires_grad=True)
DATA = [0.25 + torch.rand(2, 3, dtype=torch.float64) / 2 for _ in range(3)]


def inputs() -> list[Tensor]:
    return [WEIGHT * x for x in DATA]


def test_the_table_was_read() -> None:
    assert ("METHOD", "tanh") in BINDINGS
    assert ("NN", "gelu") in BINDINGS
    assert "Tanh" in MODULES


@pytest.mark.needs("direct_calls")
@pytest.mark.parametrize(("kind", "op"), BINDINGS)
def test_a_call_skips_the_dispatcher(kind: str, op: str) -> None:
    with ab.batch(adaptive=False) as scope:
        xs = inputs()
        before = uses("direct_calls")
        results = [call(kind, op, x) for x in xs]
        assert uses("direct_calls") >= before + len(xs) - 1  # the first call fills a cache
    assert scope.report().batches == 2
    torch.testing.assert_close(results, [call(kind, op, x) for x in xs])


@pytest.mark.needs("leaf_modules")
@pytest.mark.parametrize("name", [name for name in MODULES if hasattr(nn, name)])
def test_a_module_is_captured_as_one_call(name: str) -> None:
    module = getattr(nn, name)()
    with ab.batch(adaptive=False) as scope:
        xs = inputs()
        before = uses("leaf_modules")
        results = [module(x) for x in xs]
        assert uses("leaf_modules") >= before + len(xs) - 1
    assert scope.report().batches == 2
    torch.testing.assert_close(results, [module(x) for x in xs])
