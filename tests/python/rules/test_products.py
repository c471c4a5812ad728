"""Products of an instance's matrices, softmax over a last dimension, and pairs of rows.

The number of batches does not depend on the sizes.
"""

from __future__ import annotations

import pytest
import torch
import torch_autobatch as ab
from helpers_ragged import WIDTH, Case, check_lengths
from helpers_rules import rand

W = WIDTH

CASES: dict[str, Case] = {
    # products of an instance's own matrices
    "product_adjacency": Case(
        lambda a, h: a.tanh() @ h.tanh(), lambda n: (rand(n, n), rand(n, W)), empty=False
    ),
    "product_gram": Case(lambda x: x.tanh() @ x.tanh().t(), empty=False),
    "product_columns": Case(lambda x: x.tanh().t() @ x.tanh(), empty=False),
    "product_mm": Case(
        lambda x, y: torch.mm(x.tanh(), y.tanh()),
        lambda n: (rand(n, 2 * n + 1), rand(2 * n + 1, W)),
        empty=False,
    ),
    "product_bmm": Case(
        lambda x, y: torch.bmm(x.tanh(), y.tanh()),
        lambda n: (rand(2, n, W), rand(2, W, n + 1)),
        empty=False,
    ),
    "product_batch_and_matrix": Case(
        lambda x, y: x.tanh() @ y.tanh(),
        lambda n: (rand(2, n, W), rand(W, n + 1)),
        empty=False,
    ),
    "product_broadcast": Case(
        lambda x, y: x.tanh() @ y.tanh(),
        lambda n: (rand(1, n, W), rand(3, W, n + 1)),
        empty=False,
    ),
    "product_broadcast_right": Case(
        lambda x, y: x.tanh() @ y.tanh(),
        lambda n: (rand(3, 2, n, W), rand(2, W, n + 1)),
        empty=False,
    ),
    "product_stack_of_weights": Case(
        lambda w, x: x.tanh().unsqueeze(0) @ w, parameters=[(3, W, W)], empty=False
    ),
    "product_matrix_and_weights": Case(
        lambda w, x: x.tanh() @ w, parameters=[(3, W, W)], empty=False
    ),
    "product_bmm_of_weights": Case(
        lambda w, x: torch.bmm(x.tanh().expand(3, -1, -1), w), parameters=[(3, W, W)], empty=False
    ),
    "product_bmm_many": Case(
        lambda x, y: torch.bmm(x.tanh(), y.tanh()),
        lambda n: (rand(n, 2, W), rand(n, W, 3)),
        empty=False,
    ),
    "product_dot": Case(
        lambda x, y: x.tanh() @ y.tanh(), lambda n: (rand(n), rand(n)), empty=False
    ),
    "product_left_shared": Case(
        lambda w, x: w @ x.tanh(), lambda n: rand(W, n), [(3, W)], one=False, empty=False
    ),
    "product_attention": Case(
        lambda x: (x.mul(2) @ x.mT).softmax(-1) @ x.tanh(), lambda n: rand(1, 2, n, W), empty=False
    ),
    "product_heads": Case(
        lambda x: x.tanh().transpose(1, 2) @ x.sin().permute(0, 2, 3, 1),
        lambda n: rand(1, n, 2, W),
        empty=False,
    ),
    "einsum": Case(
        lambda x: torch.einsum("bihd,bjhd->bhij", x.tanh(), x.sin()),
        lambda n: rand(1, n, 2, W),
        empty=False,
    ),
    "einsum_weight": Case(
        lambda w, x: torch.einsum("nd,hd->nh", x.tanh(), w), parameters=[(3, W)], empty=False
    ),
    "tensordot": Case(
        lambda x, y: torch.tensordot(x.tanh(), y.tanh(), dims=([1], [0])),
        lambda n: (rand(n, W), rand(W, n + 1)),
        empty=False,
    ),
    "softmax_last": Case(lambda x: x.tanh().softmax(-1), lambda n: rand(2, 3, n), empty=False),
    "log_softmax_last": Case(
        lambda x: x.tanh().log_softmax(-1), lambda n: rand(n, n + 1), empty=False
    ),
    # pairs of an instance's rows
    "pairs_column": Case(
        lambda x: x.tanh() - x.sum(1, keepdim=True), lambda n: rand(n + 1, n + 1), empty=False
    ),
    "pairs_of_columns": Case(lambda x: x[:, :1].exp() - x[:, 0], empty=False, one=False),
    "pairs_of_rows": Case(lambda x: x[:, None].tanh() * x[None].sin(), empty=False, one=False),
    "pairs_compare": Case(
        lambda x: (x.tanh() < x.sum(1, keepdim=True)).float(),
        lambda n: rand(n + 1, n + 1),
        empty=False,
    ),
    "pairs_maximum": Case(
        lambda x: torch.maximum(x.tanh(), x.sum(1, keepdim=True)),
        lambda n: rand(n + 1, n + 1),
        empty=False,
    ),
    "product_vector": Case(
        lambda a, v: a.tanh() @ v.tanh(), lambda n: (rand(n, n + 1), rand(n + 1)), empty=False
    ),
    "outer": Case(
        lambda a, b: torch.outer(a.tanh(), b.tanh()),
        lambda n: (rand(n + 1), rand(n + 2)),
        empty=False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_sizes_do_not_add_batches(name: str) -> None:
    check_lengths(CASES[name])


@pytest.mark.parametrize("whole", [True, False])
def test_a_product_of_a_tensor_with_itself(whole: bool) -> None:
    """Tests `x @ x.t()` of an instance's tensor, and rows of a weight times the weight."""
    weight = rand(6, W)
    instances = [rand(n, W) if whole else weight[n : n + 1] for n in (3, 2, 5)]
    with torch.no_grad(), ab.batch() as scope:
        found = [x @ (x if whole else weight).t() for x in instances]
    for result, x in zip(found, instances, strict=True):
        torch.testing.assert_close(result, x @ (x if whole else weight).t())
    (row,) = scope.report().signatures
    assert row.batches == 1
    assert (row.launches, row.rule) == (1, "native")
