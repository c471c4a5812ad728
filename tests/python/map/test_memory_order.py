"""Instances of a map that use shared memory in another order than a loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

SIZES = (3, 5, 2, 4)


class Shared(nn.Module):
    """Reads buffers before a read of a value, and writes to them after it."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Queue(Shared):
    """A queue of keys (MoCo). The pointer is read long before it is written."""

    keys: Tensor
    pointer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(8, 3))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        pointer = int(self.pointer)
        key = self.encode(x)
        if key.sum() > 0:
            key = key * 2
        loss = (key @ self.keys.clone().t()).logsumexp(-1).sum()
        if self.training:
            with torch.no_grad():
                self.keys[pointer : pointer + 1] = key.mean(0, keepdim=True)
                self.pointer[0] = (pointer + 1) % 8
        return loss


class Quantizer(Shared):
    """A third buffer is computed from the moving averages in two buffers (VQ-VAE)."""

    embed: Tensor
    size: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embed", torch.randn(5, 3))
        self.register_buffer("size", torch.ones(5))
        self.register_buffer("total", torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        code = torch.cdist(h, self.embed.clone()).argmin(-1)
        chosen = nn.functional.one_hot(code, 5).to(h.dtype)
        target = self.embed[code]
        if self.training:
            with torch.no_grad():
                if chosen.sum() > 1:
                    self.size.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(chosen.t() @ h, alpha=0.1)
                self.embed.copy_(self.total / self.size[:, None])
        return (h - target.detach()).square().mean()


class FirstData(Shared):
    """The first instance decides the normalization of all (ActNorm of normalizing flows)."""

    is_set: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_set", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        if self.training and not self.is_set:
            with torch.no_grad():
                if h.sum() > -1e9:
                    self.mean.copy_(h.mean(0))
                self.is_set.fill_(True)
        return (h - self.mean.clone()).square().sum()


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def examples() -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(n, 4).double() for n in SIZES]


Loop = Callable[[Callable[[Tensor], Tensor], Sequence[Tensor]], list[Tensor]]


def step(model: nn.Module, loop: Loop) -> dict[str, Tensor]:
    """Returns the losses, gradients and buffers of a training step. Restores the buffers first."""
    before = copy.deepcopy(dict(model.named_buffers()))
    model.zero_grad()
    losses = torch.stack(loop(lambda x: model(x), examples()))
    losses.sum().backward()
    found = {"losses": losses.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        found[name] = buffer.clone()
        buffer.copy_(before[name])
    return found


def in_a_loop(function: Callable[[Any], Tensor], instances: Sequence[Any]) -> list[Tensor]:
    return [function(x) for x in instances]


@pytest.mark.parametrize("kind", [Queue, Quantizer, FirstData])
def test_a_map_that_breaks_the_order_warns_once_and_keeps_it_from_then_on(
    kind: type[nn.Module],
) -> None:
    model = model_of(kind)
    expected = step(model, in_a_loop)
    with pytest.warns(RuntimeWarning, match=r"of instance 0 writes to a tensor .* after instance"):
        step(model, ab.map)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            torch.testing.assert_close(step(model, ab.map), expected)


def test_a_model_is_watched_again_in_training() -> None:
    """In evaluation, the model writes to no buffer."""
    model = model_of(Queue)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model.eval(), ab.map)
    with pytest.warns(RuntimeWarning, match="after instance 3 has read it"):
        step(model.train(), ab.map)


class Normalized(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](self.encode(x))
        if h.sum() > -1e9:
            h = self.norms[1](h)
        return h.square().sum() + h[0].sum()


def rows(out: Tensor) -> Callable[[int, Tensor], None]:
    def write(i: int, h: Tensor) -> None:
        out[i] = h

    return write


def columns(out: Tensor) -> Callable[[int, Tensor], None]:
    def write(i: int, h: Tensor) -> None:
        out[:, i] = h

    return write


