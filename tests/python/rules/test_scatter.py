"""Ops that scatter or look up with indices per instance: eager's values and gradients, and one
batch for instances of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_rules import DOUBLE, check, raises_as_eager, rand, rules_of
from torch import Tensor

WIDTH = 4
SIZES = [5, 3, 8, 3, 1, 6]

Make = Callable[[int], tuple[Tensor, ...]]


def places(n: int, count: int) -> Tensor:
    """Returns indices of some of n rows, with repetitions."""
    return (torch.arange(count) * 3 + n) % n


def distinct(n: int) -> Tensor:
    return torch.arange(n).flip(0)[: (n + 1) // 2]


def nodes_and_edges(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns features of nodes and, for each edge, a node and a message."""
    return rand(n, WIDTH), places(n, 2 * n), rand(2 * n, WIDTH)


def nodes_and_distinct(n: int) -> tuple[Tensor, Tensor, Tensor]:
    index = distinct(n)
    return rand(n, WIDTH), index, rand(len(index), WIDTH)


def nodes_and_elements(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns tensors with an index for each element."""
    index = torch.stack([places(n, 2 * n), places(n, 2 * n).flip(0)], 1)
    return rand(n, WIDTH), index, rand(2 * n, 2)


def matrix(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns an n x n matrix, pairs of rows and columns, and a value for each pair."""
    return rand(n, n), places(n, 2 * n), places(n, 2 * n).flip(0), rand(2 * n)


@dataclass(frozen=True)
class Case:
    op: str  # name of the op that must run as one batch
    function: Callable[..., Any]
    make: Make = nodes_and_edges


def column(i: Tensor, like: Tensor) -> Tensor:
    return i.view(-1, 1).expand_as(like)


def written(x: Tensor, key: Any, values: Any) -> Tensor:
    y = x.sin()
    y[key] = values
    return y


# The op that `x[i] = number` calls. PyTorch 2.15 calls a faster op.
SET_NUMBER = "index_fill" if torch.__version__ >= (2, 15) else "index_put"

REDUCES = ["sum", "prod", "mean", "amax", "amin"]

CASES: dict[str, Case] = {
    "index_add": Case("index_add", lambda x, i, m: x.tanh().index_add(0, i, m)),
    "index_add_alpha": Case("index_add", lambda x, i, m: x.tanh().index_add(0, i, m, alpha=-0.5)),
    "index_add_int32": Case("index_add", lambda x, i, m: x.tanh().index_add(0, i.int(), m)),
    "index_add_columns_int32": Case(
        "index_add", lambda x, i, m: x.tanh().t().index_add(1, i.int(), m.t().exp())
    ),
    "index_put_int32_and_int64": Case(
        "index_put", lambda x, i, j, m: x.tanh().index_put((i.int(), j), m), matrix
    ),
    "index_add_columns": Case(
        "index_add", lambda x, i, m: x.tanh().t().index_add(1, i, m.t().exp())
    ),
    "index_add_cube": Case(
        "index_add",
        lambda x, i, m: x.tanh().index_add(-2, i, m),
        lambda n: (rand(2, n, WIDTH), places(n, n + 1), rand(2, n + 1, WIDTH)),
    ),
    "index_add_in_place": Case(
        "index_add", lambda x, i, m: torch.zeros_like(x).index_add_(0, i, m.tanh())
    ),
    "index_add_numbers": Case("index_add", lambda x, i, m: x.tanh()[:, 0].index_add(0, i, m[:, 0])),
    "index_add_half": Case(
        "index_add", lambda x, i, m: x.tanh().bfloat16().index_add(0, i, m.bfloat16())
    ),
    "index_add_counts": Case(
        "index_add",
        lambda x, i, m: (x.tanh() > 0).long().index_add(0, i, (m.tanh() > 0).long()),
    ),
    "index_copy": Case(
        "index_copy", lambda x, i, m: x.tanh().index_copy(0, i, m), nodes_and_distinct
    ),
    "index_fill": Case("index_fill", lambda x, i, m: x.tanh().index_fill(0, i[:2], 0.5)),
    "index_fill_columns": Case(
        "index_fill", lambda x, i, m: x.tanh().t().contiguous().index_fill(1, i[:2] - len(x), 0.5)
    ),
    "scatter_add": Case(
        "scatter_add", lambda x, i, m: x.tanh().scatter_add(0, column(i, m), m.tanh())
    ),
    "scatter_add_in_place": Case(
        "scatter_add",
        lambda x, i, m: torch.zeros(len(x), WIDTH, dtype=DOUBLE).scatter_add_(
            0, column(i, m), m.tanh()
        ),
    ),
    "scatter_add_numbers": Case(
        "scatter_add", lambda x, i, m: x.tanh()[:, 0].scatter_add(0, i, m[:, 0])
    ),
    "scatter_add_copied_index": Case(
        "scatter_add", lambda x, i, m: x.tanh().scatter_add(0, column(i, m).contiguous(), m)
    ),
    "scatter_add_elements": Case(
        "scatter_add", lambda x, i, m: x.tanh().scatter_add(0, i, m), nodes_and_elements
    ),
    "scatter_add_columns": Case(
        "scatter_add",
        lambda x, i, m: x.tanh().t().contiguous().scatter_add(1, column(i, m).t(), m.t()),
    ),
    "scatter_add_cube": Case(
        "scatter_add",
        lambda x, i, m: x.tanh().scatter_add(1, i.view(1, -1, 1).expand_as(m), m),
        lambda n: (rand(2, n, WIDTH), places(n, n + 1), rand(2, n + 1, WIDTH)),
    ),
    "scatter_add_part_of_the_source": Case(
        "scatter_add", lambda x, i, m: x.tanh().scatter_add(0, i[1:].view(-1, 1), m.detach())
    ),
    "scatter": Case(
        "scatter",
        lambda x, i, m: x.tanh().scatter(0, column(i, m), m.tanh()),
        nodes_and_distinct,
    ),
    "scatter_value": Case("scatter", lambda x, i, m: x.tanh().scatter(0, column(i, m), 2.0)),
    "scatter_mask": Case(
        "scatter",
        lambda x, i, m: torch.zeros(len(x), dtype=torch.bool).scatter(0, i, True) & (x[:, 0] > 0),
    ),
    "scatter_reduce_no_gradient": Case(
        "scatter",
        lambda x, i, m: x.detach().tanh().scatter(0, column(i, m), m.detach(), reduce="multiply"),
        lambda n: tuple(v.detach() for v in nodes_and_edges(n)),
    ),
    **{
        f"scatter_reduce_{reduce}_{include}": Case(
            "scatter_reduce",
            lambda x, i, m, r=reduce, s=include: x.tanh().scatter_reduce(
                0, column(i, m), m.tanh(), r, include_self=s
            ),
        )
        for reduce in REDUCES
        for include in (True, False)
    },
    **{
        f"index_reduce_{reduce}_{include}": Case(
            "index_reduce",
            lambda x, i, m, r=reduce, s=include: x.tanh().index_reduce(
                0, i, m.tanh(), r, include_self=s
            ),
        )
        for reduce in REDUCES[1:]
        for include in (True, False)
    },
    "index_put": Case("index_put", lambda x, i, m: x.tanh().index_put((i,), m), nodes_and_distinct),
    "index_put_accumulate": Case(
        "index_put", lambda x, i, m: x.tanh().index_put((i,), m.tanh(), accumulate=True)
    ),
    "index_put_from_end": Case(
        "index_put", lambda x, i, m: x.tanh().index_put((i - len(x),), m, accumulate=True)
    ),
    "index_put_pairs": Case(
        "index_put",
        lambda a, i, j, v: a.tanh().index_put((i, j), v.tanh(), accumulate=True),
        matrix,
    ),
    "index_put_row": Case(
        "index_put", lambda x, i, m: x.tanh().index_put((i,), m[0].tanh(), accumulate=True)
    ),
    "setitem_rows": Case("index_put", lambda x, i, m: written(x, i, m), nodes_and_distinct),
    "setitem_number": Case(SET_NUMBER, lambda x, i, m: written(x, i, 0.5)),
    "setitem_columns": Case(
        SET_NUMBER,
        lambda x, i, m: written(x, (slice(None), i % WIDTH), 0.5),
    ),
    **{
        f"segment_reduce_{reduce}": Case(
            "segment_reduce",
            lambda x, n, r=reduce: torch.segment_reduce(x.tanh(), r, lengths=n, axis=0),
            lambda n: (rand(n + 2, WIDTH), torch.tensor([1] * n + [2])),
        )
        for reduce in ["sum", "mean", "max", "min", "prod"]
    },
    "segment_reduce_initial": Case(
        "segment_reduce",
        lambda x, n: torch.segment_reduce(x.tanh(), "sum", lengths=n, axis=0, initial=0.5),
        lambda n: (rand(n, 2, WIDTH), torch.tensor([n - 1, 0, 1])),
    ),
    "gather": Case(
        "gather",
        lambda x, i, m: x.tanh().gather(0, column(i, m)),
    ),
    "gather_elements": Case("gather", lambda x, i, m: x.tanh().gather(0, i), nodes_and_elements),
    "gather_columns": Case(
        "gather", lambda a, i, j, v: a.tanh().gather(1, i.view(len(a), 2)), matrix
    ),
    "take_along_dim": Case(
        "gather", lambda x, i, m: torch.take_along_dim(x.tanh(), i.view(-1, 1), 0)
    ),
    "index_select_columns": Case(
        "index_select", lambda a, i, j, v: a.tanh().index_select(1, i), matrix
    ),
    "index_select_middle": Case(
        "index_select",
        lambda x, i: x.tanh().index_select(1, i),
        lambda n: (rand(2, n, WIDTH), places(n, n + 1)),
    ),
    "index_pairs": Case("index", lambda a, i, j, v: a.tanh()[i, j] * v, matrix),
    "index_grid": Case(
        "index", lambda a, i, j, v: a.tanh()[i.view(-1, 1), j.view(1, -1) - len(a)], matrix
    ),
    "index_columns": Case("index", lambda a, i, j, v: a.tanh()[:, i], matrix),
}


def run_case(case: Case, sizes: Sequence[int]) -> ab.Report:
    torch.manual_seed(1)
    return check(case.function, *[case.make(n) for n in sizes])


@pytest.mark.parametrize("name", CASES)
def test_one_batch_for_all_sizes(name: str) -> None:
    case = CASES[name]
    report = run_case(case, SIZES)
    rows = [row for row in report.signatures if row.op.split("::")[1].split(".")[0] == case.op]
    assert sum(row.instances for row in rows) == len(SIZES)
    assert [(row.batches, row.rule) for row in rows] == [(1, "native")], rows


@pytest.mark.parametrize("name", CASES)
def test_one_instance(name: str) -> None:
    run_case(CASES[name], [4])


@pytest.mark.parametrize("name", ["index_add", "scatter_add", "index_put_accumulate", "gather"])
def test_no_indices(name: str) -> None:
    """An instance without edges joins the batch and keeps its values."""

    def make(n: int) -> tuple[Tensor, ...]:
        x, i, m = nodes_and_edges(n)
        return (x, i, m) if n % 2 else (x, i[:0], m[:0])

    case = CASES[name]
    torch.manual_seed(1)
    report = check(case.function, *[make(n) for n in SIZES])
    assert [r.batches for r in report.signatures if case.op in r.op] == [1]


ERRORS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, i, m: x.tanh().index_add(0, i, m),
    "scatter_add": lambda x, i, m: x.tanh().scatter_add(0, column(i, m), m),
    "scatter_reduce": lambda x, i, m: x.tanh().scatter_reduce(0, column(i, m), m, "amax"),
    "index_reduce": lambda x, i, m: x.tanh().index_reduce(0, i, m, "amax"),
    "gather": lambda x, i, m: x.tanh().gather(0, column(i, m)),
    "index_put": lambda x, i, m: x.tanh().index_put((i,), m),
    "index_select": lambda x, i, m: x.tanh().index_select(0, i),
    "segment_reduce": lambda x, i, m: torch.segment_reduce(
        x.tanh(), "sum", lengths=torch.tensor([len(x) - (8 in i), 0]), axis=0
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_index_out_of_range_is_eagers_error(name: str) -> None:
    """The error names the line, and the other instances have their results."""
    torch.manual_seed(1)
    examples = [nodes_and_edges(n) for n in SIZES]
    examples[2][1][1] = 8
    weight = torch.ones((), dtype=DOUBLE, requires_grad=True)
    results: list[Tensor] = []

    def each() -> None:
        for x, i, m in examples:
            results.append(ERRORS[name](x * weight, i, m * weight))

    message = raises_as_eager(each)
    assert name == "index_put" or "test_scatter.py:" in message
    computed = results[len(results) - len(SIZES) if name != "index_put" else 0 :]
    for (x, i, m), result in zip(examples[:2], computed, strict=False):
        assert torch.allclose(result, ERRORS[name](x, i, m))


def test_left_out_instances_contribute_nothing() -> None:
    """The values of these instances are NaN, so multiplying by zero would give NaN."""
    x, i, m = nodes_and_edges(4)
    weight = torch.ones((), dtype=DOUBLE, requires_grad=True)
    with ab.batch() as scope:
        good = (x * weight).index_add(0, i, m * weight).sum()
        bad = (x * weight).index_add(0, i, m * weight * float("nan")).sum()
        most = (x * weight).scatter_reduce(0, column(i, m), m * weight * 2, "amax").sum()
        worst = (
            (x * weight).scatter_reduce(0, column(i, m), m * weight * float("nan"), "amax").sum()
        )
    assert rules_of(scope.report())["aten::scatter_reduce.two"] == "native"
    (good + most).backward()
    assert bad.isnan()
    assert worst.isnan()
    assert weight.grad is not None
    again = weight.detach().requires_grad_()
    expected = (x * again).index_add(0, i, m * again).sum()
    expected = expected + (x * again).scatter_reduce(0, column(i, m), m * again * 2, "amax").sum()
    expected.backward()
    assert torch.allclose(weight.grad, again.grad)


def test_an_expanded_index_from_outside_is_not_copied() -> None:
    """A write to the index before the block's end happens after the op that read it."""
    x, i, m = nodes_and_edges(4)
    weight = torch.ones((), dtype=DOUBLE, requires_grad=True)
    expected = x.scatter_add(0, column(i, m), m)
    with ab.batch():
        result = (x * weight).scatter_add(0, column(i, m), m * weight)
        i.zero_()
    assert torch.allclose(result, expected)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_gradients(create_graph: bool) -> None:
    torch.manual_seed(1)
    examples = [nodes_and_edges(n) for n in SIZES]
    grads = []
    for enabled in (False, True):
        weight = torch.full((), 0.7, dtype=DOUBLE, requires_grad=True)
        with ab.batch(enabled=enabled):
            total = torch.stack(
                [
                    (x * weight).tanh().index_add(0, i, (m * weight).exp()).square().sum()
                    + (x * weight).scatter_reduce(0, column(i, m), (m * weight).exp(), "mean").sum()
                    for x, i, m in examples
                ]
            ).sum()
            (grad,) = torch.autograd.grad(total, weight, create_graph=create_graph)
        if create_graph:
            (grad,) = torch.autograd.grad(grad, weight)
        grads.append(grad)
    assert torch.allclose(*grads)


def of_own_dtype(k: int, index: Tensor) -> Tensor:
    return index.int() if k % 2 else index


# Functions whose instances differ: (instance number, x, row index, source) -> result.
UNLIKE: dict[str, Callable[[int, Tensor, Tensor, Tensor], Tensor]] = {
    "index_put of transposed": lambda k, x, i, m: x.t().contiguous().t().index_put((i,), m),
    "index_put of gaps": lambda k, x, i, m: x[:, ::2].index_put((i,), m[:, ::2]),
    "index_fill of transposed": lambda k, x, i, m: x.t().contiguous().t().index_fill(0, i, 2.0),
    "index of columns": lambda k, x, i, m: torch.cat([x.t()] * 2, 1)[:, ::2][:, i % (len(x) // 2)],
    "int32 and int64": lambda k, x, i, m: x.index_add(0, of_own_dtype(k, i), m),
    "int32 and int64 in a list": lambda k, x, i, m: x.index_put((of_own_dtype(k, i),), m),
    "no rows to reduce": lambda k, x, i, m: x.scatter_reduce(
        0, column(i, m)[: k % 2], m[: k % 2], "prod"
    ),
    "no rows to index_reduce": lambda k, x, i, m: x.index_reduce(0, i[: k % 2], m[: k % 2], "mean"),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", UNLIKE)
def test_values_layouts_and_gradients_of_unlike_instances(name: str) -> None:
    function = UNLIKE[name]

    def program(enabled: bool) -> tuple[list[Any], ...]:
        torch.manual_seed(0)
        leaves = [
            [rand(n, WIDTH).requires_grad_(), rand((n + 1) // 2, WIDTH).requires_grad_()]
            for n in SIZES
            if n > 1
        ]
        with ab.batch(enabled=enabled):
            results = [
                function(k, x * 1, distinct(len(x)), m * 1) for k, (x, m) in enumerate(leaves)
            ]
        wanted = [t for pair in leaves for t in pair]
        total = torch.stack([(y.square() * y.exp()).sum() for y in results]).sum()
        first = torch.autograd.grad(total, wanted, create_graph=True, materialize_grads=True)
        again = torch.stack([g.square().sum() for g in first if g.requires_grad]).sum()
        second = torch.autograd.grad(again, wanted, materialize_grads=True)
        return results, [y.stride() for y in results], list(first), list(second)

    torch.testing.assert_close(program(True), program(False))


@pytest.mark.parametrize("name", ["scatter_add", "scatter", "gather", "amax"])
def test_an_expanded_index_that_a_read_made_real(name: str) -> None:
    """After the read, the indices of some instances are copies, and others are still expanded."""
    ops: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "scatter_add": lambda x, i, m: x.scatter_add(0, i, m),
        "scatter": lambda x, i, m: x.scatter(0, i, 1.5),
        "gather": lambda x, i, m: x.gather(0, i),
        "amax": lambda x, i, m: x.scatter_reduce(0, i, m, "amax"),
    }

    def program(enabled: bool) -> list[Any]:
        torch.manual_seed(0)
        xs, sources = ([rand(n, 3).requires_grad_() for _ in range(4)] for n in (4, 5))
        with ab.batch(enabled=enabled):
            found = [
                (m * 2).argmax(1) if k % 2 else (m * 2).argmin(1) for k, m in enumerate(sources)
            ]
            indices = [column(i, m) for i, m in zip(found, sources, strict=True)]
            results = [
                ops[name](x * 2, i, m * 3) for x, i, m in zip(xs, indices, sources, strict=True)
            ]
            read = (indices[0].double() * xs[0][:1]).sum().detach().numpy()
        total = torch.stack([y.square().sum() for y in results]).sum()
        grads = torch.autograd.grad(total, xs + sources, materialize_grads=True)
        return [results, torch.from_numpy(read), list(grads)]

    torch.testing.assert_close(program(True), program(False))
