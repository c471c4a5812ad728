"""Cells, joins, views, lookups, reductions, losses and random ops, compared with eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import (
    DOUBLE,
    LABELS,
    Op,
    Sizes,
    check,
    raises_as_eager,
    rand,
    rules_of,
    tensors_of,
)
from torch import Tensor, nn

# --- recurrent cells ---


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("rows", [(), (1,), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_cell(cell: Any, bias: bool, given: bool, rows: Sizes, dtype: torch.dtype) -> None:
    model = cell(3, 4, bias=bias).to(dtype)
    names = [name for name, _ in model.named_parameters()]
    count = len(names)

    def sequence(*args: Tensor) -> Any:
        parameters, xs, states = args[:count], args[count], args[count + 1 :]
        state: Any = None
        if given:
            state = tuple(states) if cell is nn.LSTMCell else states[0]
        weights = dict(zip(names, parameters, strict=True))
        for x in xs.unbind():
            state = torch.func.functional_call(model, weights, (x, state))
        return state[:1] if cell is nn.LSTMCell and len(xs) == 2 else state  # some cases drop c

    instances = [
        (rand(n, *rows, 3, dtype=dtype), rand(*rows, 4, dtype=dtype), rand(*rows, 4, dtype=dtype))
        for n in (1, 3, 2, 4)
    ]
    report = check(sequence, *instances, parameters=[p.detach() for p in model.parameters()])
    if cell is not nn.RNNCell:
        assert rules_of(report)[f"aten::{cell.__name__[:-4].lower()}_cell"] == "native"


# --- joins and views ---


SHAPE: dict[str, Op] = {
    "cat_0": lambda x: torch.cat([x, x * 2, x[:1]]),
    "cat_1": lambda x: torch.cat([x, x[:, :1]], 1),
    "cat_last": lambda x: torch.cat([x[:, 1:], x], -1),
    "cat_empty": lambda x: torch.cat([x[:0], x]),
    "cat_legacy_empty": lambda x: torch.cat([torch.zeros(0, dtype=DOUBLE), x]),
    "cat_expanded": lambda x: torch.cat([x, x[:1].expand(3, -1)]),
    "cat_outside": lambda x: torch.cat([x, torch.ones(1, 3, dtype=DOUBLE)]),
    "stack_0": lambda x: torch.stack([x, x * 2]),
    "stack_1": lambda x: torch.stack([x, x * 2, x], 1),
    "stack_last": lambda x: torch.stack([x, x * 2], -1),
    "stack_scalars": lambda x: torch.stack([row.sum() for row in x]),
    "stack_transposed": lambda x: torch.stack([x.t(), x.t() * 2]),
    "hstack": lambda x: torch.hstack([x, x]),
    "select": lambda x: (x[0], x[:, 1], x.select(-1, -1), x[-1]),
    "slice": lambda x: (x[1:, :2], x[::2], x[:, 5:], x[..., None, 0]),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "chunk": lambda x: (*x.chunk(2, 1), *x.chunk(5, 0)),
    "split": lambda x: (*x.split(2, 1), *x.split([1, 2], 1)),
    "tensor_split": lambda x: x.tensor_split(2),
    "view": lambda x: x.view(-1),
    "reshape_copy": lambda x: x.t().reshape(-1),
    "squeeze": lambda x: (x[:1].squeeze(), x[:1].squeeze(0), x[:1].squeeze((0, 1)), x.squeeze(0)),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1)),
    "transpose": lambda x: (x.transpose(0, 1), x.t(), x.T, x.mT),
    "permute": lambda x: x.unsqueeze(0).permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, 1),
    "expand": lambda x: (x[:1].expand(4, -1), x.expand(2, *x.shape), x[:1].expand_as(x)),
    "flatten": lambda x: (x.flatten(), x.unsqueeze(0).flatten(1), x.t().flatten()),
    "unflatten": lambda x: x.unflatten(1, (1, 3)),
    "unbind": lambda x: x.unbind(1),
    "detach": lambda x: x.detach() * x,
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
    "contiguous": lambda x: x.t().contiguous(),
    "chain": lambda x: x[1:].t().unsqueeze(0).expand(2, -1, -1).transpose(0, 1)[:, 0].chunk(3)[1],
}


@pytest.mark.parametrize("name", SHAPE)
def test_shapes(name: str) -> None:
    op = SHAPE[name]
    xs = [rand(2, 3), rand(2, 3), rand(4, 3)]
    check(op, *xs)
    check(lambda x: op(x.sin()), *xs)
    check(lambda x: [r.sin() for r in tensors_of(op(x.sin()))], *xs)
    check(lambda x: op((x * 2).t().t()[:2]), *xs)
    check(lambda p, x: [r * x.sum() for r in tensors_of(op(p))], *xs, parameters=[rand(2, 3)])


def test_cat_of_two_types() -> None:
    check(lambda x: torch.cat([x.sin(), x.float()]), rand(2, 3), rand(4, 3), rand(2, 3))


def test_stack_and_cat_of_any_length_are_one_batch() -> None:
    xs = [rand(n, 3) for n in (1, 5, 2)]
    report = check(lambda x: torch.stack([row.tanh() for row in x]), *xs)
    (row,) = [s for s in report.signatures if s.op == "aten::stack"]
    assert row.batches == 1


# --- lookups ---


@pytest.mark.parametrize(
    "options",
    [{}, {"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"sparse": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embedding(options: dict[str, Any], dtype: torch.dtype) -> None:
    indices = [[1, 1, 2], [0, 4], [2], [3, 3, 0], 4, [[1, 2], [4, 4]], []]
    report = check(
        lambda w, i: F.embedding(i, w, **options).tanh(),
        *[torch.tensor(i, dtype=dtype) for i in indices],
        parameters=[rand(5, 3)],
    )
    if not {"sparse", "scale_grad_by_freq"} & set(options):
        (row,) = [s for s in report.signatures if s.op == "aten::embedding"]
        assert (row.rule, row.instances, row.batches) == ("native", 7, 1)


def test_embedding_of_computed_indices() -> None:
    check(lambda w, x: F.embedding((x @ w).argmax(-1), w), *[rand(n, 5) for n in (1, 3, 2)],
          parameters=[rand(5, 5)])  # fmt: skip


def test_embedding_index_out_of_range_is_an_error() -> None:
    weight = rand(5, 3).requires_grad_()
    message = raises_as_eager(lambda: F.embedding(torch.tensor([7]), weight))
    assert "aten::embedding" in message


# --- softmax, reductions ---


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("op", [F.softmax, F.log_softmax])
def test_softmax(op: Any, dim: int) -> None:
    xs = [rand(2, 3, 4), rand(2, 3, 4), rand(5, 3, 4), rand(2, 3, 1), rand(2, 0, 4)]
    check(lambda x: op(x * 2, dim), *xs)
    check(lambda x: op(x.transpose(0, 2) * 2, dim), *xs)
    check(lambda x: op(x * 2, dim, dtype=torch.float32), *xs)


@pytest.mark.parametrize("op", [torch.sum, torch.mean])
@pytest.mark.parametrize(
    "dim", [0, 1, -1, (0,), (0, 1), (1, 2), (0, 2), (0, 1, 2), (2, 0)], ids=str
)
@pytest.mark.parametrize("keepdim", [True, False])
def test_reduction(op: Any, dim: Any, keepdim: bool) -> None:
    xs = [rand(2, 3, 4), rand(2, 3, 4), rand(5, 3, 4), rand(2, 3, 1), rand(1, 1, 1)]
    check(lambda x: op(x * 2, dim=dim, keepdim=keepdim), *xs)
    check(lambda x: op((x * 2).transpose(0, 2), dim=dim, keepdim=keepdim), *xs)
    check(lambda x: op(x * 2, dim=dim, keepdim=keepdim, dtype=torch.float32), *xs)


@pytest.mark.parametrize("op", [torch.sum, torch.mean])
def test_full_reduction(op: Any) -> None:
    xs = [rand(2, 3), rand(4), rand(), rand(0, 3), rand(2, 3), rand(3, 2).t()]
    check(lambda x: op(x * 2), *xs)
    check(lambda x: op(x * 2, dtype=torch.float32), *xs)
    report = check(lambda x: op(x.tanh()), rand(7), rand(3), rand(1))
    assert report.batches == 2  # tanh, then one batch for all lengths


@pytest.mark.parametrize("op", [torch.sum, torch.mean])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reduction_of_different_lengths_is_as_precise_as_eager(op: Any, dtype: torch.dtype) -> None:
    longest = 1_000_000 if dtype is torch.float32 else 3000
    xs = [torch.full((n,), 0.1, dtype=dtype) for n in (longest, longest - 100)]
    check(lambda p, x: op(x * p), *xs, parameters=[torch.ones((), dtype=dtype)])


# --- losses ---


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [-100, 2, 255])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_of_class_indices(reduction: str, ignore: int, weighted: bool) -> None:
    weight = rand(5).abs() if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": ignore, "weight": weight}
    labels = [torch.tensor(t) for t in LABELS]
    if ignore == 255:
        labels = [torch.where(t == 2, 255, t) for t in labels]  # nan if all labels are ignored
    pairs = [(rand(len(t), 5), t) for t in labels]

    def loss(function: Any, **more: Any) -> Callable[..., Tensor]:
        return lambda p, x, t: function(x * p, t, **options, **more)

    scale = [rand(5)]
    report = check(loss(F.cross_entropy), *pairs, parameters=scale)
    assert rules_of(report)["aten::cross_entropy_loss"] == "native"
    check(lambda p, x, t: F.nll_loss((x * p).log_softmax(-1), t, **options), *pairs,
          parameters=scale)  # fmt: skip
    check(loss(F.cross_entropy), *[(x[0], t[0]) for x, t in pairs], parameters=scale)
    check(loss(F.cross_entropy, label_smoothing=0.1), *pairs, parameters=scale)
    images = [(rand(2, 5, len(t)), t.repeat(2, 1)) for t in labels]
    check(lambda x, t: F.cross_entropy(x * 2, t, **options), *images)


def test_losses_of_probabilities() -> None:
    pairs = [(rand(n, 5), rand(n, 5).softmax(1).detach()) for n in (2, 3, 2)]
    check(lambda p, x, t: F.cross_entropy(x * p, t), *pairs, parameters=[rand(5)])
    check(lambda p, x, t: F.cross_entropy(x[0] * p, t[0]), *pairs, parameters=[rand(5)])


def test_label_out_of_range_is_an_error() -> None:
    x = rand(2, 3).requires_grad_()
    raises_as_eager(lambda: F.cross_entropy(x, torch.tensor([0, 3])))


# --- random ops ---


def test_dropout_drops_the_fraction_and_scales_the_rest() -> None:
    x = torch.ones(4000, requires_grad=True)
    with ab.batch():
        results = [F.dropout(x * 1, 0.25) for _ in range(5)]
    torch.stack(results).sum().backward()
    for r in results:
        assert set(r.detach().unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
        assert abs((r == 0).float().mean().item() - 0.25) < 0.04
    assert not torch.equal(results[0], results[1])
    torch.testing.assert_close(x.grad, torch.stack(results).detach().sum(0))


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False), (1.0, True), (1.0, False)])
def test_dropout_without_chance(p: float, training: bool) -> None:
    check(lambda x: F.dropout(x.tanh(), p, training), rand(3), rand(5))


def test_dropout_obeys_the_seed() -> None:
    x = torch.ones(100, requires_grad=True)

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with ab.batch():
            results = [F.dropout(x * 1) for _ in range(3)]
        return torch.stack(results)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": torch.bernoulli,
    "normal": lambda p: torch.normal(p, 1.0),
    "multinomial": lambda p: torch.multinomial(p, 100, replacement=True),
    "gumbel_softmax": F.gumbel_softmax,
    "rand_like": torch.rand_like,
    "dropout": F.dropout,
    "alpha_dropout": lambda p: F.alpha_dropout(p, 0.5, True),
    "rrelu": lambda p: F.rrelu(-p, training=True),
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("grad", [True, False])
def test_each_instance_draws_its_own_numbers(name: str, grad: bool) -> None:
    weight = nn.Parameter(torch.zeros(200, 3))
    with ab.batch(), torch.set_grad_enabled(grad):
        shared = F.linear(torch.ones(3), weight).sigmoid()
        draws = [RANDOM[name](shared) for _ in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
