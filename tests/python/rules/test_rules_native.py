"""Every native rule: values, gradients, and number of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import (
    BINARY,
    BOTH,
    LABELS,
    UNARY,
    Sizes,
    check,
    rand,
    rules_of,
)
from torch import Tensor, nn

# --- every native rule: values, gradients, and number of batches ---


RAGGED: list[Sizes] = [(2, 3), (5, 3), (1, 3), (2, 3)]


def check_native(
    function: Callable[..., Any],
    instances: Sequence[Any],
    parameters: Sequence[Tensor] = (),
    op: str | None = None,
    batches: int | None = None,
) -> ab.Report:
    """Checks that all rules are native, and that there are as many batches as for one instance."""
    report = check(function, *instances, parameters=parameters)
    assert set(rules_of(report).values()) == {"native"}, report
    assert not report.at_once, report
    if batches is None:
        assert report.batches == check(function, instances[0], parameters=parameters).batches
    else:
        assert sum(s.batches for s in report.signatures if s.op == op) == batches, report
    return report


def random_like(sizes: Any, dtype: torch.dtype) -> Any:
    """Returns a random tensor of these sizes, or a tuple of tensors for a tuple of sizes."""
    if sizes and not isinstance(sizes[0], int):
        return tuple(random_like(s, dtype) for s in sizes)
    return rand(*sizes, dtype=dtype)


@BOTH
@pytest.mark.parametrize("name", UNARY)
def test_native_unary(name: str, dtype: torch.dtype) -> None:
    xs = [rand(*s, dtype=dtype) for s in RAGGED]
    check_native(UNARY[name], xs)
    check_native(lambda x: UNARY[name](x.sigmoid()), xs)


aten = torch.ops.aten


SCALAR: dict[str, Callable[[Tensor], Tensor]] = {
    "add.Scalar": lambda x: aten.add.Scalar(x, 2, 3),
    "sub.Scalar": lambda x: aten.sub.Scalar(x, 2.5, 3),
    "mul.Scalar": lambda x: aten.mul.Scalar(x, 3),
    "div.Scalar": lambda x: aten.div.Scalar(x, 4),
    "rsub.Scalar": lambda x: aten.rsub.Scalar(x, 2, 3),
    "pow.Tensor_Scalar": lambda x: aten.pow.Tensor_Scalar(x, 3),
}


@BOTH
@pytest.mark.parametrize("name", SCALAR)
def test_native_scalar(name: str, dtype: torch.dtype) -> None:
    report = check_native(SCALAR[name], [rand(*s, dtype=dtype) for s in RAGGED])
    assert rules_of(report) == {f"aten::{name}": "native"}


NATIVE_BINARY = {name: BINARY[name] for name in ("add", "sub", "mul", "div", "add_alpha")}


RAGGED_PAIRS: dict[str, list[tuple[Sizes, Sizes]]] = {
    "same_shape": [(s, s) for s in RAGGED],
    "row_on_the_right": [(s, (3,)) for s in RAGGED],
    "row_on_the_left": [((3,), s) for s in RAGGED],
    "one_row_matrix": [(s, (1, 3)) for s in RAGGED if s[0] != 1],
    "scalar_tensor": [(s, ()) for s in RAGGED],
}


@BOTH
@pytest.mark.parametrize("pairs", RAGGED_PAIRS)
@pytest.mark.parametrize("name", NATIVE_BINARY)
def test_native_binary(name: str, pairs: str, dtype: torch.dtype) -> None:
    op = NATIVE_BINARY[name]
    instances = [(rand(*a, dtype=dtype), rand(*b, dtype=dtype) + 3) for a, b in RAGGED_PAIRS[pairs]]
    scalar = pairs == "scalar_tensor"
    report = check(lambda x, y: op(x.tanh(), y.exp()), *instances)
    assert set(rules_of(report).values()) == {"native"}
    if not scalar:
        one = check(lambda x, y: op(x.tanh(), y.exp()), instances[0])
        assert report.batches == one.batches


@BOTH
@pytest.mark.parametrize("name", NATIVE_BINARY)
def test_native_binary_with_a_shared_operand(name: str, dtype: torch.dtype) -> None:
    op = NATIVE_BINARY[name]
    xs = [rand(*s, dtype=dtype).exp() for s in RAGGED]
    p = [rand(3, dtype=dtype).exp()]
    check_native(lambda p, x: op(p, x), xs, p)
    check_native(lambda p, x: op(x, p), xs, p)
    check_native(lambda p, x: op(x.tanh(), p) + op(p, x.exp()), xs, p)
    column = [(rand(2, 1, dtype=dtype).exp(), rand(1, 3, dtype=dtype).exp()) for _ in range(3)]
    check_native(lambda x, y: op(x, y), column)


# name: function, parameters, instances, op, batches
PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[Sizes], list[Any], str, int]] = {
    "linear": (lambda w, b, x: F.linear(x, w, b), [(4, 3), (4,)], RAGGED, "linear", 1),
    "linear_no_bias": (lambda w, x: F.linear(x, w), [(4, 3)], [(3,), *RAGGED], "linear", 1),
    "linear_pending": (lambda w, x: F.linear(x.tanh(), w), [(4, 3)], RAGGED, "linear", 1),
    "addmm": (lambda b, w, x: torch.addmm(b, x, w), [(4,), (3, 4)], RAGGED, "addmm", 1),
    "addmv": (lambda b, w, x: torch.addmv(b, w, x), [(4,), (4, 3)], [(3,)] * 3, "addmv", 1),
    "mm_right": (lambda w, x: x.mm(w), [(3, 4)], RAGGED, "mm", 1),
    "mm_left_outside": (lambda w, x: w.mm(x), [(4, 3)], [(3, 1)] * 4, "mm", 4),
    "mm_left_pending": (lambda w, x: w.mm(x.tanh()), [(4, 3)], [(3, 1)] * 4, "mm", 1),
    "mm_left_matrix": (lambda w, x: w.mm(x.tanh()), [(4, 3)], [(3, 2)] * 4, "mm", 1),
    "mm_computed": (lambda x, y: x.tanh().mm(y.tanh()), [], [((2, 3), (3, 4))] * 3, "mm", 1),
    "mm_computed_shapes": (
        lambda x, y: x.tanh().mm(y.tanh()),
        [],
        [((2, 3), (3, 4)), ((5, 3), (3, 4)), ((2, 3), (3, 4))],
        "mm",
        1,
    ),
    "mm_different_right": (lambda x, y: x.tanh().mm(y), [], [((2, 3), (3, 4))] * 3, "mm", 3),
    "matmul_vector_right": (lambda w, x: x @ w, [(3, 4)], [(3,), (2, 3), (2, 2, 3)], "matmul", 1),
    "matmul_vector_left": (lambda w, x: w @ x, [(4, 3)], [(3,)] * 4, "matmul", 1),
    "matmul_different_left": (lambda x, y: x @ y.tanh(), [], [((4, 3), (3, 2))] * 3, "matmul", 1),
    "matmul_column": (lambda x, y: x.tanh() @ y.tanh(), [], [((4, 3), (3, 1))] * 3, "matmul", 1),
    "matmul_outer": (lambda x, y: x.tanh() @ y.tanh(), [], [((4, 1), (1, 3))] * 3, "matmul", 1),
    "matmul_matrix_vector": (
        lambda x, y: x.tanh() @ y.tanh(),
        [],
        [((4, 3), (3,))] * 3,
        "matmul",
        1,
    ),
    "matmul_column_by_number": (
        lambda x, y: x.tanh() @ y.tanh(),
        [],
        [((4, 1), (1, 1))] * 3,
        "matmul",
        1,
    ),
    "matmul_vectors": (lambda x, y: x.tanh() @ y.tanh(), [], [((3,), (3,))] * 3, "matmul", 1),
    "matmul_3d": (lambda x, y: x.tanh() @ y.tanh(), [], [((2, 1, 3), (2, 3, 4))] * 3, "matmul", 1),
    "mv": (lambda w, x: w.mv(x), [(4, 3)], [(3,)] * 4, "mv", 1),
    "mv_pending": (lambda w, x: w.mv(x.tanh()), [(4, 3)], [(3,)] * 4, "mv", 1),
    "mv_computed": (lambda x, y: x.tanh().mv(y), [], [((4, 3), (3,))] * 3, "mv", 1),
    "bmm": (lambda x, y: x.tanh().bmm(y.tanh()), [], [((2, 1, 3), (2, 3, 4))] * 3, "bmm", 1),
    "bmm_column": (lambda x, y: x.tanh().bmm(y.tanh()), [], [((2, 5, 3), (2, 3, 1))] * 3, "bmm", 1),
    "bmm_transposed_column": (
        lambda x, y: x.tanh().mT.bmm(y.tanh()),
        [],
        [((2, 3, 5), (2, 3, 1))] * 3,
        "bmm",
        1,
    ),
    "bmm_shared": (lambda w, x: x.bmm(w), [(2, 3, 3)], [(2, 1, 3)] * 3, "bmm", 1),
    "dot": (lambda x, y: x.tanh().dot(y.tanh()), [], [((3,), (3,))] * 3, "dot", 1),
    "dot_shared": (lambda w, x: w.dot(x), [(3,)], [(3,)] * 3, "dot", 1),
    "dot_lengths": (lambda x: x.dot(x.tanh()), [], [(3,), (5,), (3,)], "dot", 1),
}


@BOTH
@pytest.mark.parametrize("name", PRODUCTS)
def test_native_product(name: str, dtype: torch.dtype) -> None:
    function, weights, instances, op, batches = PRODUCTS[name]
    parameters = [rand(*s, dtype=dtype) for s in weights]
    check_native(
        function, [random_like(s, dtype) for s in instances], parameters, f"aten::{op}", batches
    )


@BOTH
def test_a_batch_for_each_of_several_weights(dtype: torch.dtype) -> None:
    weights = [rand(4, 3, dtype=dtype), rand(4, 3, dtype=dtype)]
    pairs = [(rand(n, 3, dtype=dtype), i % 2) for i, n in enumerate((2, 1, 4, 2, 3))]
    check_native(lambda v, w, x, i: F.linear(x, (v, w)[i]), pairs, weights, "aten::linear", 2)
    check_native(lambda v, w, x, i: x @ (v, w)[i].t(), pairs, weights, "aten::matmul", 2)


JOINS: dict[str, tuple[Callable[..., Tensor], list[Sizes]]] = {
    "cat_0": (lambda x: torch.cat([x, x[:1], x]), RAGGED),
    "cat_1": (lambda x: torch.cat([x, x[:, :1]], 1), RAGGED),
    "cat_-1": (lambda x: torch.cat([x, x], -1), [(2, 3), (2, 4), (1, 3)]),
    "cat_count": (lambda x: torch.cat(list(x.split(1))), RAGGED),
    "cat_3d": (lambda x: torch.cat([x, x.sin()], 1), [(2, 3, 4), (1, 5, 2)]),
    "stack_0": (lambda x: torch.stack([x, x]), RAGGED),
    "stack_1": (lambda x: torch.stack([x, x], 1), RAGGED),
    "stack_-1": (lambda x: torch.stack([x, x], -1), RAGGED),
    "stack_count": (lambda x: torch.stack(list(x.unbind())), RAGGED),
    "stack_columns": (lambda x: torch.stack(list(x.unbind(1)), 1), [(2, 3), (4, 1), (1, 5)]),
}


@BOTH
@pytest.mark.parametrize("name", JOINS)
def test_native_join(name: str, dtype: torch.dtype) -> None:
    join, sizes = JOINS[name]
    xs = [rand(*s, dtype=dtype) for s in sizes]
    op = f"aten::{name.split('_')[0]}"
    check_native(lambda x: join(x.tanh()), xs, (), op, 1)
    check_native(lambda p, x: join(x * p), xs, [rand(dtype=dtype)], op, 1)


@BOTH
def test_chained_views_make_no_nodes(dtype: torch.dtype) -> None:
    def views(x: Tensor) -> list[Tensor]:
        a, b = x[:12].view(3, 4).t().chunk(2)
        return [a.unsqueeze(0).transpose(0, 2).squeeze(2)[1:], b[-1].expand(1, 3).select(0, 0)]

    def of_both(p: Tensor, x: Tensor) -> Tensor:
        mine, theirs = views(x.tanh()), views(p)
        return torch.stack([(m * t).sum() for m, t in zip(mine, theirs, strict=True)])

    xs = [rand(12, dtype=dtype) for _ in range(3)]
    report = check(of_both, *xs, parameters=[rand(12, dtype=dtype)])
    names = {"aten::tanh", "aten::mul.Tensor", "aten::sum", "aten::stack"}
    assert rules_of(report) == dict.fromkeys(names, "native")
    assert report.nodes == len(xs) * (1 + 2 + 2 + 1)
    assert report.views > 0
    check(lambda x: views(views(x.tanh())[0].reshape(-1).repeat(3)), *xs)


@BOTH
def test_native_embedding(dtype: torch.dtype) -> None:
    indices = [torch.tensor(i) for i in ([1, 1, 2], [0], 4, [[3, 1], [2, 2]])]
    for padding in (None, 1, -1):
        check_native(
            lambda w, i, padding=padding: F.embedding(i, w, padding),
            indices,
            [rand(5, 3, dtype=dtype)],
            "aten::embedding",
            1,
        )


@BOTH
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_native_cell(cell: Any, dtype: torch.dtype) -> None:
    model = cell(3, 4).to(dtype)
    names = [name for name, _ in model.named_parameters()]
    gates = {nn.LSTMCell: "aten::lstm_cell", nn.GRUCell: "aten::gru_cell"}[cell]
    many = cell is nn.LSTMCell

    def last(*args: Tensor) -> Tensor:
        weights = dict(zip(names, args, strict=False))
        xs, h = args[len(names) :]
        state: Any = (h, h) if many else h
        for x in xs.unbind():
            state = torch.func.functional_call(model, weights, (x, state))
        return state[0] if many else state

    instances = [
        (rand(steps, rows, 3, dtype=dtype), rand(rows, 4, dtype=dtype))
        for steps, rows in ((1, 2), (4, 1), (2, 2), (4, 3))
    ]
    parameters = [p.detach() for p in model.parameters()]
    check_native(last, instances, parameters, gates, 4)  # a batch for each step of the longest


@BOTH
@pytest.mark.parametrize("op", [F.softmax, F.log_softmax])
def test_native_softmax(op: Any, dtype: torch.dtype) -> None:
    xs = [rand(*s, dtype=dtype) for s in RAGGED]
    name = {F.softmax: "aten::softmax.int", F.log_softmax: "aten::log_softmax.int"}[op]
    check_native(lambda x: op(x.tanh(), -1), xs, (), name, 1)
    check_native(lambda x: op(x.tanh(), 0), xs, (), name, 1)
    check_native(lambda x: op(x, 1), [rand(2, 3, 4, dtype=dtype) for _ in range(3)], (), name, 1)


@BOTH
@pytest.mark.parametrize("op", [torch.sum, torch.mean])
@pytest.mark.parametrize("keepdim", [True, False])
def test_native_reduction(op: Any, keepdim: bool, dtype: torch.dtype) -> None:
    xs = [rand(*s, dtype=dtype) for s in RAGGED]
    check_native(lambda x: op(x), xs)
    for dims in (0, (0,), (0, 1), (-2, -1)):
        check_native(lambda x, dims=dims: op(x, dim=dims, keepdim=keepdim), xs)
    check_native(lambda x: op(x, dim=1, keepdim=keepdim), xs)
    apart = [rand(*s, 2, dtype=dtype) for s in RAGGED]  # by shape: (2, 3), (5, 3), (1, 3)
    report = check(lambda x: op(x, dim=(0, 2), keepdim=keepdim), *apart)
    assert (set(rules_of(report).values()), report.batches) == ({"native"}, 3)


@BOTH
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_native_loss(reduction: str, dtype: torch.dtype) -> None:
    pairs = [(rand(len(t), 5, dtype=dtype), torch.tensor(t)) for t in LABELS]
    pairs.append((rand(3, 5, dtype=dtype), torch.tensor([2, 2, 2])))  # all ignored
    single = [(rand(5, dtype=dtype), torch.tensor(t)) for t in (1, 2, 4)]
    weight = rand(5, dtype=dtype).exp()
    for options in ({}, {"weight": weight}, {"ignore_index": 2}):
        for name, prepare in (
            ("cross_entropy", lambda x: x.tanh()),
            ("nll_loss", lambda x: x.log_softmax(-1)),
        ):
            loss = getattr(F, name)
            for instances in (pairs, single):
                report = check(
                    lambda x, t, loss=loss, prepare=prepare, options=options: loss(
                        prepare(x), t, reduction=reduction, **options
                    ),
                    *instances,
                )
                assert set(rules_of(report).values()) == {"native"}
                assert report.batches == 2


@BOTH
def test_native_dropout_of_different_lengths_is_one_batch(dtype: torch.dtype) -> None:
    x = [rand(n, 3, dtype=dtype).abs().add(1).requires_grad_() for n in (50, 200, 7)]
    with ab.batch() as scope:
        results = [F.dropout(y * 1, 0.4) for y in x]
    assert rules_of(scope.report())["aten::dropout"] == "native"
    assert scope.report().batches == 2
    for y, r in zip(x, results, strict=True):
        kept = r != 0
        torch.testing.assert_close(r[kept], y[kept] / 0.6)
        (gradient,) = torch.autograd.grad(r.sum(), y)
        torch.testing.assert_close(gradient, kept.to(dtype) / 0.6)
    with ab.batch():
        same, none = F.dropout(h := x[0] * 1, 0.4, training=False), F.dropout(h, 1.0)
    assert torch.equal(same, x[0])
    assert not none.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_extremes_of_a_row(dtype: torch.dtype) -> None:
    """Tests equal elements, NaN and signed zeros."""
    rows = [torch.arange(n).mul(7).remainder(n // 2 + 1).to(dtype) for n in (1, 15, 16, 17, 50)]
    if dtype.is_floating_point:
        special = [torch.tensor([1.0, 0.0, -0.0] * 9), torch.full((33,), -torch.inf)]
        special += [torch.ones(40), torch.ones(40), torch.ones(3)]
        special[2][[20, 30]] = special[3][37] = special[4][1] = torch.nan
        rows += [row.to(dtype) for row in special]
    ops = [Tensor.argmax, Tensor.argmin, Tensor.amax, Tensor.amin]
    with ab.batch(adaptive=False) as scope:
        found = [[op(row) for op in ops] + [*row.max(0), *row.min(0)] for row in rows]
    assert scope.report().batches < 8
    for row, ours in zip(rows, found, strict=True):
        eager = [op(row) for op in ops] + [*row.max(0), *row.min(0)]
        for got, expected in zip(ours, eager, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
