"""Ops that write their result to a given tensor (``out=``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

LINEAR = nn.Linear(4, 4)


def instances() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, 4) for n in (3, 5, 4, 3)]


def offsets(counts: Tensor) -> Tensor:
    """Does the same as ``utils.cumsum`` of PyTorch Geometric."""
    out = counts.new_empty((counts.size(0) + 1,))
    out[:1] = 0
    torch.cumsum(counts, 0, out=out[1:])
    return out


def scaled(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    assert torch.mul(x, 2, out=out) is out
    return out


def onto_itself(x: Tensor) -> Tensor:
    y = x.exp()
    torch.add(y, y.flip(0), alpha=2, out=y)
    return y * 3


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "offsets": lambda x: offsets((LINEAR(x).detach() > 0).sum(1)),
    "scaled": lambda x: scaled(LINEAR(x).detach()),
    "onto itself": lambda x: onto_itself(LINEAR(x).detach()),
    "product": lambda x: torch.matmul(
        LINEAR(x).detach(), torch.ones(4, 2), out=x.new_empty(len(x), 2)
    ).sin(),
}


@pytest.mark.parametrize("name", CASES)
def test_the_write_does_not_flush(name: str) -> None:
    xs, function = instances(), CASES[name]
    with ab.batch(adaptive=False) as scope:
        found = [function(x) for x in xs]
    assert len(scope.report().flushes) == 1
    torch.testing.assert_close(found, [function(x) for x in xs])


@pytest.mark.parametrize("size", [(2,), (3, 4)])
def test_eager_resizes_and_casts(size: tuple[int, ...]) -> None:
    x = instances()[0]
    resized = torch.empty(*size, 1)
    with ab.batch(adaptive=False):
        y = LINEAR(x).detach()
        with pytest.warns(UserWarning, match="resized"):
            torch.exp(y, out=resized)
    torch.testing.assert_close(resized, LINEAR(x).detach().exp())
    with ab.batch(adaptive=False):
        cast = torch.empty(x.shape, dtype=torch.double)
        torch.exp(LINEAR(x).detach(), out=cast)
    torch.testing.assert_close(cast, LINEAR(x).detach().exp().double())


def test_eager_refuses_gradients() -> None:
    x = instances()[0]
    with ab.batch(), pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.exp(LINEAR(x), out=torch.empty_like(x))
