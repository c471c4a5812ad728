"""torch.compile around a block has a graph break at the block, without a warning."""

from __future__ import annotations

import importlib
import re
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

linear = nn.Linear(4, 3)


def with_block(xs: list[Tensor]) -> Tensor:
    ys = [2 * x for x in xs]
    with ab.batch():
        zs = [linear(y) for y in ys]
    return torch.stack(zs).sum()


def with_map(xs: list[Tensor]) -> Tensor:
    return torch.stack(ab.map(lambda x: linear(2 * x), xs)).sum()


def with_is_pending(xs: list[Tensor]) -> Tensor:
    with ab.batch():
        zs = [linear(2 * x) for x in xs]
        assert ab.is_pending(zs[0])
    return torch.stack(zs).sum()


def with_if(xs: list[Tensor]) -> Tensor:
    with ab.batch():
        zs = [linear(2 * x) for x in xs]
        if zs[0].sum() > 1e9:
            zs = []
    return torch.stack(zs).sum()


@ab.batch
def decorated(xs: list[Tensor]) -> list[Tensor]:
    return [linear(2 * x) for x in xs]


def with_decorator(xs: list[Tensor]) -> Tensor:
    return torch.stack(decorated(xs)).sum()


def modules_of_the_core() -> list[str]:
    """Returns the modules of the package that the C++ core imports when it needs them."""
    sources = Path(__file__).parents[3] / "csrc"
    texts = [path.read_text() for path in sources.rglob("*.cpp")]
    return sorted({name for t in texts for name in re.findall(r'"(torch_autobatch\._[a-z_]+)"', t)})


@pytest.mark.parametrize("name", modules_of_the_core())
def test_what_the_core_imports_is_not_compiled(name: str) -> None:
    for function in vars(importlib.import_module(name)).values():
        if isinstance(function, types.FunctionType) and function.__module__ == name:
            assert function._torchdynamo_disable, function  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize(
    "score",
    [with_block, with_map, with_is_pending, with_if, with_decorator],
    ids=lambda score: score.__name__,
)
def test_it_breaks_the_graph_without_a_warning(score: Callable[[list[Tensor]], Tensor]) -> None:
    torch._dynamo.reset()
    xs = [torch.randn(4) for _ in range(3)]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        result = torch.compile(score, backend="eager")(xs)
    assert [str(warning.message) for warning in warned] == []
    rows = [row for row in ab.last_report().signatures if row.op == "aten::linear"]
    assert [(row.instances, row.launches) for row in rows] == [(3, 1)]
    torch.testing.assert_close(result, score(xs))
