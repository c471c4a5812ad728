"""Matrix-vector products with a matrix per instance, for any strides and without copies."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch_autobatch as ab
from helpers_rules import check, rand
from torch import Tensor

SIZES = [1, 2, 3, 8, 15, 16, 17, 33]

# Matrices [n, m] with different strides or places in memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.tanh(),
    "transposed": lambda x: x.t().contiguous().tanh().t(),
    "every_second": lambda x: x.repeat_interleave(2, 1).tanh()[:, ::2],
    "columns_of_wider": lambda x: torch.cat([x, x], 1).tanh()[:, : x.shape[1]],
    "expanded": lambda x: x[:1].tanh().expand(x.shape),
}


def products(x: Tensor, y: Tensor) -> list[Tensor]:
    """Returns all products of [n, m] and [m, 1] and of their transposes, in all spellings."""
    return [
        x @ y,
        y.t() @ x.t(),
        torch.mm(x, y),
        x.mv(y.squeeze(1)),
        x @ y.squeeze(1),
        y.squeeze(1) @ x.t(),
        x[0] @ y.squeeze(1),
        (y @ x[:1]).sum(1),
        torch.bmm(x.unsqueeze(0), y.unsqueeze(0)),
        torch.bmm(torch.stack([y.t(), y.t() * 2]), torch.stack([x.t(), x.t()])),
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients(layout: str, dtype: torch.dtype) -> None:
    sizes = list(itertools.product(SIZES, SIZES)) if layout == "rows" else [(3, 17), (16, 5)]
    for n, m in sizes:
        instances = [(rand(n, m, dtype=dtype), rand(m, 1, dtype=dtype)) for _ in range(3)]
        check(lambda x, y: products(LAYOUTS[layout](x), y.tanh()), *instances)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_matrix_or_one_vector_for_all(threads: int) -> None:
    """The gradients of shared operands are sums over the instances."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parameters = [rand(40, 33), rand(33, 1)]

        def function(matrix: Tensor, vector: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
            matrix, vector, x = matrix.tanh(), vector.tanh(), x.tanh()
            return [matrix @ y, x @ vector, vector.t() @ x.t(), y @ vector.t(), x.t() @ (x @ y)]

        instances = [(rand(40, 33), rand(33, 1)) for _ in range(70)]
        check(function, *instances, parameters=parameters)
    finally:
        torch.set_num_threads(before)


def test_different_numbers_of_rows() -> None:
    instances = [(rand(n, 5), rand(5), rand(n)) for n in (1, 4, 2, 9, 1)]
    check(lambda x, v, u: [x.tanh().mv(v.tanh()), u.tanh() @ x.tanh()], *instances)


def test_parts_of_one_value() -> None:
    """Matrix and vector share memory, which gets the gradients of both."""
    instances = [rand(6, 6) for _ in range(4)]

    def function(x: Tensor) -> list[Tensor]:
        x = x.tanh()
        return [x @ x[:, :1], x[2:3] @ x, x[:, 1:2] @ x[3:4], x.mv(x[0]), x.mv(x.t()[1])]

    check(function, *instances)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_special_values(value: float) -> None:
    x = rand(5, 17).index_fill(1, torch.tensor([16]), value)
    instances = [(x.clone(), rand(17, 1)) for _ in range(3)]
    check(lambda x, y: [(x * 1.0) @ (y * 1.0), (y.t() * 1.0) @ (x.t() * 1.0)], *instances)


def test_in_a_cell() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = x.tanh() @ y.tanh()
        return h, h @ y.t()

    cell = ab.cell(function)
    instances = [(rand(5, 7), rand(7, 1)) for _ in range(4)]
    check(lambda x, y: list(cell(x, y)) + list(cell(x.sin(), y.sin())), *instances)


def test_a_long_chain_of_held_values() -> None:
    """The work for each held value does not depend on the number of held values."""
    x = rand(3).requires_grad_()
    with ab.batch():
        values = [x]
        for _ in range(20000):
            values.append(values[-1] * 0.9999)
    values[-1].sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full_like(x, 0.9999**20000))
