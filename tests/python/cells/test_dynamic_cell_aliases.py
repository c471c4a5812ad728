"""Dynamic cells: assumptions of programs about aliases, strides, weights and random numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

SIZES = (3, 5, 3, 5, 4, 3, 5)
WEIGHT = nn.Parameter(torch.randn(4, 4))


def tail(y: Tensor) -> Tensor:
    return ((y * 2 + 1).tanh() * 3) - 1


def compare(function: Callable[..., Any], calls: Iterator[tuple[Tensor, ...]]) -> None:
    """Compares results, strides, and arguments after the call. Each call has its own block."""
    cell = ab.cell(function, dynamic=True)
    for given in calls:
        ours, theirs = [x.clone() for x in given], [x.clone() for x in given]
        with ab.batch(adaptive=False):
            found = cell(*ours)
        expected = function(*theirs)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours, theirs)
        for a, b in zip(_flat(found), _flat(expected), strict=True):
            assert a.stride() == b.stride()


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for item in value for t in _flat(item)]


def rows(*, transposed_from: int = 99) -> Iterator[tuple[Tensor]]:
    for i, n in enumerate(SIZES):
        yield (torch.randn(4, n).t() if i >= transposed_from else torch.randn(n, 4),)


def contiguous_of_own(x: Tensor) -> Any:
    a = x * 2
    b = a.contiguous()
    b.add_(1)
    return tail(a), tail(b)


def contiguous_of_argument(x: Tensor) -> Any:
    b = x.contiguous()
    b.add_(1)
    return tail(b)


def selected_by_a_tensor(x: Tensor) -> Any:
    a = x * 2
    row = a[torch.tensor(1)]
    row.add_(1)
    return tail(a), tail(row)


def transposed_by_einsum(x: Tensor) -> Any:
    a = x * 2
    torch.einsum("ij->ji", a).add_(1)
    return tail(a)


def diagonal_by_einsum(x: Tensor) -> Any:
    a = x @ x.t()
    torch.einsum("ii->i", a).mul_(2)
    return tail(a)


def with_another_dimension(x: Tensor) -> Any:
    a = x * 2
    torch.atleast_3d(a).add_(1)
    return tail(a)


def scattered_in_columns(x: Tensor) -> Any:
    a = torch.zeros(4, x.shape[0]).t()
    a.scatter_add_(0, torch.zeros(x.shape, dtype=torch.long), x)
    b = torch.zeros(4, x.shape[0]).t()
    b.masked_fill_(x > 0, 2.0)
    return a, b, tail(x)


@pytest.mark.parametrize(
    "function",
    [
        contiguous_of_own,
        contiguous_of_argument,
        selected_by_a_tensor,
        transposed_by_einsum,
        diagonal_by_einsum,
        with_another_dimension,
        scattered_in_columns,
    ],
)
def test_what_shares_memory_and_how_it_lies(function: Callable[..., Any]) -> None:
    compare(function, rows())
    compare(function, rows(transposed_from=2))


def test_a_mask_that_does_not_fit_is_an_error_still() -> None:
    def function(x: Tensor, mask: Tensor) -> Tensor:
        a = x * 2
        a.masked_fill_(mask, 0.0)
        return tail(a)

    cell = ab.cell(function, dynamic=True)
    with ab.batch(adaptive=False):
        for n in (3, 5, 3, 5):
            cell(torch.randn(n, 4), torch.ones(n, 4, dtype=torch.bool))
    with pytest.raises(RuntimeError), ab.batch(adaptive=False):
        cell(torch.randn(1, 4), torch.ones(5, 4, dtype=torch.bool))


def test_gradients_that_are_on_within() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return tail(x @ WEIGHT.t())

    cell = ab.cell(function, dynamic=True)
    for n in SIZES:
        x = torch.randn(n, 4)
        with torch.no_grad(), ab.batch(adaptive=False):
            ours = cell(x)
        with torch.no_grad():
            theirs = function(x)
        grads = [torch.autograd.grad(y.sum(), WEIGHT) for y in (ours, theirs)]
        torch.testing.assert_close(grads[0], grads[1])


def test_weights_that_move_within_their_storage() -> None:
    flat = torch.randn(64)
    weight = nn.Parameter(flat[:16].view(4, 4))

    def function(x: Tensor) -> Tensor:
        return tail(x @ weight.t())

    cell = ab.cell(function, dynamic=True)
    for step, n in enumerate(SIZES * 2):
        weight.data = flat[step : step + 16].view(4, 4)
        x = torch.randn(n, 4)
        with torch.no_grad(), ab.batch(adaptive=False):
            ours = cell(x)
        torch.testing.assert_close(ours, function(x).detach())


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.to(self.layer.weight.dtype))
        y = tail(y) if y.requires_grad else y * 100
        return y + F.linear(x.to(y.dtype), self.layer.weight).shape[1]


def test_what_is_asked_of_weights_may_change() -> None:
    model = Asks()
    cell = ab.cell(Asks(), dynamic=True)
    cell.load_state_dict(model.state_dict())

    def check() -> None:
        for n in SIZES:
            x = torch.randn(n, 4)
            with ab.batch(adaptive=False):
                ours = cell(x)
            theirs = model(x)
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs)

    check()
    for m in (model, cell):
        m.requires_grad_(False)
    check()
    for m in (model, cell):
        m.requires_grad_(True).double()
    check()
    for m in (model, cell):
        torch.manual_seed(0)
        m.layer.weight.data = torch.randn(6, 4, dtype=torch.double)
        m.layer.bias.data = torch.randn(6, dtype=torch.double)
    check()


def test_attention_whose_batch_is_broadcast() -> None:
    def function(q: Tensor, k: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, k)
        return tail(y) / y.shape[0]

    pairs = ((2, 2), (3, 3), (4, 4), (1, 3), (1, 2), (1, 3))
    compare(function, ((torch.randn(a, 2, 5, 8), torch.randn(b, 2, 5, 8)) for a, b in pairs))


def test_gradients_of_weights_are_read_anew() -> None:
    def function(x: Tensor) -> Tensor:
        assert WEIGHT.grad is not None
        return tail(x + WEIGHT.grad[0])

    cell = ab.cell(function, dynamic=True)
    for n in SIZES * 2:
        WEIGHT.grad = torch.randn(4, 4)
        x = torch.randn(n, 4)
        with ab.batch(adaptive=False):
            ours = cell(x)
        torch.testing.assert_close(ours, function(x))
    WEIGHT.grad = None


def test_numbers_that_a_failed_program_has_drawn_are_drawn_again() -> None:
    def function(x: Tensor) -> Tensor:
        m = x[x > 0]
        y = F.dropout(m, 0.5)
        return tail(y).sum() + (1 if m.shape[0] > 6 else 0)

    cell = ab.cell(function, dynamic=True)
    for seed in range(9):
        xs = [torch.randn(n, 4) for n in SIZES]
        found = []
        for granularity in ("op", "cell"):
            torch.manual_seed(seed)
            with ab.batch(adaptive=False, granularity=granularity):
                ys = [cell(x) for x in xs]
            found.append([*ys, torch.rand(1)[0]])
        torch.testing.assert_close(found[0], found[1])


@dataclasses.dataclass
class Config:
    scale: float = 2.0


def test_objects_that_were_there_before_are_given_back_as_they_are() -> None:
    config = Config()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.names, self.sizes = Config(), {"a": 1}, [1]

        def forward(self, x: Tensor, given: Config) -> Any:
            return tail(x), given, self.config, self.names, self.sizes

    model: Any = ab.cell(Model(), dynamic=True)
    for n in SIZES:
        with ab.batch(adaptive=False):
            _, a, b, c, d = model(torch.randn(n, 4), config)
        assert a is config
        assert b is model.config
        assert c is model.names
        assert d is model.sizes
