"""A trial run of an op on zeros finds strides, errors, aliases and types that no slab can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_capture import is_pending
from helpers_rules import DOUBLE, check, raises_as_eager, rand, rules_of
from torch import Tensor, nn


def leaf(*sizes: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.ones(sizes, dtype=dtype, requires_grad=True)


def both(program: Callable[[], Any], autocast: bool = False) -> tuple[Any, Any]:
    """Returns the results of the program in a block and in eager mode."""

    def run(enabled: bool) -> Any:
        cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
        with ab.batch(enabled=enabled), cast:
            return program()

    return run(True), run(False)


# --- the argument itself, or a view of it ---

ARGUMENT: dict[str, Callable[[Tensor], Tensor]] = {
    "type_as": lambda x: x.type_as(x),
    "to": lambda x: x.to(x.dtype),
    "flatten": lambda x: x.flatten(),
    "contiguous": lambda x: x.contiguous(),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "diff_of_nothing": lambda x: x[:0].diff(),
    "reshape": lambda x: x.reshape(2),
    "view_as": lambda x: x.view_as(x),
    "expand_as": lambda x: x.expand_as(x),
    "chain_matmul": lambda x: torch.chain_matmul(x.view(1, 2)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("name", ARGUMENT)
def test_an_op_that_returns_its_argument_returns_it(
    name: str, pending: bool, autocast: bool
) -> None:
    """If eager returns the argument itself, so does the block, and writes reach the argument."""

    def program() -> Any:
        x = leaf(2)
        y = x * 1 if pending else x.detach()
        result = ARGUMENT[name](y)
        same = result is y
        with torch.no_grad():
            result.mul_(5)
        return same, y

    (same, y), (same_in_eager, expected) = both(program, autocast)
    assert same == same_in_eager
    assert y.tolist() == expected.tolist()


def test_a_write_through_type_as() -> None:
    """Converts a tensor from before the block to the type of a parameter, and writes to it."""
    x = torch.ones(2, dtype=DOUBLE)
    with ab.batch():
        x.type_as(leaf(2)).mul_(5)
    assert x.tolist() == [5, 5]


# --- autocast ---


def test_a_mask_is_left_to_eager_under_autocast() -> None:
    """The number of selected elements depends on values."""

    def program() -> Tensor:
        x = leaf(2, 4, dtype=torch.float32) * 2
        return x[torch.tensor([[True, False, True, True], [False, True, False, False]])]

    got, expected = both(program, autocast=True)
    assert torch.equal(got, expected)


def test_one_hot_is_left_to_eager_under_autocast() -> None:
    """The number of classes depends on values."""

    def program() -> Tensor:
        w = leaf(2)
        return F.one_hot((w * 3).long())

    got, expected = both(program, autocast=True)
    assert got.shape == expected.shape == (2, 4)
    assert torch.equal(got, expected)


def test_ops_have_native_rules_under_autocast() -> None:
    """The rules are the same with and without autocast. A product reads the cast operands."""
    w = leaf(3, dtype=torch.float32)
    with ab.batch() as scope, torch.autocast("cpu", dtype=torch.bfloat16):
        results = [(w * float(i)).tanh().sum() for i in range(4)]
        product = torch.mm(w.view(1, 3) * 2, w.view(3, 1) * 2)
    rules = rules_of(scope.report())
    assert rules["aten::tanh"] == rules["aten::mul.Tensor"] == "native"
    assert rules["aten::mm"] == "native"
    assert product.dtype == torch.bfloat16
    assert results[3].dtype == torch.float32
    torch.testing.assert_close(results[3], (w * 3.0).tanh().sum())


def test_a_trial_draws_nothing() -> None:
    """The numbers are the same, whether or not the op ran before."""

    def program() -> Tensor:
        torch.manual_seed(0)
        w = leaf(57, dtype=torch.float32)
        cast = torch.autocast("cpu", dtype=torch.bfloat16)
        with ab.batch(), cast:
            return F.scaled_dot_product_attention(*[w.view(1, 3, 19)] * 3, dropout_p=0.5)

    assert torch.equal(program(), program())


# --- strides ---

STRIDES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scalar_pow": lambda x, y: 2 ** x.t(),
    "copysign": lambda x, y: torch.copysign(x.t(), y.t().contiguous()),
    "threshold": lambda x, y: F.threshold(x.t(), 0.1, 5.0),
    "add": lambda x, y: x.t() + y.t().contiguous(),
    "add_row": lambda x, y: x.t() + y[:, 0],
    "expanded": lambda x, y: x[:1].t().expand(3, 2) * y.t(),
    "number": lambda x, y: 3 - x.t(),
    "lerp": lambda x, y: torch.lerp(x.t(), y.t(), 0.5),
    "where": lambda x, y: torch.where(x.t() > 0, x.t(), 0.0),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("name", STRIDES)
def test_strides_of_what_is_not_row_major(name: str, outside: bool, autocast: bool) -> None:
    """Tests transposed operands together with scalars, rows and contiguous operands."""

    def program() -> Tensor:
        w = leaf(2, 3)
        x = rand(2, 3) if outside else w * 2
        return STRIDES[name](x, w * 3)

    got, expected = both(program, autocast)
    assert got.stride() == expected.stride()


# --- errors ---

f32 = torch.float32
ERRORS: dict[str, Callable[[], Any]] = {
    "addmv_of_a_longer_vector": lambda: torch.addmv(leaf(4), leaf(1, 4), leaf(4)),
    "addmm_of_a_cube": lambda: torch.addmm(leaf(1, 1, 4), leaf(4, 4), leaf(4, 4)),
    "addmm_of_bools": lambda: torch.addmm(leaf(2, 2) * 1, leaf(2, 2), torch.ones(2, 2).bool()),
    "addmm_mixed": lambda: torch.addmm(leaf(2, 2), leaf(2, 2), leaf(2, 2, dtype=f32)),
    "bmm_mixed": lambda: torch.bmm(leaf(1, 2, 2), leaf(1, 2, 2, dtype=f32)),
    "baddbmm_mixed": lambda: torch.baddbmm(leaf(1, 2, 2), leaf(1, 2, 2), leaf(1, 2, 2, dtype=f32)),
    "einsum_mixed": lambda: torch.einsum("ij,jk", leaf(2, 2), leaf(2, 2, dtype=f32)),
    "conv_mixed": lambda: F.conv1d(leaf(1, 1, 4), leaf(1, 1, 2, dtype=f32)),
    "linear_mixed": lambda: F.linear(leaf(2), leaf(1, 2, dtype=f32)),
    "dot_mixed": lambda: torch.dot(leaf(2), leaf(2, dtype=f32)),
    "mv_mixed": lambda: torch.mv(leaf(2, 2), leaf(2, dtype=f32)),
    "nll_of_floats": lambda: F.nll_loss(leaf(2, 3), torch.zeros(2)),
    "embedding_of_floats": lambda: F.embedding(torch.zeros(2), leaf(3, 2)),
    "bitwise": lambda: leaf(2) & leaf(2),
    "softmax_dim": lambda: leaf(2, 2).softmax(3),
    "mean_of_integers": lambda: (leaf(2) > 0).mean(),
    "cat_of_ranks": lambda: torch.cat([leaf(2, 2), leaf(2)]),
    "minus_true": lambda: leaf(2) * 1 - True,
    "embedding_in_nothing": lambda: F.embedding(torch.tensor(0), leaf(0, 2)),
    "lstm_cell": lambda: nn.LSTMCell(2, 2)(leaf(1, 3, dtype=f32)),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments_are_refused_at_the_users_line(name: str) -> None:
    """Eager's error is raised before the block ends."""
    raises_as_eager(ERRORS[name])
    with ab.batch(), pytest.raises((RuntimeError, IndexError, ValueError)):
        ERRORS[name]()


