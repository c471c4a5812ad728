"""Instances of different lengths in one call: every op that works row by row, and every reduction
over an instance's rows, with gradients. The number of batches does not depend on the lengths."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_ragged import LENGTHS, WIDTH, Case, check_lengths
from helpers_rules import check, rand
from torch import Tensor

CLASSES = 5
CLASS_WEIGHTS = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)


def labels(n: int) -> Tensor:
    return torch.arange(n) % CLASSES


def logits(n: int) -> tuple[Tensor, Tensor]:
    return rand(n, CLASSES), labels(n)


def some_ignored(n: int) -> tuple[Tensor, Tensor]:
    return rand(n, CLASSES), torch.where(labels(n) == 2, -100, labels(n))


def probabilities(n: int) -> tuple[Tensor, Tensor]:
    return rand(n, CLASSES), rand(n, CLASSES).softmax(1)


def tokens(n: int) -> Tensor:
    return (torch.arange(n) * 7) % 6


def same_shape(n: int) -> tuple[Tensor, Tensor]:
    return rand(n, WIDTH), rand(n, WIDTH)


def pairs_of_columns(n: int) -> tuple[Tensor, Tensor]:
    return rand(n, WIDTH), torch.arange(2 * n).view(n, 2) % WIDTH


def cube(n: int) -> Tensor:
    return rand(n, 2, WIDTH)


W = WIDTH

# --- ops that work row by row -------------------------------------------------------------------

ROWWISE: dict[str, Case] = {
    # elementwise ops of one tensor
    **{
        name: Case(function)
        for name, function in {
            "tanh": torch.tanh,
            "relu": torch.relu,
            "relu6": F.relu6,
            "gelu": F.gelu,
            "prelu": lambda x: F.prelu(x, torch.full((1,), 0.3, dtype=x.dtype)),
            "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
            "silu": F.silu,
            "mish": F.mish,
            "elu": F.elu,
            "selu": F.selu,
            "celu": lambda x: F.celu(x, 0.7),
            "softplus": F.softplus,
            "softsign": F.softsign,
            "hardswish": F.hardswish,
            "hardsigmoid": F.hardsigmoid,
            "logsigmoid": F.logsigmoid,
            "tanhshrink": F.tanhshrink,
            "threshold": lambda x: F.threshold(x, 0.1, 20.0),
            "erf": torch.erf,
            "expm1": torch.expm1,
            "log1p": lambda x: x.square().log1p(),
            "clamp": lambda x: x.clamp(-0.5, 0.5),
            "clamp_min": lambda x: x.clamp_min(0.1),
            "sign": torch.sign,
            "floor": torch.floor,
            "round": torch.round,
            "atan": torch.atan,
            "sinh": torch.sinh,
            "nan_to_num": torch.nan_to_num,
            "isnan": lambda x: x.tanh().isnan(),
            "compare": lambda x: x.tanh() > 0.1,
            "where_number": lambda x: torch.where(x.tanh() > 0, x, 0.0),
            "masked_fill": lambda x: x.tanh().masked_fill(x > 0, 2.0),
            "pow_tensor": lambda x: x.square() ** x,
            "float": lambda x: x.float(),
            "to_int": lambda x: x.tanh().mul(5).long() + 1,
            "int_pointwise": lambda x: (x.tanh().mul(5).long() * 3) % 4,
            "logical_not": lambda x: (x.tanh() > 0).logical_not(),
        }.items()
    },
    # elementwise ops of several tensors
    "add": Case(torch.add, same_shape),
    "mul": Case(torch.mul, same_shape),
    "maximum": Case(torch.maximum, same_shape),
    "minimum": Case(torch.minimum, same_shape),
    "lerp": Case(lambda x, y: torch.lerp(x, y, 0.3), same_shape),
    "addcmul": Case(lambda x, y: torch.addcmul(x, x, y, value=0.5), same_shape),
    "hypot": Case(torch.hypot, same_shape),
    "atan2": Case(torch.atan2, same_shape),
    "where": Case(lambda x, y: torch.where(x > y, x, y), same_shape),
    "fmod": Case(lambda x, y: torch.fmod(x, y.abs() + 1), same_shape),
    "add_bias": Case(torch.add, parameters=[(W,)]),
    "maximum_bias": Case(torch.maximum, parameters=[(W,)]),
    "mul_column": Case(torch.mul, lambda n: (rand(n, W), rand(n, 1))),
    "column_div": Case(lambda x, y: y / x, lambda n: (rand(n, W), rand(n, 1))),
    "maximum_column": Case(torch.maximum, lambda n: (rand(n, W), rand(n, 1))),
    "where_column": Case(
        lambda x, c: torch.where(c > 0, x, -x), lambda n: (rand(n, W), rand(n, 1))
    ),
    "add_cube": Case(torch.add, lambda n: (cube(n), rand(n, 1, W)), one=False),
    "sub_keepdim_row": Case(lambda x: x - x.sum(0, keepdim=True)),
    "sub_row": Case(lambda x: x - x.sum(0)),
    "mul_row_number": Case(lambda x: x * x.sum()),
    "expanded_column": Case(lambda x: x / (x.square().sum(1, keepdim=True) + 1).expand_as(x)),
    "lerp_tensor": Case(lambda x, y: torch.lerp(x, y, x.sigmoid()), same_shape),
    "add_int": Case(lambda x, i: x + i, lambda n: (rand(n, W), tokens(n).unsqueeze(1))),
    # products with a shared matrix
    "linear": Case(lambda w, b, x: F.linear(x, w, b), parameters=[(3, W), (3,)]),
    "linear_3d": Case(lambda w, b, x: F.linear(x, w, b), cube, [(3, W), (3,)]),
    "linear_batched": Case(
        lambda w, b, x: F.linear(x, w, b), lambda n: rand(1, n, W), [(3, W), (3,)]
    ),
    "matmul": Case(lambda w, x: x @ w, parameters=[(W, 3)]),
    "matmul_batched": Case(lambda w, x: x @ w, lambda n: rand(1, n, W), [(W, 3)]),
    "matmul_vector": Case(lambda w, x: x.tanh() @ w, parameters=[(W,)]),
    "own_vector": Case(lambda x, v: x.tanh() @ v, lambda n: (rand(n, W), rand(W))),
    "weighted_rows": Case(lambda x, v: v.softmax(0) @ x.tanh(), lambda n: (rand(n, W), rand(n))),
    "addmm": Case(lambda w, b, x: torch.addmm(b, x, w), parameters=[(W, 3), (3,)]),
    # lookups
    "embedding": Case(lambda w, t: F.embedding(t, w), tokens, [(6, W)]),
    "embedding_padding": Case(lambda w, t: F.embedding(t, w, padding_idx=0), tokens, [(6, W)]),
    "embedding_by_freq": Case(
        lambda w, t: F.embedding(t, w, scale_grad_by_freq=True), lambda n: tokens(n) // 2, [(6, W)]
    ),
    "embedding_2d": Case(
        lambda w, t: F.embedding(t, w), lambda n: tokens(n).unsqueeze(0), [(6, W)]
    ),
    **{
        f"embedding_bag_{mode}": Case(
            lambda w, t, mode=mode: F.embedding_bag(t.unsqueeze(0), w, mode=mode),
            tokens,
            [(6, W)],
            empty=False,
        )
        for mode in ("sum", "mean", "max")
    },
    "embedding_bag_offsets": Case(
        lambda w, t: F.embedding_bag(t, w, torch.tensor([0, 1]), padding_idx=0),
        lambda n: tokens(n + 1),
        [(6, W)],
    ),
    "embedding_bag_weights": Case(
        lambda w, t, p: F.embedding_bag(t.unsqueeze(0), w, mode="sum", per_sample_weights=p),
        lambda n: (tokens(n), rand(1, n)),
        [(6, W)],
        empty=False,
    ),
    "index_select": Case(
        lambda x, i: x.tanh().index_select(0, i),
        lambda n: (rand(n, W), torch.arange(n).flip(0) // 2),
    ),
    "index": Case(lambda x, i: x.tanh()[i], lambda n: (rand(n, W), -1 - torch.arange(n) // 2)),
    "index_2d": Case(
        lambda x, i: x.tanh()[i], lambda n: (rand(n, W), (torch.arange(2 * n) // 2).view(n, 2))
    ),
    "index_parameter": Case(lambda w, t: w[t], tokens, [(6, W)]),
    "index_select_parameter": Case(lambda w, t: w.index_select(0, t), tokens, [(6, W)]),
    "index_list": Case(lambda x: x.tanh()[[0, -1, 0]], empty=False),
    "index_row": Case(lambda x: x.tanh()[0].tanh() + x.tanh()[-1].tanh(), empty=False),
    "slice": Case(lambda x: x.tanh()[1:].tanh()),
    "slice_step": Case(lambda x: x.tanh()[::2].tanh()),
    "slice_columns": Case(lambda x: x.tanh()[:, 1:3].tanh()),
    "gather": Case(
        lambda x, i: x.tanh().gather(1, i),
        pairs_of_columns,
    ),
    # softmax, norms
    "softmax": Case(lambda x: F.softmax(x, -1)),
    "log_softmax": Case(lambda x: F.log_softmax(x, 1)),
    "softmax_cube": Case(lambda x: F.softmax(x, 1), cube),
    "log_softmax_cube": Case(lambda x: F.log_softmax(x, -2), cube),
    "softmin": Case(lambda x: F.softmin(x, -1)),
    "softmax_dtype": Case(lambda x: F.softmax(x, -1, dtype=torch.float32)),
    "layer_norm": Case(lambda w, b, x: F.layer_norm(x, (W,), w, b), parameters=[(W,), (W,)]),
    "layer_norm_plain": Case(lambda x: F.layer_norm(x, (W,))),
    "layer_norm_two": Case(lambda w, x: F.layer_norm(x, (2, W), w), cube, [(2, W)]),
    "rms_norm": Case(lambda w, x: F.rms_norm(x, (W,), w), parameters=[(W,)]),
    "normalize": Case(lambda x: F.normalize(x, dim=-1)),
    "normalize_1": Case(lambda x: F.normalize(x, p=1.0, dim=1)),
    "norm": Case(lambda x: x.norm(dim=-1)),
    "vector_norm": Case(lambda x: torch.linalg.vector_norm(x, dim=-1)),
    "cosine_similarity": Case(lambda x, y: F.cosine_similarity(x, y, dim=-1), same_shape),
    # trailing dimensions
    "glu": Case(lambda x: F.glu(x, -1)),
    "glu_cube": Case(lambda x: F.glu(x, 1), cube),
    "flip_columns": Case(lambda x: x.flip(-1)),
    "roll_columns": Case(lambda x: x.roll(1, 1)),
    "pad_columns": Case(lambda x: F.pad(x, (1, 2), value=0.5)),
    "cumsum_columns": Case(lambda x: x.cumsum(-1)),
    "sum_columns": Case(lambda x: x.sum(-1)),
    "mean_columns": Case(lambda x: x.mean(1, keepdim=True)),
    "sum_dtype": Case(lambda x: x.sum(-1, dtype=torch.float32)),
    "sum_bool": Case(lambda x: (x.tanh() > 0).sum(-1)),
    "prod_columns": Case(lambda x: x.prod(-1)),
    "amax_columns": Case(lambda x: x.amax(-1)),
    "max_columns": Case(lambda x: x.max(-1)),
    "argmax_columns": Case(lambda x: x.tanh().argmax(-1)),
    "logsumexp_columns": Case(lambda x: x.logsumexp(-1)),
    "var_columns": Case(lambda x: x.var(-1)),
    "std_columns": Case(lambda x: x.std(-1, unbiased=False)),
    "topk": Case(lambda x: x.topk(2, -1)),
    "sort": Case(lambda x: x.sort(-1)),
    "any": Case(lambda x: (x.tanh() > 0).any(-1)),
    "tril": Case(lambda x: x.tril(), cube),
    "triu": Case(lambda x: x.triu(1), cube),
    "diff": Case(lambda x: x.diff(dim=-1)),
    # joining and moving rows
    "cat_rows": Case(lambda x, y: torch.cat([x.tanh(), y]), same_shape),
    "cat_columns": Case(lambda x, y: torch.cat([x.tanh(), y], -1), same_shape),
    "stack": Case(lambda x, y: torch.stack([x.tanh(), y], 1), same_shape),
    "flip_rows": Case(lambda x: x.tanh().flip(0)),
    "roll_rows": Case(lambda x: x.tanh().roll(1, 0)),
    "pad_rows": Case(lambda x: F.pad(x, (0, 0, 1, 2))),
    "pad_to_length": Case(lambda x: F.pad(x, (0, 0, 0, 12 - x.shape[0]), value=-1.0)),
    "flatten": Case(lambda x: x.tanh().flatten().exp()),
    "one_hot": Case(lambda t: F.one_hot(t, 6), tokens),
    # losses of each row
    "cross_entropy_none": Case(lambda x, t: F.cross_entropy(x, t, reduction="none"), logits),
    "mse_none": Case(lambda x, y: F.mse_loss(x, y, reduction="none"), same_shape),
    "bce_none": Case(
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="none"),
        same_shape,
    ),
    "smooth_l1_none": Case(lambda x, y: F.smooth_l1_loss(x, y, reduction="none"), same_shape),
    "kl_none": Case(
        lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="none"), same_shape
    ),
}

# --- reductions over an instance's rows ----------------------------------------------------------

REDUCTIONS: dict[str, Case] = {
    "sum": Case(lambda x: x.sum()),
    "sum_0": Case(lambda x: x.sum(0)),
    "sum_keepdim": Case(lambda x: x.sum(0, keepdim=True)),
    "sum_two": Case(lambda x: x.sum((0, 1)), cube),
    "sum_middle": Case(lambda x: x.sum(1), lambda n: rand(1, n, W)),
    "sum_int": Case(lambda x: x.tanh().mul(5).long().sum(0)),
    "count": Case(lambda x: (x.tanh() > 0).sum()),
    "mean": Case(lambda x: x.mean()),
    "mean_0": Case(lambda x: x.mean(0)),
    "mean_middle": Case(lambda x: x.mean(1), lambda n: rand(1, n, W)),
    "max": Case(lambda x: x.max(), empty=False),
    "min": Case(lambda x: x.min(), empty=False),
    "max_0": Case(lambda x: x.max(0), empty=False),
    "min_0": Case(lambda x: x.min(0, keepdim=True), empty=False),
    "max_0_values": Case(lambda x: x.max(0).values.tanh(), empty=False),
    "amax": Case(lambda x: x.amax(0), empty=False),
    "amin": Case(lambda x: x.amin(0, keepdim=True), empty=False),
    "amax_all": Case(lambda x: x.amax(), empty=False),
    "amax_ties": Case(lambda x: x.round().amax(0), empty=False),
    "max_ties": Case(lambda x: x.round().max(0), empty=False),
    "argmax": Case(lambda x: x.tanh().argmax(0), empty=False),
    "argmax_all": Case(lambda x: x.tanh().argmax(), empty=False),
    "logsumexp": Case(lambda x: x.logsumexp(0)),
    "logsumexp_keepdim": Case(lambda x: x.logsumexp(0, keepdim=True)),
    "logsumexp_vector": Case(lambda x: x.logsumexp(0), lambda n: rand(n)),
    "softmax_0": Case(lambda x: x.softmax(0)),
    "log_softmax_0": Case(lambda x: x.log_softmax(0)),
    "softmax_vector": Case(lambda x: x.softmax(-1), lambda n: rand(n)),
    "softmax_cube_0": Case(lambda x: x.softmax(0), cube),
    "cumsum": Case(lambda x: x.cumsum(0)),
    "cumsum_vector": Case(lambda x: x.cumsum(-1), lambda n: rand(n)),
    "prod": Case(lambda x: x.prod(0)),
    "prod_dtype": Case(lambda x: x.prod(0, dtype=torch.float64)),
    "prod_all": Case(lambda x: x.prod()),
    "all_of_columns": Case(
        lambda x: torch.stack([x.t().sum(), x.t().prod(), x.t().amax(), x.t().mean(), x.t().max()]),
        empty=False,
    ),
    "var": Case(lambda x: x.var(0, unbiased=False), empty=False),
    "var_unbiased": Case(lambda x: x.var(0)),
    "std": Case(lambda x: (x + torch.arange(len(x)).view(-1, 1)).std(0, unbiased=False)),
    "std_all": Case(lambda x: x.std()),
    "norm_0": Case(lambda x: x.norm(dim=0)),
    "norm_all": Case(lambda x: x.norm()),
    "any_0": Case(lambda x: (x.tanh() > 0).any(0)),
    "all": Case(lambda x: (x.tanh() > 0).all()),
    # normalisation with statistics of each instance's rows
    "batch_norm": Case(
        lambda w, b, x: F.batch_norm(x, None, None, w, b, training=True),
        lambda n: rand(n + 1, W),
        [(W,), (W,)],
        empty=False,
    ),
    "batch_norm_plain": Case(
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda n: rand(n + 1, W),
        empty=False,
    ),
    # losses
    **{
        f"{name}_{reduction}": Case(
            lambda x, t, f=function, r=reduction: f(x, t, reduction=r), make
        )
        for reduction in ("mean", "sum", "none")
        for name, function, make in (
            ("cross_entropy", F.cross_entropy, logits),
            ("cross_entropy_ignored", F.cross_entropy, some_ignored),
            ("cross_entropy_probabilities", F.cross_entropy, probabilities),
            (
                "cross_entropy_smooth",
                lambda x, t, reduction: F.cross_entropy(
                    x, t, reduction=reduction, label_smoothing=0.1
                ),
                some_ignored,
            ),
            (
                "cross_entropy_smooth_probabilities",
                lambda x, t, reduction: F.cross_entropy(
                    x, t, reduction=reduction, label_smoothing=0.1
                ),
                probabilities,
            ),
            (
                "nll_loss",
                lambda x, t, reduction: F.nll_loss(
                    x.log_softmax(1), t, reduction=reduction, ignore_index=2
                ),
                logits,
            ),
            ("mse_loss", F.mse_loss, same_shape),
            ("l1_loss", F.l1_loss, same_shape),
            ("smooth_l1_loss", F.smooth_l1_loss, same_shape),
            (
                "binary_cross_entropy_with_logits",
                lambda x, y, reduction: F.binary_cross_entropy_with_logits(
                    x, y.sigmoid(), reduction=reduction
                ),
                same_shape,
            ),
            (
                "binary_cross_entropy",
                lambda x, y, reduction: F.binary_cross_entropy(
                    x.sigmoid(), y.detach().sigmoid(), reduction=reduction
                ),
                same_shape,
            ),
            (
                "kl_div",
                lambda x, y, reduction: F.kl_div(x.log_softmax(1), y, reduction=reduction),
                same_shape,
            ),
        )
    },
    **{
        f"{name}_weighted_{reduction}": Case(
            lambda x, t, f=function, r=reduction: f(x, t, reduction=r), make
        )
        for reduction in ("mean", "sum", "none")
        for name, function, make in (
            (
                "cross_entropy",
                lambda x, t, reduction: F.cross_entropy(x, t, CLASS_WEIGHTS, reduction=reduction),
                some_ignored,
            ),
            (
                "cross_entropy_smooth",
                lambda x, t, reduction: F.cross_entropy(
                    x, t, CLASS_WEIGHTS, reduction=reduction, label_smoothing=0.2
                ),
                some_ignored,
            ),
            (
                "cross_entropy_probabilities",
                lambda x, t, reduction: F.cross_entropy(
                    x, t, CLASS_WEIGHTS, reduction=reduction, label_smoothing=0.2
                ),
                probabilities,
            ),
            (
                "nll_loss",
                lambda x, t, reduction: F.nll_loss(
                    x.log_softmax(1), t, CLASS_WEIGHTS, reduction=reduction
                ),
                some_ignored,
            ),
        )
    },
}

CASES = {
    **{f"rows-{k}": c for k, c in ROWWISE.items()},
    **{f"reduce-{k}": c for k, c in REDUCTIONS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_lengths_do_not_add_batches(name: str) -> None:
    check_lengths(CASES[name])


def test_a_bag_of_words_takes_four_batches() -> None:
    """Hand-batched code makes three calls: embedding_bag, linear, cross_entropy."""

    def loss(embedding: Tensor, weight: Tensor, bias: Tensor, words: Tensor) -> Tensor:
        bag = F.embedding(words, embedding).mean(0)
        return F.cross_entropy(F.linear(bag, weight, bias), words[0] % CLASSES)

    sentences = [tokens(n) for n in (5, 40, 12, 7, 1)]
    parameters = [rand(6, WIDTH), rand(CLASSES, WIDTH), rand(CLASSES)]
    report = check(loss, *sentences, parameters=parameters)
    assert report.batches <= 5, report


@pytest.mark.parametrize("train", [True, False])
def test_dropout_of_any_length_is_one_batch(train: bool) -> None:
    xs = [rand(n, WIDTH).requires_grad_() for n in LENGTHS]
    with ab.batch() as scope:
        results = [F.dropout(x.tanh(), 0.5, train) for x in xs]
    torch.autograd.backward([r.sum() for r in results])
    assert scope.report().batches == 1 + train
    for x, result in zip(xs, results, strict=True):
        kept = torch.where(result == 0, 0.0, 2.0 if train else 1.0).to(x.dtype)
        torch.testing.assert_close(result, x.tanh() * kept)
        torch.testing.assert_close(x.grad, (1 - x.tanh().square()) * kept)


def test_rows_of_left_out_instances_take_no_part() -> None:
    """An instance whose loss is left out contributes nothing, even if its values are NaN."""
    for name, case in CASES.items():
        parameters = [rand(*sizes).requires_grad_() for sizes in case.parameters]
        inputs = [case.make(n) for n in (3, 2, 4)]
        if not parameters or any(isinstance(x, tuple) for x in inputs):
            continue
        if inputs[1].is_floating_point():
            inputs[1] = inputs[1] * float("nan")
        with ab.batch():
            results = [case.function(*parameters, x) for x in inputs]
        (results[0].sum() + results[2].sum()).backward()
        for parameter in parameters:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
