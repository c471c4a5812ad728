"""A pending value is written to a tensor that no captured op made. The tensor becomes pending if no
code can observe the difference. Otherwise a flush gives eager's behavior."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_capture import DOUBLE, is_pending, rand
from torch import Tensor, nn

Program = Callable[[Tensor], Tensor]


def euler(h: Tensor) -> Tensor:
    y = torch.linspace(0, 1, 4, dtype=DOUBLE)
    for _ in range(3):
        y += 0.1 * torch.tanh(y.clone() * h[0])
    return y


def write(target: Tensor, at: Any, value: Tensor) -> Tensor:
    target[at] = value
    return target


PROGRAMS: dict[str, Program] = {
    "eye": lambda h: torch.eye(4, dtype=DOUBLE)[:].clone().add_(h[0]),
    "arange": lambda h: torch.arange(4, dtype=DOUBLE).mul_(h[0]),
    "tensor": lambda h: torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=DOUBLE).sub_(h[1], alpha=2),
    "euler": euler,
    "iadd": lambda h: torch.eye(4, dtype=DOUBLE).__iadd__(h[0]),
    "copy": lambda h: torch.arange(4, dtype=DOUBLE).copy_(h[0]),
    "item": lambda h: write(torch.arange(4, dtype=DOUBLE), 1, h[0, 0]),
    "slice": lambda h: write(torch.eye(4, dtype=DOUBLE), slice(1, 3), h[:2]),
    "mask": lambda h: write(torch.arange(4, dtype=DOUBLE), torch.arange(4) > 2, h[0, :1]),
    "index_add": lambda h: torch.eye(4, dtype=DOUBLE).index_add_(0, torch.tensor([1, 1]), h[:2]),
    "scatter_add": lambda h: torch.eye(4, dtype=DOUBLE).scatter_add_(
        0, torch.zeros(1, 4, dtype=torch.long), h[:1]
    ),
    "keyword": lambda h: torch.arange(4, dtype=DOUBLE).add_(other=h[0]),
    "other layout": lambda h: torch.arange(12, dtype=DOUBLE).view(3, 4).t().clone().mul_(h[0, 0]),
    "zeros": lambda h: torch.zeros(4, dtype=DOUBLE).add_(h[0]),
}


def run(program: Program, enabled: bool) -> tuple[list[Any], ab.batch]:
    torch.manual_seed(0)
    linear = nn.Linear(3, 4).double()
    with ab.batch(enabled=enabled) as scope:
        results = [program(linear(rand(3 + i % 2, 3))) for i in range(6)]
    sum((r.square().sum() for r in results), torch.zeros((), dtype=DOUBLE)).backward()
    strides = [r.stride() for r in results]
    versions = [r._version for r in results]
    return [results, [p.grad for p in linear.parameters()], strides, versions], scope


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_new_tensor_becomes_pending(name: str) -> None:
    (expected, *meta), _ = (o := run(PROGRAMS[name], False))[0], o[1]
    (results, *ours), scope = (o := run(PROGRAMS[name], True))[0], o[1]
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours[0], meta[0], rtol=1e-9, atol=1e-9)
    assert ours[1:] == meta[1:]
    assert len(scope.report().flushes) == 1
    assert not scope.report().at_once


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_new_tensor_becomes_pending_in_inference_mode(name: str) -> None:
    linear = nn.Linear(3, 4).double()
    given = [rand(3 + i % 2, 3) for i in range(6)]
    with torch.inference_mode():
        expected = [PROGRAMS[name](linear(x)) for x in given]
        with ab.batch(adaptive=False) as scope:
            results = [PROGRAMS[name](linear(x)) for x in given]
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-9)
    assert [r.stride() for r in results] == [r.stride() for r in expected]
    assert all(r.is_inference() for r in results)
    assert len(scope.report().flushes) == 1
    assert not scope.report().at_once


def test_a_constant_of_inference_mode_stays_an_inference_tensor() -> None:
    weight = rand(4, 4).requires_grad_()
    with ab.batch(adaptive=False):
        with torch.inference_mode():
            ones, leaf = torch.ones(4, dtype=DOUBLE), torch.zeros(4, requires_grad=True)
        row = leaf[None]
        product = ones + rand(4)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            weight * ones
    flags = [t.is_inference() for t in (ones, leaf, row, product)]
    assert flags == [True, True, True, False]
    assert leaf.requires_grad


def test_the_object_stays_itself() -> None:
    linear = nn.Linear(3, 4).double()
    x = rand(3, 3)
    with ab.batch() as scope:
        y = torch.arange(4, dtype=DOUBLE)
        y.note = "mine"  # type: ignore[attr-defined]
        same, seen = y, weakref.ref(y)
        held = {y: 1}
        y += linear(x)[0]
        assert is_pending(y)
        assert y is same
        assert seen() is y
        assert held[y] == 1
        assert y.requires_grad
    assert len(scope.report().flushes) == 1
    assert y.note == "mine"  # type: ignore[attr-defined]
    torch.testing.assert_close(y, torch.arange(4, dtype=DOUBLE) + linear(x)[0])
    del y, same, held
    gc.collect()
    assert seen() is None


def views(y: Tensor) -> Any:
    return y[1:]


def numpy_view(y: Tensor) -> Any:
    return torch.from_numpy(y.numpy())


def storage_of(y: Tensor) -> Any:
    return y.untyped_storage()


def saved(y: Tensor) -> Any:
    w = torch.ones(4, dtype=DOUBLE, requires_grad=True)
    return (w * y).sum()


@pytest.mark.parametrize("other", [views, numpy_view, storage_of, lambda y: y.data])
def test_not_where_somebody_else_looks_at_the_memory(other: Callable[[Tensor], Any]) -> None:
    linear = nn.Linear(3, 4).double()
    x = rand(3, 3)
    results = []
    for enabled in (False, True):
        y = torch.arange(4, dtype=DOUBLE)
        with ab.batch(enabled=enabled):
            also = other(y)
            with torch.no_grad():
                y += linear(x)[0]
        seen = also if isinstance(also, Tensor) else torch.tensor(also.tolist())
        results.append([y, seen])
    torch.testing.assert_close(*results)


def test_a_value_that_autograd_saved_is_eagers_error() -> None:
    linear = nn.Linear(3, 4).double()
    w = torch.ones(4, dtype=DOUBLE, requires_grad=True)
    for enabled in (False, True):
        y = torch.arange(4, dtype=DOUBLE)
        loss = (w * y).sum()
        with ab.batch(enabled=enabled):
            y += linear(rand(3, 3))[0]
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_read_it_before_keeps_what_it_read() -> None:
    linear = nn.Linear(3, 4).double()
    x = rand(3, 3)
    results = []
    for enabled in (False, True):
        linear.zero_grad()
        with ab.batch(enabled=enabled):
            h = linear(x)[0]
            y = torch.arange(4, dtype=DOUBLE)
            before = h + y
            y += h
            after = h + y
        (before.sum() + after.sum()).backward()
        results.append([before, after, y, linear.weight.grad])
    torch.testing.assert_close(*results)


def test_parameters_and_leaves_stay_what_they_are() -> None:
    linear = nn.Linear(3, 4).double()
    w = nn.Parameter(torch.ones(4, dtype=DOUBLE))
    with ab.batch(), torch.no_grad():
        w += linear(torch.ones(2, 3, dtype=DOUBLE))[0]
    assert w.is_leaf
    assert isinstance(w, nn.Parameter)
    torch.testing.assert_close(w.detach(), 1 + linear(torch.ones(2, 3, dtype=DOUBLE))[0].detach())


def test_a_buffer_of_a_module() -> None:
    class Sum(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4, dtype=DOUBLE))

        @torch.no_grad()
        def forward(self, h: Tensor) -> None:
            self.total += h

    linear, module = nn.Linear(3, 4).double(), Sum()
    xs = [rand(3) for _ in range(4)]
    with ab.batch() as scope:
        for x in xs:
            module(linear(x))
    assert len(scope.report().flushes) == 1
    torch.testing.assert_close(module.total, sum(linear(x) for x in xs).detach())
    assert not is_pending(module.state_dict()["total"])


def test_older_new_of_a_pending_tensor() -> None:
    linear = nn.Linear(3, 4).double()
    with ab.batch():
        h = linear(rand(2, 3))
        made = h.new(2, 4).fill_(1), h.new([1, 2]), h.new(h.size()), h.data.new(3)
        total = made[0] + h
    assert [tuple(m.shape) for m in made] == [(2, 4), (2,), (2, 4), (3,)]
    assert all(m.dtype == DOUBLE for m in made)
    torch.testing.assert_close(total, h + 1)