def test_an_error_in_a_part_names_the_whole() -> None:
    """The error names the op that the user called, and its shapes."""
    message = raises_as_eager(lambda: torch.einsum("ij,jk", leaf(2, 2), leaf(3, 2)))
    assert "aten::einsum(Double[2, 2], Double[3, 2])" in message


def test_an_error_of_zeros_alone_is_none() -> None:
    """Integer division by a pending tensor is captured, although the trial on zeros fails."""
    w = leaf(2)
    with ab.batch() as scope:
        results = [torch.tensor([7, 9]) // ((w * i).long() + 1) for i in range(1, 4)]
    assert [r.tolist() for r in results] == [[3, 4], [2, 3], [1, 2]]
    assert not scope.report().at_once


# --- types ---


# The second op is new in PyTorch 2.15.
HALF_COMPLEX = [getattr(torch, n) for n in ("complex32", "bcomplex32") if hasattr(torch, n)]


@pytest.mark.parametrize("dtype", HALF_COMPLEX, ids=str)
def test_quantised_and_half_complex_results_are_not_deferred(dtype: torch.dtype) -> None:
    """A slab cannot hold tensors of these dtypes."""
    w = leaf(2, dtype=f32)
    with ab.batch():
        quantised = torch.quantize_per_tensor(w * 3, 0.1, 0, torch.qint8)
        half = (w * 3).to(dtype)
        assert not is_pending(quantised)
        assert not is_pending(half)
    assert quantised.dequantize().tolist() == pytest.approx([3, 3])
    half.to(torch.complex64).real.sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [3, 3]


# --- ops that run in parts, and ops that write nothing ---

NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(3).eval(),
    "instance": lambda: nn.InstanceNorm1d(3),
    "instance_tracked": lambda: nn.InstanceNorm1d(3, track_running_stats=True).eval(),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_that_writes_nothing_is_batched(name: str) -> None:
    """The norm runs in evaluation mode, or without running statistics."""
    norm = NORMS[name]().double()
    weight = rand(3, 1).requires_grad_()
    report = check(
        lambda w, x: norm(x * w), *(rand(2, 3, 4) for _ in range(4)), parameters=[weight]
    )
    assert not report.at_once
    assert report.batches == 2


def test_a_norm_in_training_updates_its_statistics() -> None:
    """The updates are in the order of the instances."""
    ours, theirs = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    xs = [torch.randn(4, 3) for _ in range(3)]
    w = leaf(3, dtype=f32)
    with ab.batch():
        results = [ours(x * w) for x in xs]
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, theirs(x * w))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)


