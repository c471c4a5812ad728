"""Linear algebra on matrices: one batch for any number of matrices, with eager's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_ragged import Case, check_lengths
from helpers_rules import rand
from torch import Tensor

D = 3


def positive(x: Tensor) -> Tensor:
    """Returns positive definite matrices, if x is near the identity."""
    return x.tanh() @ x.tanh().mT


def matrices(n: int) -> Tensor:
    return rand(n, D, D) / 2 + 2 * torch.eye(D).double()


def nested(n: int) -> Tensor:
    return matrices(2 * n).view(n, 2, D, D)


def systems(n: int) -> tuple[Tensor, Tensor]:
    return matrices(n), rand(n, D, 2)


def signed(eigenvectors: Tensor) -> Tensor:
    """The sign of an eigenvector is arbitrary."""
    return eigenvectors.square()


def case(
    function: Callable[..., Tensor],
    make: Callable[[int], Any],
    parameters: Sequence[tuple[int, ...]] = (),
) -> Case:
    return Case(
        function, make, parameters, empty=False
    )  # the product of zero matrices has a separate batch


CASES: dict[str, Case] = {
    "cholesky": case(lambda x: torch.linalg.cholesky(positive(x)), matrices),
    "cholesky_of_nested": case(lambda x: torch.linalg.cholesky(positive(x)), nested),
    "cholesky_upper": case(lambda x: torch.linalg.cholesky(positive(x), upper=True), matrices),
    "cholesky_ex": case(lambda x: torch.linalg.cholesky_ex(positive(x)).L, matrices),
    "cholesky_of_transposed": case(lambda x: torch.linalg.cholesky(positive(x).mT), matrices),
    "cholesky_inverse": case(
        lambda x: torch.cholesky_inverse(torch.linalg.cholesky(positive(x))), matrices
    ),
    "cholesky_solve": case(
        lambda x, y: torch.cholesky_solve(y.sin(), torch.linalg.cholesky(positive(x))), systems
    ),
    "solve_triangular": case(
        lambda x, y: torch.linalg.solve_triangular(
            torch.linalg.cholesky(positive(x)), y.sin(), upper=False
        ),
        systems,
    ),
    "solve_triangular_from_right": case(
        lambda x, y: torch.linalg.solve_triangular(
            torch.linalg.cholesky(positive(x)).mT, y.sin().mT, upper=True, left=False
        ),
        systems,
    ),
    "solve": case(lambda x, y: torch.linalg.solve(positive(x), y.sin()), systems),
    "solve_triangular_for_one_matrix": case(
        lambda x, y: torch.linalg.solve_triangular(
            torch.linalg.cholesky(positive(x)), y[0].sin(), upper=False
        ),
        systems,
    ),
    "isclose": Case(lambda x: torch.isclose(x.sin(), x.sin().mT), matrices, empty=False, one=False),
    "tril_of_expanded": Case(
        lambda w, x: x.sin() * w.expand(x.shape).tril(), matrices, [(D, D)], False, False
    ),
    "inv_of_expanded": Case(
        lambda w, x: positive(w).expand(x.shape).inverse() @ x, matrices, [(D, D)], False, False
    ),
    "cholesky_of_conjugate": case(
        lambda x: torch.linalg.cholesky(positive(x).to(torch.cdouble).mH).real, matrices
    ),
    "inv": case(lambda x: torch.linalg.inv(positive(x)), matrices),
    "inverse_of_nested": case(lambda x: positive(x).inverse(), nested),
    "pinv": case(lambda x: torch.linalg.pinv(positive(x)), matrices),
    "det": case(lambda x: torch.linalg.det(positive(x)), matrices),
    "logdet_of_nested": case(lambda x: torch.logdet(positive(x)), nested),
    "slogdet": case(lambda x: torch.linalg.slogdet(positive(x)).logabsdet, matrices),
    "eigvalsh": case(lambda x: torch.linalg.eigvalsh(positive(x)), matrices),
    "eigh": case(lambda x: signed(torch.linalg.eigh(positive(x)).eigenvectors), matrices),
    "eigvals": case(lambda x: torch.linalg.eigvals(positive(x)).abs().sum(-1), matrices),
    "cond": case(lambda x: torch.linalg.cond(positive(x)), matrices),
    "matrix_rank": case(lambda x: torch.linalg.matrix_rank(x.sin()), matrices),
    "svdvals": case(lambda x: torch.linalg.svdvals(x.sin()), matrices),
    "svd": case(
        lambda x: signed(torch.linalg.svd(x.sin(), full_matrices=False).Vh),
        lambda n: rand(n, 4, D),
    ),
    "qr": case(lambda x: torch.linalg.qr(x.sin()).R, matrices),
    "matrix_exp": case(lambda x: torch.linalg.matrix_exp(x.sin()), matrices),
    "matrix_power": case(lambda x: torch.linalg.matrix_power(x.sin(), 3), matrices),
    "matrix_norm": case(lambda x: torch.linalg.matrix_norm(x.sin()), matrices),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_matrices_do_not_add_batches(name: str) -> None:
    check_lengths(CASES[name])


@pytest.mark.parametrize(
    "decompose",
    [torch.linalg.cholesky, torch.linalg.inv, lambda x: torch.linalg.eigh(x).eigenvectors],
)
def test_results_have_eagers_layout(decompose: Callable[[Tensor], Tensor]) -> None:
    """Eager's decompositions return column-major matrices."""
    w = rand(D, D).requires_grad_()
    inputs = [matrices(n) for n in (4, 1, 2)]
    with ab.batch(adaptive=False):
        found = [decompose(positive(x + w)) for x in inputs]
    for result, x in zip(found, inputs, strict=True):
        expected = decompose(positive(x + w))
        assert (result.shape, result.stride()) == (expected.shape, expected.stride())
        torch.testing.assert_close(result, expected)


def test_the_error_of_a_singular_matrix_is_eagers() -> None:
    w = rand(D, D).requires_grad_()
    inputs = [rand(3, D, D), torch.zeros(2, D, D, dtype=w.dtype), rand(2, D, D)]
    with pytest.raises(RuntimeError) as eager:
        torch.linalg.cholesky(inputs[1] @ w)
    with pytest.raises(RuntimeError) as found, ab.batch(adaptive=False):
        kept = [torch.linalg.cholesky((x @ w) @ (x @ w).mT) for x in inputs]
    del kept
    assert type(found.value) is type(eager.value)
    assert str(eager.value).split(":")[0] in str(found.value)
