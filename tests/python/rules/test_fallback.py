"""Ops without a native rule, and ops that other systems put into one batch by mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import (
    BOTH,
    DOUBLE,
    Op,
    assert_same,
    check,
    rand,
)
from torch import Tensor, nn

# --- no native rule: functorch's, or a loop ---


GENERIC: dict[str, Op] = {
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "group_norm": lambda x: F.group_norm(x.unsqueeze(0), 1),
    "rms_norm": lambda x: F.rms_norm(x, (3,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "conv1d": lambda x: F.conv1d(x.unsqueeze(0), x[:, :2].unsqueeze(0)),
    "max_pool": lambda x: F.max_pool1d(x.unsqueeze(0), 2),
    "interpolate": lambda x: F.interpolate(x.unsqueeze(0), scale_factor=2),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x.sin()),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.sin()),
    "where": lambda x: (torch.where(x > 0, x, 0.0), torch.where(x > 0, 1.0, x)),
    "max": lambda x: (x.max(), *x.max(1), x.amax(0)),
    "min": lambda x: (x.min(), *x.min(1)),
    "topk": lambda x: x.topk(2, 1),
    "sort": lambda x: x.sort(1),
    "kthvalue": lambda x: x.kthvalue(1, 0),
    "median": lambda x: x.median(),
    "quantile": lambda x: x.quantile(0.3),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(1),
    "prod": lambda x: x.prod(1),
    "logsumexp": lambda x: (x.logsumexp(1), x.logsumexp((0, 1))),
    "norm": lambda x: (x.norm(), x.norm(dim=1), torch.linalg.norm(x)),
    "var": lambda x: (x.var(1), x.std()),
    "index": lambda x: (x[torch.tensor([0, 1, 0])], x[torch.tensor([0, 1]), torch.tensor([1, 2])]),
    "index_computed": lambda x: x[x.argmax(0)],
    "mask": lambda x: x[x > 0],
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "take": lambda x: x.take(torch.tensor([0, 3])),
    "gather": lambda x: x.gather(1, torch.tensor([[0], [1]])),
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 1])),
    "scatter": lambda x: x.scatter(0, torch.tensor([[0, 1, 0]]), 1.0),
    "scatter_add": lambda x: x.scatter_add(0, torch.tensor([[0, 1, 0]]), x[:1].sin()),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 0]), x[:2]),
    "pad": lambda x: F.pad(x, (1, 2)),
    "flip": lambda x: (x.flip(0), x.roll(1, 0)),
    "repeat": lambda x: (x.repeat(2, 1), x.repeat_interleave(2, 0)),
    "tril": torch.tril,
    "svdvals": torch.linalg.svdvals,
    "inverse": lambda x: torch.linalg.inv(x.t() @ x + torch.eye(3, dtype=DOUBLE)),
    "cholesky": lambda x: torch.linalg.cholesky(x.t() @ x + torch.eye(3, dtype=DOUBLE)),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "erf": lambda x: (x.erf(), x.expm1(), x.atan()),
    "floor": lambda x: (x.floor(), x.sign(), x.detach() // 1, x % 1),
    "selu": lambda x: (F.selu(x), F.celu(x, 0.3), F.relu6(x)),
    "rpow": lambda x: 2.0**x,
    "lerp": lambda x: torch.lerp(x, x.sin(), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x.sin(), value=2),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "mse_loss": lambda x: F.mse_loss(x, x.detach().sin()),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).double()),
    "complex": lambda x: torch.complex(x, x.sin()).abs(),
    "fft": lambda x: torch.fft.fft(x).abs(),
    "real_view": lambda x: torch.view_as_real(torch.complex(x, x)),
    "like": lambda x: torch.ones_like(x) * x + torch.zeros_like(x),
    "to": lambda x: (x.float(), x.long(), x.to(torch.bfloat16).double()),
}


@pytest.mark.parametrize("name", GENERIC)
def test_op_without_a_native_rule(name: str) -> None:
    op = GENERIC[name]
    xs = [rand(2, 3), rand(2, 3), rand(4, 3), rand(2, 3)]
    check(op, *xs)
    check(lambda x: op(x.sin()), *xs)
    check(lambda x: op(x.sin()), xs[0])  # alone
    check(lambda p, x: op(p * x.sum()), *xs, parameters=[rand(2, 3)])


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": torch.erf,
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "clamp": lambda x: x.clamp(-0.5, 0.5) * 1.1,
    "where": lambda x: torch.where(x > 0, x, x.sin()),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "cumprod": lambda x: x.cumprod(1),
    "normalize": F.normalize,
    "rnn": lambda x: torch.rnn_tanh_cell(
        x, x, torch.eye(3, dtype=DOUBLE), torch.eye(3, dtype=DOUBLE)
    ),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("instances", [1, 3])
def test_a_generic_op_feeds_itself(name: str, instances: int) -> None:
    """Values that a batch saved for backward are not changed by the next batch of its signature."""
    op = CHAINS[name]
    xs = [rand(2, 3) for _ in range(instances)]
    check(lambda p, x: op(op(op(x * p))), *xs, parameters=[rand(3)])
    depths = [(rand(2, 3), n) for n in (1, 3, 2)]

    def nested(x: Tensor, depth: int) -> Tensor:
        for _ in range(depth):
            x = op(x)
        return x

    check(nested, *depths)


@pytest.mark.parametrize(
    "model",
    [nn.LSTM(4, 4, 2, bidirectional=True), nn.GRU(4, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0)],
    ids=lambda m: type(m).__name__,
)
def test_module(model: nn.Module) -> None:
    model.double()
    names, values = zip(*model.named_parameters(), strict=True)

    def call(*args: Tensor) -> Any:
        weights = dict(zip(names, args[:-1], strict=True))
        result = torch.func.functional_call(model, weights, (args[-1],))
        return result[0] if isinstance(result, tuple) else result

    check(call, *[rand(n, 4) for n in (2, 5, 5, 1)], parameters=values)


def test_empty_inputs_get_empty_gradients() -> None:
    check(lambda b, x: x + b, rand(0, 3), rand(2, 3), rand(0, 3), parameters=[rand(3)])


ERRORS: dict[str, Op] = {
    "add": lambda x: x + torch.ones(5, dtype=DOUBLE),
    "matmul": lambda x: x @ torch.ones(7, 2, dtype=DOUBLE),
    "linear": lambda x: F.linear(x, torch.ones(7, 2, dtype=DOUBLE)),
    "stack": lambda x: torch.stack([x, x[0]]),
    "cat": lambda x: torch.cat([x, x.t()]),
    "select": lambda x: x[10],
    "view": lambda x: x.view(7),
    "reshape": lambda x: x.reshape(4, 4),
    "softmax": lambda x: x.softmax(5),
    "sum": lambda x: x.sum(4),
    "sum_twice": lambda x: x.sum((0, 0)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(9, dtype=torch.long)),
    "expand": lambda x: x.expand(7, 7),
    "permute": lambda x: x.permute(0, 0),
    "transpose": lambda x: x.transpose(0, 5),
    "unsqueeze": lambda x: x.unsqueeze(9),
    "narrow": lambda x: x.narrow(0, 1, 90),
    "split": lambda x: x.split([1, 1, 5], 1),
    "t": lambda x: x.unsqueeze(0).t(),
    "flatten": lambda x: x.flatten(1, 0),
    "unbind": lambda x: x.unbind(4),
    "dropout": lambda x: torch.dropout(x, -1.0, True),
    "layer_norm": lambda x: F.layer_norm(x, (9,)),
    "mean_of_integers": lambda x: x.argmax(-1).mean(),
}


@pytest.mark.parametrize("name", ERRORS)
def test_shape_errors_are_eagers_at_the_same_line(name: str) -> None:
    x = rand(2, 3).requires_grad_()
    with pytest.raises((RuntimeError, IndexError, ValueError)) as expected:
        ERRORS[name](x.tanh())
    with ab.batch():
        h = x.tanh()
        with pytest.raises(type(expected.value)) as raised:
            ERRORS[name](h)
        after = h * 2
    assert str(raised.value).startswith(str(expected.value).splitlines()[0])
    assert_same("after the error", after, x.tanh() * 2)


# --- the report names ops without a native rule ---


NOT_NATIVE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "cumprod_rows": (lambda x: x.cumprod(0), "functorch"),
    "sort_rows": (lambda x: x.sort(0)[0], "functorch"),
    "diag_embed": (torch.diag_embed, "functorch"),
    "einsum": (lambda x: torch.linalg.matrix_norm(x), "functorch"),
    "sum_apart": (lambda x: x.view(1, 2, 3).nansum((0, 2)), "functorch"),
}


@BOTH
@pytest.mark.parametrize("name", NOT_NATIVE)
def test_generic_rule(name: str, dtype: torch.dtype) -> None:
    op, rule = NOT_NATIVE[name]
    xs = [rand(2, 3, dtype=dtype) for _ in range(4)]
    report = check(lambda x: op(x.tanh()), *xs)
    generic = [s for s in report.signatures if s.rule != "native"]
    assert generic
    assert {s.rule for s in generic} == {rule}
    assert all((s.instances, s.batches) == (4, 1) for s in generic)


def test_a_random_op_that_is_differentiated_is_a_loop() -> None:
    x = rand(2, 3).requires_grad_()
    with ab.batch() as scope:
        results = [F.rrelu(x * 1, training=True) for _ in range(3)]
    rows = {s.op: s for s in scope.report().signatures}
    assert (rows["aten::rrelu"].rule, rows["aten::rrelu"].launches) == ("loop", 3)
    assert len(results) == 3


# --- [dynet]: ops that other systems put into one batch by mistake ---


SIMILAR: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "activations": [torch.relu, F.elu, torch.tanh, torch.sigmoid, F.silu],
    "elu": [lambda x, a=a: F.elu(x, a) for a in (1.0, 0.5, 2.0)],
    "leaky_relu": [lambda x, a=a: F.leaky_relu(x, a) for a in (0.1, 0.01)],
    "hardtanh": [lambda x, a=a: F.hardtanh(x, -a, a) for a in (0.1, 0.3)],
    "gelu": [F.gelu, lambda x: F.gelu(x, approximate="tanh")],
    "softmax": [lambda x, d=d: x.softmax(d) for d in (0, 1)],
    "softmax_kinds": [lambda x: x.softmax(0), lambda x: x.log_softmax(0)],
    "softmax_ranks": [lambda x: x.softmax(1), lambda x: x.unsqueeze(0).softmax(1)[0]],
    "cat": [lambda x, d=d: torch.cat([x, x * 2], d) for d in (0, 1)],
    "stack": [lambda x, d=d: torch.stack([x, x * 2], d) for d in (0, 1, 2)],
    "sum": [lambda x, d=d: x.sum(d) for d in (0, 1)],
    "keepdim": [lambda x, k=k: x.mean(0, keepdim=k) for k in (True, False)],
    "add": [lambda x, c=c: x + c for c in (1, 1.5, 2)],
    "mul": [lambda x, c=c: x * c for c in (0.1, 0.2)],
    "sides": [lambda x: x - 2, lambda x: 2 - x, lambda x: x / 2, lambda x: 2 / x],
    "alpha": [lambda x, a=a: torch.add(x, x.sin(), alpha=a) for a in (1, 2)],
    "pow": [lambda x, a=a: x**a for a in (2, 3)],
    "signed_zero": [lambda x, c=c: x * 0 + c for c in (0.0, -0.0)],
    "views": [lambda x, d=d: x.select(d, 0).sin() for d in (0, 1)],
}


@pytest.mark.parametrize("name", SIMILAR)
def test_similar_ops_are_not_merged(name: str) -> None:
    """[dynet] Ops that differ only in kind, axis or constant, in one block or several."""
    ops = SIMILAR[name]
    x = rand(3, 3)
    check(lambda x: [op(x.tanh()) for op in ops], x, x + 1, x - 1)
    check(lambda x, i: ops[i](x.tanh()), *[(x + i, i % len(ops)) for i in range(6)])
    for op in [*ops, *ops[::-1]]:
        check(lambda x, op=op: op(x.tanh()), x, x + 1)


def test_a_constant_tensor_is_not_the_first_members() -> None:
    """[dynet] Each instance reads its own operand, also if another operand is shared."""
    constants = [torch.full((3,), float(i), dtype=DOUBLE) for i in range(4)]
    check(lambda p, x, i: x.tanh() * constants[i] + p, *[(rand(3), i) for i in range(4)],
          parameters=[rand(3)])  # fmt: skip
    check(lambda p, x, i: F.linear(x, p * constants[i]), *[(rand(3), i) for i in range(4)],
          parameters=[rand(2, 3)])  # fmt: skip