@pytest.mark.parametrize("writer", [rows, columns])
def test_instances_that_write_to_different_elements_keep_the_order(
    writer: Callable[[Tensor], Callable[[int, Tensor], None]],
) -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    out = torch.zeros(4, 4)
    write = writer(out)

    def one(i: int) -> Tensor:
        h = weight[i] * 2
        for _ in range(4 - i):  # later instances write first
            if h.sum() > 1e9:
                break
        write(i, h.detach())
        return h.sum()

    with warnings.catch_warnings(), ab.batch(adaptive=False) as scope:
        warnings.simplefilter("error")
        ab.map(one, range(4))
    assert len(scope.report().flushes) <= 5
    expected = weight.detach() * 2
    assert torch.equal(out, expected if writer is rows else expected.t())


def test_batch_norm_keeps_the_order_and_its_batches() -> None:
    model = model_of(Normalized)
    expected = step(model, in_a_loop)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(step(model, ab.map), expected)
        with ab.batch(adaptive=False) as scope:
            ab.map(model, examples())
    assert len(scope.report().flushes) == 2


def test_order_is_kept_for_a_model_that_is_gone() -> None:
    """The memory of a model that no longer exists is forgotten."""
    for _ in range(3):
        model = model_of(Queue)
        with pytest.warns(RuntimeWarning, match="after instance 3 has read it"):
            step(model, ab.map)


def check_order_is_learned(
    one: Callable[[Any], Tensor], instances: Sequence[Any], reset: Callable[[], object], match: str
) -> None:
    """The first map warns, and later maps give a loop's results. ``reset`` runs before each."""

    def results(loop: Callable[..., list[Tensor]]) -> Tensor:
        reset()
        with ab.batch(enabled=loop is ab.map, adaptive=False):
            found = loop(one, instances)
        return torch.stack(found).detach()

    expected = results(in_a_loop)
    with pytest.warns(RuntimeWarning, match=match):
        results(ab.map)
    for _ in range(2):
        torch.testing.assert_close(results(ab.map), expected)


@pytest.mark.parametrize(
    "read",
    [
        lambda y, b: y * b,
        lambda y, b: b + y,
        lambda y, b: torch.cat([y, b[None]]).sum(0),
        lambda y, b: torch.where(y > 0, y, b),
    ],
)
def test_operands_of_captured_ops_are_noticed(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    layer = nn.Linear(4, 4).double()
    shared = torch.ones(4).double()

    def one(x: Tensor) -> Tensor:
        y = read(layer(x), shared)
        if y.sum() < 1e9:
            shared.add_(1.0)
        return y.sum()

    check_order_is_learned(one, examples(), lambda: shared.fill_(1.0), "after instance")


def test_nested_maps_may_end_in_any_order() -> None:
    """The order of the outer map is still watched when the inner maps have ended."""
    layer = nn.Linear(4, 4).double()
    shared = torch.ones(4).double()

    def inner(x: Tensor) -> Tensor:
        y = layer(x)
        return y if y.sum() < 1e9 else y * 2

    def outer(_: int) -> Tensor:
        found = ab.map(inner, [x[0] for x in examples()])  # the maps that began first end first
        total = (torch.stack(found) * shared).sum()
        for _ in range(2):
            if total > 1e9:
                total = total * 2
        shared.add_(1.0)
        return total

    check_order_is_learned(outer, range(3), lambda: shared.fill_(1.0), "after instance")


def test_running_statistics_that_are_read_after_a_wait() -> None:
    layer, norm = nn.Linear(4, 3).double(), nn.BatchNorm1d(3).double()

    def one(x: Tensor) -> Tensor:
        y = norm(layer(x))
        if y.mean() > -9:
            y = y * 1
        assert norm.running_mean is not None
        return (y[0] * norm.running_mean).sum()

    check_order_is_learned(one, examples(), norm.reset_running_stats, "reads a tensor")
