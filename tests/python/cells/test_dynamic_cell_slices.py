"""Dynamic cells that read and write slices whose bounds are data: ``out[start:stop] = f(x)``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_autobatch as ab
from helpers_dynamic_cells import Counted, compare
from torch import Tensor, nn

DOUBLE, WIDTH, TYPES = torch.double, 4, 3
SIZES = (6, 9, 4, 7, 12, 5, 8, 10)
WEIGHT = nn.Parameter(torch.randn(TYPES, WIDTH, WIDTH, dtype=DOUBLE))
BIAS = nn.Parameter(torch.randn(TYPES, WIDTH, dtype=DOUBLE))

Function = Callable[[Tensor, Tensor], Tensor]


def calls() -> list[tuple[Tensor, Tensor]]:
    """Rows, ``[n, WIDTH]``, and the first row of each type, with the number of rows at the end."""
    torch.manual_seed(0)
    made = []
    for n in SIZES:
        types = torch.randint(TYPES, (n,)).sort().values
        made.append((torch.randn(n, WIDTH, dtype=DOUBLE), _bounds(types)))
    return made


def _bounds(types: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.long), types.bincount(minlength=TYPES).cumsum(0)])


def linear_by_type(x: Tensor, bounds: Tensor) -> Tensor:
    """The loop of PyTorch Geometric's ``HeteroLinear``."""
    out = x.new_empty(x.size(0), WIDTH)
    for i, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):  # noqa: RUF007
        out[start:stop] = x[start:stop] @ WEIGHT[i]
    out += BIAS[0]
    return out


def open_bounds(x: Tensor, bounds: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[: bounds[1]] = x[: bounds[1]] @ WEIGHT[0]
    out[bounds[2] :] = x[bounds[2] :] @ WEIGHT[1]
    return out * 2


def broadcast(x: Tensor, bounds: Tensor) -> Tensor:
    out = x @ WEIGHT[0]
    out[bounds[1] : bounds[2]] = x[0] * 3
    return out.tanh()


def negative(x: Tensor, bounds: Tensor) -> Tensor:
    out = x @ WEIGHT[0]
    out[-3:-1] = x[:2] @ WEIGHT[1]
    return out + bounds[1]


def beyond(x: Tensor, bounds: Tensor) -> Tensor:
    out = x @ WEIGHT[0]
    out[bounds[1] : 100] = x[bounds[1] :] @ WEIGHT[1]
    return out.tanh()


def reversed_bounds(x: Tensor, bounds: Tensor) -> Tensor:
    out = x @ WEIGHT[0]
    out[bounds[2] : bounds[1]] = x[:1]
    return out.tanh()


def transposed(x: Tensor, bounds: Tensor) -> Tensor:
    out = (x @ WEIGHT[0]).t().contiguous().t()
    out[bounds[1] : bounds[2]] = x[bounds[1] : bounds[2]] @ WEIGHT[1]
    return out.t().reshape(-1)


def an_alias(x: Tensor, bounds: Tensor) -> Tensor:
    out = x @ WEIGHT[0]
    first = out[:2]
    out[bounds[1] : bounds[2]] = x[bounds[1] : bounds[2]] @ WEIGHT[1]
    return torch.cat([first, out.tanh()])


def another_dtype(x: Tensor, bounds: Tensor) -> Tensor:
    out = x @ WEIGHT[0]
    out[bounds[1] : bounds[2]] = (x[bounds[1] : bounds[2]] * 3).float()
    return out.tanh()


FUNCTIONS: dict[str, Function] = {
    "linear by type": linear_by_type,
    "open bounds": open_bounds,
    "broadcast": broadcast,
    "negative bounds": negative,
    "a bound beyond the end": beyond,
    "reversed bounds": reversed_bounds,
    "another layout": transposed,
    "an alias": an_alias,
    "another dtype": another_dtype,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_eager_mode(name: str) -> None:
    compare(FUNCTIONS[name], calls() * 3, adaptive=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_eager_mode(name: str) -> None:
    function = FUNCTIONS[name]
    cell = ab.cell(function, dynamic=True)

    def gradients(called: Function, enabled: bool) -> list[Tensor]:
        xs = [x.clone().requires_grad_() for x, _ in calls()]
        for _ in range(3):
            with ab.batch(enabled=enabled, adaptive=False):
                pairs = zip(xs, calls(), strict=True)
                losses = [called(x, bounds).square().sum() for x, (_, bounds) in pairs]
                loss = torch.stack(losses).sum()
        return list(torch.autograd.grad(loss, [*xs, WEIGHT, BIAS], allow_unused=True))

    torch.testing.assert_close(gradients(cell, True), gradients(function, False))


@pytest.mark.parametrize("name", ["linear by type", "open bounds", "broadcast"])
def test_one_program_serves_all_bounds(name: str) -> None:
    function = Counted(FUNCTIONS[name])
    cell = ab.cell(function, dynamic=True)
    for _ in range(3):
        with ab.batch(adaptive=False) as scope:
            _ = [cell(*each) for each in calls()]
    assert function.runs == 2
    assert len(scope.report().flushes) == 1
    assert scope.report().batches < 40


def test_rows_that_are_all_replaced_get_gradients_of_zeros() -> None:
    def function(x: Tensor, value: Tensor) -> Tensor:
        out = x @ WEIGHT[0]
        out[:] = value
        return out * 2

    cell = ab.cell(function, dynamic=True)
    for n in (3, 5, 3, 5, 3, 5):
        WEIGHT.grad = None
        with ab.batch(adaptive=False):
            cell(
                torch.randn(n, WIDTH, dtype=DOUBLE), torch.ones(n, WIDTH, dtype=DOUBLE)
            ).sum().backward()
        assert torch.equal(WEIGHT.grad, torch.zeros_like(WEIGHT))


def test_a_value_of_another_length_is_an_error() -> None:
    def function(x: Tensor, bounds: Tensor) -> Tensor:
        out = x @ WEIGHT[0]
        out[bounds[1] : bounds[2]] = x[: x.size(0) - 3]
        return out.tanh()

    rows = torch.randn(9, WIDTH, dtype=DOUBLE)
    cell = ab.cell(function, dynamic=True)
    with ab.batch(adaptive=False):
        for n in (6, 7, 8, 9):
            cell(rows[:n], torch.tensor([0, 1, n - 2, n]))
    with pytest.raises(RuntimeError, match="size"), ab.batch(adaptive=False):
        cell(rows, torch.tensor([0, 2, 4, 9]))
