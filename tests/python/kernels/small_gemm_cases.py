"""Rows times a weight: any number of rows, below and above the limits of a kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import check, rand
from torch import Tensor

ROWS = [1, 2, 3, 4, 5, 6, 7, 11, 15, 16, 17, 24, 32, 33, 40, 65, 130]
CAPABILITY = torch.backends.cpu.get_cpu_capability()
needs_kernel = pytest.mark.skipif(
    CAPABILITY not in ("AVX2", "AVX512"), reason="the kernels are for AVX2 and AVX-512"
)
MOST_ROWS = 32 if CAPABILITY == "AVX2" else max(ROWS)  # for more rows, a BLAS computes the product
SIZES = [(8, 16), (7, 16), (8, 15), (64, 64), (70, 33), (300, 20), (67, 203), (129, 24)]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def layers(w: Tensor, b: Tensor, x: Tensor) -> list[Tensor]:
    """Products with a weight [m, k] that is row-major, column-major, or a part of a matrix."""
    out = []
    for _ in range(3):
        h = F.linear(x, w, b).tanh()
        x = (h @ w).tanh() + torch.mm(h, w) - F.linear(h, w.t())
        out += [h, x, F.linear(h[:, 1:], w.t()[:, 1:]), h.t().contiguous().t() @ w]
    return out


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("k", "m"), SIZES)
def test_products_of_any_number_of_rows(k: int, m: int) -> None:
    weights = [rand(m, k, dtype=torch.float) / k, rand(m, dtype=torch.float)]
    check(layers, *(rand(n, k, dtype=torch.float) for n in ROWS), parameters=weights)


def on_the_left(w: Tensor, y: Tensor) -> list[Tensor]:
    """Products of one matrix and each instance's matrix, plain and transposed."""
    h = (w @ y.tanh()).tanh()
    return [h, torch.mm(w.t(), h), w @ torch.cat([y[1:], y[:1]]).tanh(), w[:, 1:] @ y.tanh()[1:]]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("m", "k", "n"), [(32, 64, 32), (8, 8, 16), (7, 9, 15), (50, 33, 17), (64, 9, 23)]
)
def test_a_matrix_by_those_of_instances(m: int, k: int, n: int) -> None:
    weights = [rand(m, k, dtype=torch.float) / k]
    check(on_the_left, *(rand(k, n, dtype=torch.float) for _ in range(9)), parameters=weights)
    check(on_the_left, rand(k, n, dtype=torch.float), parameters=weights)


@needs_kernel  # on other machines, a BLAS computes the product
def test_many_terms_are_summed_in_parts() -> None:
    w = torch.ones(64, 30000)
    x = torch.full((20, 30000), 0.1)
    expected = x.double().sum(1)[0].item()
    with ab.batch():
        results = [F.linear(row, w) for row in (x * 1).split(2)] + [
            row @ w.t().contiguous() for row in (x * 1).split(2)
        ]
    for result in results:
        torch.testing.assert_close(result, torch.full_like(result, expected), rtol=5e-5, atol=0)


@needs_kernel
@pytest.mark.parametrize("rows", [rows for rows in ROWS if rows <= MOST_ROWS])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    w, b = torch.randn(48, 64).t(), torch.randn(64)
    x = torch.randn(rows, 48)
    with ab.batch():
        alone = F.linear(x[:1].mul(2), w, b)
    with ab.batch():
        results = [F.linear(row.mul(2), w, b) for row in x.split(1)]
    assert torch.equal(results[0], alone)


def test_what_is_not_finite_stays_in_its_row() -> None:
    w = torch.randn(32, 32, requires_grad=True)
    x = torch.randn(20, 32)
    x[3, 5], x[7, 0] = float("nan"), float("inf")
    with ab.batch():
        results = [(row.tanh() * row) @ w for row in x]
    expected = [(row.tanh() * row) @ w for row in x]
    torch.testing.assert_close(torch.stack(results), torch.stack(expected), equal_nan=True)


@pytest.mark.parametrize("enabled", [True, False])
def test_without_the_library(enabled: bool) -> None:
    weights = [rand(32, 24, dtype=torch.float) / 24, rand(32, dtype=torch.float)]
    with torch.backends.mkldnn.flags(enabled=enabled):
        check(layers, *(rand(n, 24, dtype=torch.float) for n in (1, 9, 30)), parameters=weights)
