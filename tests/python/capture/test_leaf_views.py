"""Views made under no_grad() of tensors with a history, and detached tensors of written memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

LINEAR = nn.Linear(4, 4)


def instances() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(n, 4) for n in (3, 5, 4, 3)]


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "select": lambda y: (y[:, 0] > 0).float().mean(),
    "transpose": lambda y: y.t().sum(),
    "view": lambda y: y.view(-1).amax(),
    "chunk": lambda y: y.chunk(2, 1)[1].sum(),
    "unsqueeze": lambda y: y[None].mean(),
    "reshape": lambda y: y.reshape(-1, 2).sum(0),
    "view of a view": lambda y: y[:, :2].t()[0].exp(),
    "detached first": lambda y: y.detach()[:, 0].exp(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_metric_does_not_flush(name: str) -> None:
    xs, metric = instances(), VIEWS[name]
    losses, metrics = [], []
    LINEAR.zero_grad()
    with ab.batch(adaptive=False) as scope:
        for x in xs:
            y = LINEAR(x)
            with torch.no_grad():
                metrics.append(metric(y))
            losses.append(y.exp().sum())
    assert len(scope.report().flushes) == 1
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(metrics, [metric(LINEAR(x)).detach() for x in xs])
    assert not any(value.requires_grad for value in metrics)
    expected = torch.autograd.grad(sum(LINEAR(x).exp().sum() for x in xs), LINEAR.weight)[0]
    torch.testing.assert_close(LINEAR.weight.grad, expected)


def made_without_grad(x: Tensor) -> tuple[Tensor, Tensor]:
    y = LINEAR(x)
    with torch.no_grad():
        return y, y[:, 0]


def test_such_a_view_is_a_leaf_that_requires_grad() -> None:
    for enabled in (False, True):
        with ab.batch(enabled=enabled, adaptive=False):
            y, view = made_without_grad(instances()[0])
            assert view.requires_grad
            assert view.is_leaf
        assert (view.requires_grad, view.is_leaf, view._is_view()) == (True, True, True)
        assert view._base is y
        with pytest.raises(RuntimeError, match="no_grad"):
            view.mul_(2)


def test_with_gradients_it_is_used_as_a_leaf() -> None:
    x = instances()[0]
    for enabled in (False, True):
        LINEAR.zero_grad()
        with ab.batch(enabled=enabled, adaptive=False) as scope:
            _, view = made_without_grad(x)
            (view * 3).sum().backward()
        assert view.grad is None
        assert LINEAR.weight.grad is None  # the gradient ends at the view
    assert "no_grad" in scope.report().flushes[0].reason


WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu_": lambda y: y.relu_(),
    "leaky_relu_": F.leaky_relu_,
    "mul_": lambda y: y.mul_(2),
    "part": lambda y: y.index_fill_(0, torch.tensor([0]), 1.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_detached_tensors_of_written_memory(name: str) -> None:
    write = WRITES[name]

    def one(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = write(LINEAR(x) + 1)
        detached = y.detach()
        return y.sum(), detached.exp(), detached[0] * y[0]

    xs = instances()
    with ab.batch(adaptive=False) as scope:
        found = [one(x) for x in xs]
    assert len(scope.report().flushes) == 1
    expected = [one(x) for x in xs]
    torch.testing.assert_close(found, expected)
    for ours, eager in zip(found, expected, strict=True):
        assert [t.requires_grad for t in ours] == [t.requires_grad for t in eager]
        gradients = [
            torch.autograd.grad(loss + product.sum(), LINEAR.weight)[0]
            for loss, _, product in (ours, eager)
        ]
        torch.testing.assert_close(*gradients)


BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "a result": lambda x: LINEAR(x),
    "a view of a result": lambda x: LINEAR(x)[1:],
    "a parameter": lambda x: LINEAR.weight,
    "a written result": lambda x: (LINEAR(x) + 1).relu_(),
    "a leaf that is a view": lambda x: x.view(-1, 4).requires_grad_(),
    "a detached result": lambda x: LINEAR(x).detach(),
}


# In inference mode, eager raises an error when the result of `unsafe_split` is used.
MODES = [(torch.no_grad, view) for view in ("select", "unbind", "unsafe_split", "reshape")]
MODES += [(torch.inference_mode, view) for view in ("select", "unbind", "reshape")]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize(("mode", "view"), MODES)
@pytest.mark.parametrize("is_kept", [True, False])
def test_flags_are_eagers(base: str, mode: type, view: str, is_kept: bool) -> None:
    views = {
        "select": lambda y: y.select(0, 0),
        "unbind": lambda y: y.unbind(0)[1],
        "unsafe_split": lambda y: y.unsafe_split(1)[0],
        "reshape": lambda y: y.reshape(-1),
    }

    def flags(enabled: bool) -> list[bool | None]:
        with ab.batch(enabled=enabled, adaptive=False):
            y = BASES[base](instances()[0])
            with mode():
                found = views[view](y)
            inside = [found.requires_grad, found.is_leaf]
            if not is_kept:
                del y
        found_after = [found.requires_grad, found.is_leaf, found.grad_fn is None]
        if found.requires_grad:
            (found * 2).sum().backward()
        return inside + found_after + [found.grad is None]

    assert flags(True) == flags(False)
