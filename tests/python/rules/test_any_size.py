"""Ops over dimensions that differ between instances: one batch, with eager's results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_ragged import WIDTH, Case, check_lengths
from helpers_rules import rand
from torch import Tensor

W = WIDTH


def matrix(n: int) -> Tensor:
    return rand(n, 2 * n + 1)


def pair(n: int) -> tuple[Tensor, Tensor]:
    return rand(n, W), rand(n + 1, W)


# --- triangles, distances, joined tensors, losses, masks ------------------------------------------

OTHERS: dict[str, Case] = {
    "tril": Case(lambda x: x.sin().tril(-1), matrix),
    "triu": Case(lambda x: x.sin().triu(2), matrix),
    "triu_of_several": Case(lambda x: x.sin().triu(1), lambda n: rand(2, n, n)),
    "causal_mask": Case(
        lambda x: x.sin().masked_fill(torch.ones_like(x).triu(1) == 1, -1e9), matrix, empty=False
    ),
    "softmax_of_transposed": Case(
        lambda x: x.sin().transpose(0, 1).softmax(-1), lambda n: rand(n, 2, W), empty=False
    ),
    "sum_of_transposed": Case(lambda x: x.sin().t().sum(1), lambda n: rand(n, W), empty=False),
    "cosine_similarity": Case(
        lambda x: F.cosine_similarity(x.sin()[:, None], x.cos()[None], dim=-1),
        empty=False,
        one=False,
    ),
    "cosine_similarity_with_vector": Case(
        lambda q, x: F.cosine_similarity(x.sin(), q, dim=-1), parameters=[(W,)], empty=False
    ),
    "pairwise_distance": Case(lambda x: F.pairwise_distance(x.sin(), x.cos()), empty=False),
    "dist": Case(lambda x: torch.dist(x.sin(), x.cos()), empty=False),
    "cdist": Case(lambda x, y: torch.cdist(x.sin(), y.sin()), pair, empty=False, one=False),
    "cdist_by_product": Case(
        lambda x: torch.cdist(x.sin(), x.cos()), lambda n: rand(n + 25, W), empty=False
    ),
    "hstack": Case(lambda x: torch.hstack([x.sin(), x]), empty=False),
    "vstack": Case(lambda x: torch.vstack([x.sin(), x]), empty=False),
    "inner": Case(lambda x: torch.inner(x.sin(), x.cos()), empty=False, one=False),
    "logical_and": Case(lambda x: (x.sin() > 0) & (x.cos() > 0.5), empty=False),
    "triplet_margin_loss": Case(
        lambda x: F.triplet_margin_loss(x.sin(), x.cos(), x.tanh()), empty=False
    ),
    "margin_ranking_loss": Case(
        lambda x: F.margin_ranking_loss(x[:, 0].sin(), x[:, 1].sin(), x[:, 2].detach().sign()),
        empty=False,
    ),
}


# Reductions over a dimension in front of one whose size differs, and of a last dimension.
REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "sum_of_two": lambda x: x.sum((0, 1)),
    "sum_kept": lambda x: x.sum(1, keepdim=True),
    "mean": lambda x: x.mean(-3),
    "amax": lambda x: x.amax(0),
    "max_dim": lambda x: x.max(dim=0).values,
    "std": lambda x: x.std(1),
    "norm": lambda x: x.norm(dim=0),
    "logsumexp": lambda x: x.logsumexp(0),
    "prod": lambda x: x.prod(0),
}
for _name, _reduce in REDUCTIONS.items():
    OTHERS[f"{_name}_over_a_leading_dimension"] = Case(
        lambda x, reduce=_reduce: reduce(x.sin()), lambda n: rand(2, 3, n, W), empty=False
    )


@pytest.mark.parametrize("name", OTHERS)
def test_sizes_do_not_add_batches(name: str) -> None:
    check_lengths(OTHERS[name])


@pytest.mark.parametrize("rows", [3, 30])
def test_distance_of_equal_points_has_no_gradient(rows: int) -> None:
    """The diagonal has distances of 0, where the square root has no derivative."""
    x = rand(rows, W).requires_grad_()

    def gradient() -> Tensor:
        points = x.sin()
        equal = torch.cdist(points, points).diagonal().sum()
        return torch.autograd.grad(torch.cdist(points, points + 1).sum() + 0 * equal, x)[0]

    with ab.batch(adaptive=False):
        found = gradient()
    torch.testing.assert_close(found, gradient())


def test_cosine_similarity_of_short_vectors_has_eagers_gradient() -> None:
    x = torch.tensor([[0.0, 0.0], [1e-9, 0.0], [1.0, 2.0]], requires_grad=True)
    y = torch.ones(2)

    def loss() -> Tensor:
        return F.cosine_similarity(x * 1, y, dim=1).sum()

    with ab.batch(adaptive=False):
        found = torch.autograd.grad(loss(), x)
    torch.testing.assert_close(found, torch.autograd.grad(loss(), x))


# --- normalization --------------------------------------------------------------------------------

MEAN, VARIANCE = torch.linspace(-1, 1, W).double(), torch.linspace(0.5, 2, W).double()
VECTORS = [(W,), (W,)]


def sequences(n: int) -> Tensor:
    return rand(2, W, n + 1)


def sequence(n: int) -> Tensor:
    return rand(1, W, n + 1)


def eval_norm(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return F.batch_norm(x.sin(), MEAN, VARIANCE, w, b)


NORMS: dict[str, Case] = {
    "batch_norm_eval_rows": Case(eval_norm, parameters=VECTORS, empty=False),
    "batch_norm_eval_sequences": Case(eval_norm, sequences, VECTORS, empty=False),
    "batch_norm_eval_images": Case(eval_norm, lambda n: rand(1, W, n, n + 1), VECTORS, empty=False),
    "batch_norm_eval_without_weight": Case(
        lambda x: F.batch_norm(x.sin(), MEAN, VARIANCE), sequences, empty=False
    ),
    "batch_norm_eval_of_slices": Case(
        lambda x: F.batch_norm(x.sin()[..., 1:], MEAN, VARIANCE),
        lambda n: rand(1, W, n, n + 2),
        empty=False,
    ),
    "batch_norm_of_one_sequence": Case(
        lambda w, b, x: F.batch_norm(x.sin(), None, None, w, b, training=True),
        sequence,
        VECTORS,
        empty=False,
    ),
    "group_norm": Case(
        lambda w, b, x: F.group_norm(x.sin(), 2, w, b), sequences, VECTORS, empty=False
    ),
    "group_norm_rows": Case(
        lambda w, b, x: F.group_norm(x.sin(), 2, w, b), parameters=VECTORS, empty=False
    ),
    "group_norm_without_weight": Case(
        lambda x: F.group_norm(x.sin(), 1), lambda n: rand(1, W, n, 3), empty=False
    ),
    "instance_norm": Case(
        lambda w, b, x: F.instance_norm(x.sin(), weight=w, bias=b), sequences, VECTORS, empty=False
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str) -> None:
    check_lengths(NORMS[name])


@pytest.mark.parametrize("kind", ["BatchNorm1d", "InstanceNorm1d"])
def test_running_statistics_of_sequences(kind: str) -> None:
    options = {"track_running_stats": True, "affine": True}
    models = [getattr(torch.nn, kind)(W, **options).double() for _ in range(2)]
    instances = [sequence(n) for n in (3, 1, 9, 2, 3)]
    expected = [models[0](x) for x in instances]
    with ab.batch(adaptive=False) as scope:
        results = [models[1](x) for x in instances]
    torch.testing.assert_close(results, expected)
    assert not scope.report().at_once
    assert max(row.batches for row in scope.report().signatures) == 1
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


# --- products with sparse matrices ----------------------------------------------------------------


def edges(n: int) -> Tensor:
    ends = torch.arange(3 * n)
    return torch.stack([ends % n, ends * ends % n])  # with repetitions


def coo(n: int) -> Tensor:
    return torch.sparse_coo_tensor(
        edges(n), torch.arange(1.0, 3 * n + 1).double(), (n, n), check_invariants=True
    )


LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "coo": coo,
    "coalesced": lambda n: coo(n).coalesce(),
    "csr": lambda n: coo(n).coalesce().to_sparse_csr(),
    "csc": lambda n: coo(n).coalesce().to_sparse_csc(),
}
SPARSE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": torch.mm,
    "sparse.mm": torch.sparse.mm,
    "matmul": lambda a, x: a @ x,
    "mv": lambda a, x: torch.mv(a, x[:, 0]),
    "matmul_vector": lambda a, x: a @ x[:, 0],
    "addmm": lambda a, x: torch.addmm(x.sin(), a, x),
    "sparse.addmm": lambda a, x: torch.sparse.addmm(x.sin(), a, x, beta=0.5, alpha=2),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", SPARSE)
def test_products_of_sparse_matrices(op: str, layout: str) -> None:
    function, make = SPARSE[op], LAYOUTS[layout]
    sizes = [5, 3, 8, 3, 1, 6]
    matrices = [make(n) for n in sizes]
    weight = rand(W, W).requires_grad_()
    instances = [rand(n, W) for n in sizes]

    def results() -> list[Tensor]:
        return [function(a, (x @ weight).tanh()) for a, x in zip(matrices, instances, strict=True)]

    expected = results()
    gradient = torch.autograd.grad(torch.stack([y.sin().sum() for y in expected]).sum(), weight)
    with ab.batch(adaptive=False) as scope:
        found = results()
        total = torch.stack([y.sin().sum() for y in found]).sum()
        found_gradient = torch.autograd.grad(total, weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradient, gradient)
    report = scope.report()
    assert len(report.flushes) == 1
    assert not report.at_once
    products = [row for row in report.signatures if row.op == "autobatch::sparse_product"]
    assert [row.instances for row in products] == [len(sizes)]
    assert products[0].batches == 1


@pytest.mark.filterwarnings("ignore:Sparse")
def test_graphs_without_edges() -> None:
    empty = torch.sparse_coo_tensor(torch.empty(2, 0, dtype=torch.long), [], (3, 3)).double()
    x = rand(3, W).requires_grad_()
    with ab.batch(adaptive=False) as scope:
        products = [torch.sparse.mm(a, x * 2) for a in (empty, coo(3), empty)]
        (gradient,) = torch.autograd.grad(products[0].sum(), x)
    assert len(scope.report().flushes) == 1
    torch.testing.assert_close(products[0], torch.zeros_like(x))
    torch.testing.assert_close(products[1], torch.sparse.mm(coo(3), x * 2))
    torch.testing.assert_close(gradient, torch.zeros_like(x))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_writing_to_a_sparse_matrix_after_its_product() -> None:
    a, x = coo(4).coalesce(), rand(4, W).requires_grad_()
    expected = torch.sparse.mm(a, x * 2)
    with ab.batch(adaptive=False):
        y = torch.sparse.mm(a, x * 2)
        a.mul_(3)
    torch.testing.assert_close(y, expected)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_matrix_with_gradient() -> None:
    values = torch.arange(1.0, 13).double().requires_grad_()
    x = rand(4, W).requires_grad_()

    def gradients() -> tuple[Tensor, ...]:
        a = torch.sparse_coo_tensor(edges(4), values, (4, 4))
        return torch.autograd.grad(torch.sparse.mm(a, x * 2).sin().sum(), (values, x))

    expected = gradients()
    with ab.batch(adaptive=False):
        found = gradients()
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_products_that_eager_rejects() -> None:
    a, x = coo(4), rand(3, W).requires_grad_()
    with ab.batch(adaptive=False), pytest.raises(RuntimeError):
        torch.sparse.mm(a, x * 2)


# --- ctc_loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_ctc_loss(reduction: str, as_tensors: bool) -> None:
    weight = rand(W, W).requires_grad_()
    instances = [rand(n, W) for n in (6, 4, 9, 6)]
    targets = [torch.tensor([[1, 2, 2][:k]]) for k in (3, 1, 2, 3)]

    def losses() -> list[Tensor]:
        found = []
        for x, y in zip(instances, targets, strict=True):
            lengths = [len(x)], [y.size(1)]
            if as_tensors:
                lengths = torch.tensor(lengths[0]), torch.tensor(lengths[1])  # type: ignore
            log_probs = (x @ weight).log_softmax(-1)[:, None]
            found.append(F.ctc_loss(log_probs, y, *lengths, reduction=reduction))
        return found

    expected = losses()
    gradient = torch.autograd.grad(torch.stack(expected).sum(), weight)
    with ab.batch(adaptive=False) as scope:
        found = losses()
        found_gradient = torch.autograd.grad(torch.stack(found).sum(), weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradient, gradient)
    assert len(scope.report().flushes) == 1


def test_ctc_loss_of_too_long_input_is_eagers_error() -> None:
    x = rand(4, 1, W).requires_grad_()
    with ab.batch(adaptive=False), pytest.raises(RuntimeError, match="input_lengths"):
        F.ctc_loss((x * 2).log_softmax(-1), torch.tensor([[1]]), (5,), (1,))


# --- results that are not views -------------------------------------------------------------------

NO_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul_of_vector": lambda x: torch.matmul(x, torch.ones(8, dtype=x.dtype)),
    "mean_of_transposed": lambda x: x.transpose(0, 1).mean(1, keepdim=True),
    "amax_of_transposed": lambda x: x.mT.amax((0, 2), keepdim=True),
    "average_pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "norm_of_transposed": lambda x: torch.linalg.norm(x.mT, dim=1, keepdim=True),
}


@pytest.mark.parametrize("name", NO_VIEWS)
def test_result_can_be_detached_in_place(name: str) -> None:
    """A result of several ops must not be a view to autograd if eager's result is not a view."""
    x = rand(4, 6, 8).requires_grad_()
    expected = NO_VIEWS[name](x.sin()).detach_()
    with ab.batch(adaptive=False):
        result = NO_VIEWS[name](x.sin())
        assert not result._is_view()
        result.detach_()
    torch.testing.assert_close(result, expected)