# --- values kept for backward ---

KEEPS_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(0),
    "roll": lambda x: x.roll(1),
}


@pytest.mark.parametrize("name", KEEPS_NOTHING)
def test_a_second_backward_where_eager_keeps_nothing(name: str) -> None:
    """The second backward adds the gradient again, without an error."""
    w = leaf(3)
    with ab.batch():
        losses = [KEEPS_NOTHING[name](w + i).sum() for i in range(2)]
    grads = [torch.autograd.grad(losses[0], w)[0] for _ in range(2)]
    assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("name", ["logcumsumexp", "atan"])
def test_a_second_backward_where_eager_keeps_values(name: str) -> None:
    """The block raises eager's error."""
    w = leaf(3)
    with ab.batch():
        ops: dict[str, Callable[[Tensor], Tensor]] = {
            "logcumsumexp": lambda x: x.logcumsumexp(0),
            "atan": torch.atan,
        }
        losses = [ops[name](w + i).sum() for i in range(2)]
    losses[0].backward()
    losses[1].backward()
    with pytest.raises(RuntimeError, match="second time"):
        losses[0].backward()


@pytest.mark.parametrize("op", [torch.tanh, torch.exp, torch.sqrt, torch.sigmoid, torch.relu])
def test_an_operand_that_backward_does_not_read_may_be_written_to(
    op: Callable[[Tensor], Tensor],
) -> None:
    """The gradient is computed from the result."""

    def gradient(enabled: bool) -> Tensor:
        w = torch.full((3,), 2.0, dtype=DOUBLE, requires_grad=True)
        with ab.batch(enabled=enabled):
            ys = [w + i for i in range(2)]
            results = [op(y) for y in ys]
        with torch.no_grad():
            ys[0].mul_(7)
        torch.stack(results).sum().backward()
        assert w.grad is not None
        return w.grad

    torch.testing.assert_close(gradient(True), gradient(False))
