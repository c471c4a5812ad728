"""Attention over instances of different lengths: values, gradients, and numbers of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_attention import LENGTHS, SDPA, batches_of, check_native, heads
from helpers_rules import BOTH, DOUBLE, check, raises_as_eager, rand, rules_of
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sdpa = F.scaled_dot_product_attention

# --- the function ---


@BOTH
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("scale", [None, 0.3], ids=["default", "scaled"])
def test_any_length(dtype: torch.dtype, causal: bool, scale: float | None) -> None:
    xs = [heads(t, dtype=dtype) for t in LENGTHS]
    check_native(lambda q, k, v: sdpa(q, k, v, is_causal=causal, scale=scale), *xs)


def test_equal_lengths_run_in_one_call_and_give_the_same() -> None:
    check_native(sdpa, *[heads(7) for _ in range(6)])
    check_native(sdpa, *[heads(40, width=64) for _ in range(3)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision(dtype: torch.dtype) -> None:
    check_native(sdpa, *[heads(t, dtype=dtype) for t in LENGTHS])


def test_other_lengths_for_keys() -> None:
    xs = [
        (rand(1, 2, t, 4), rand(1, 2, s, 4), rand(1, 2, s, 4)) for t, s in [(3, 5), (1, 2), (5, 3)]
    ]
    check_native(sdpa, *xs)


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_other_ranks(rank: int) -> None:
    lead = (2, 2, 2)[: rank - 2]
    xs = [tuple(rand(*lead, t, 4) for _ in range(3)) for t in LENGTHS]
    check_native(sdpa, *xs)
    check_native(lambda q, k, v: sdpa(q, k, v, is_causal=True), *xs)


def test_other_width_of_values() -> None:
    xs = [(rand(1, 2, t, 4), rand(1, 2, t, 4), rand(1, 2, t, 6)) for t in LENGTHS]
    check_native(sdpa, *xs)


def test_views_of_one_projection() -> None:
    weight = rand(24, 8)

    def attend(w: Tensor, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, w).view(-1, 3, 2, 4).permute(1, 2, 0, 3).unsqueeze(1)
        return sdpa(q, k, v).squeeze(0).transpose(0, 1).flatten(1)

    report = check(attend, *[rand(t, 8) for t in LENGTHS], parameters=[weight])
    assert set(rules_of(report).values()) == {"native"}
    assert report.batches == 2, report


LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "contiguous": lambda t: rand(2, 3, t, 8),
    "rows": lambda t: rand(2, t, 3, 8).transpose(1, 2),
    "slices": lambda t: rand(t, 2, 3, 24).permute(1, 2, 0, 3)[..., 8:16],
    "rows first": lambda t: rand(t, 2, 3, 8).permute(1, 2, 0, 3),
    "expanded": lambda t: rand(2, 1, t, 8).expand(2, 3, t, 8),
}


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str, backend: SDPBackend) -> None:
    xs = [LAYOUTS[name](t).requires_grad_() for t in LENGTHS]
    with sdpa_kernel(backend):
        expected = [sdpa(x, x, x) for x in xs]
        with ab.batch() as scope:
            results = [sdpa(x, x, x) for x in xs]
    assert rules_of(scope.report())[SDPA] == "native"
    for x, result, other in zip(xs, results, expected, strict=True):
        torch.testing.assert_close(result, other)
        strides = [s for s, n in zip(result.stride(), result.shape, strict=True) if n > 1]
        assert strides == [s for s, n in zip(other.stride(), other.shape, strict=True) if n > 1]
        g = torch.randn_like(result)
        torch.testing.assert_close(
            torch.autograd.grad(result, x, g), torch.autograd.grad(other, x, g)
        )


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_chosen_backend(backend: SDPBackend) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v)

    check_native(attend, *[heads(t) for t in LENGTHS])


def test_the_backend_is_chosen_where_the_call_stands() -> None:
    xs = [rand(2, 3, t, 8).requires_grad_() for t in (4, 5)]

    def attend() -> list[Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            plain = [sdpa(x, x, x) for x in xs]
        return plain + [sdpa(x, x, x) for x in xs]

    with ab.batch() as scope:
        results = attend()
    assert batches_of(scope.report(), SDPA) == 2
    for result, expected in zip(results, attend(), strict=True):
        torch.testing.assert_close(result, expected)
        assert result.stride() == expected.stride()


# --- forms ---


def test_grouped_heads() -> None:
    xs = [(rand(1, 4, t, 4), rand(1, 2, t, 4), rand(1, 2, t, 4)) for t in LENGTHS]
    check(lambda q, k, v: sdpa(q, k, v, enable_gqa=True), *xs)


def test_no_rows() -> None:
    check(sdpa, *[heads(t) for t in [0, 3, 0]])


def test_calls_that_differ_stay_apart() -> None:
    others: list[dict[str, Any]] = [{"is_causal": True}, {"scale": 0.7}, {"attn_mask": rand(4, 4)}]
    for other in others:
        xs = [(*heads(4), kwargs) for kwargs in ({}, other, {}, other)]
        report = check(lambda q, k, v, kwargs: sdpa(q, k, v, **kwargs), *xs)
        assert batches_of(report, SDPA) == 2


def test_errors_are_eagers() -> None:
    q = rand(1, 2, 3, 4).requires_grad_()
    for k, v in [
        (rand(1, 2, 3, 5), rand(1, 2, 3, 4)),
        (rand(1, 2, 3, 4).float(), rand(1, 2, 3, 4)),
    ]:
        raises_as_eager(lambda k=k, v=v: sdpa(q, k, v))  # type: ignore[misc]


# --- dropout ---


def attend_to_ones(p: float, lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """With equal weights and values of one, a result is the share of kept elements."""
    values = [torch.ones(1, 2, t, 4, requires_grad=True) for t in lengths]
    with ab.batch() as scope:
        results = [
            sdpa(torch.zeros(1, 2, v.size(2), 4), torch.zeros_like(v), v, None, p) for v in values
        ]
    assert rules_of(scope.report())[SDPA] == "native"
    assert batches_of(scope.report(), SDPA) == 1
    torch.autograd.backward([r.sum() for r in results])
    return [r.detach() for r in results], [v.grad for v in values if v.grad is not None]


def test_dropout_keeps_its_share_and_scales_it() -> None:
    torch.manual_seed(1)
    p, lengths = 0.25, [64, 33, 64, 80]
    results, grads = attend_to_ones(p, lengths)
    for t, result, grad in zip(lengths, results, grads, strict=True):
        kept = result * t * (1 - p)  # number of kept keys
        torch.testing.assert_close(kept, kept.round(), atol=1e-3, rtol=0)
        assert abs(result.mean().item() - 1) < 5 * (p / (1 - p) / (2 * t * t)) ** 0.5
        # Dropped elements get no gradient, so the sums over keys and over queries are equal.
        torch.testing.assert_close(grad.sum(), result.sum())
    assert not torch.equal(results[0], results[2])  # each instance draws its own mask


def test_dropout_is_the_same_for_the_same_seed() -> None:
    def once() -> list[Tensor]:
        torch.manual_seed(3)
        return attend_to_ones(0.5, [5, 9, 5])[0]

    for first, second in zip(once(), once(), strict=True):
        assert torch.equal(first, second)


def test_dropout_of_all() -> None:
    check_native(lambda q, k, v: sdpa(q, k, v, None, 1.0), *[heads(t) for t in LENGTHS])


def test_gradient_of_dropout_is_that_of_the_numbers_drawn() -> None:
    xs = [tuple(x.requires_grad_() for x in heads(t, width=4)) for t in [3, 2, 3]]

    def total(*flat: Tensor) -> Tensor:
        torch.manual_seed(5)
        with ab.batch():
            losses = [
                sdpa(q, k, v, dropout_p=0.4).square().sum()
                for q, k, v in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
            ]
        return torch.stack(losses).sum()

    assert torch.autograd.gradcheck(total, [x for three in xs for x in three])


def test_dropout_differentiated_twice() -> None:
    q, k, v = (x.requires_grad_() for x in heads(3))
    with ab.batch():
        result = sdpa(q, k, v, None, 0.5)
    (once,) = torch.autograd.grad(result.sum(), q, retain_graph=True)
    (again,) = torch.autograd.grad(result.sum(), q, create_graph=True)
    torch.testing.assert_close(again, once)
    torch.autograd.grad(again.square().sum(), k)


# --- parts that are left out ---


def test_only_what_is_differentiated_costs_and_counts() -> None:
    for p in (0.0, 0.5):
        xs = [tuple(x.requires_grad_() for x in heads(t)) for t in (4, 4, 6)]
        xs[1][0].data.fill_(torch.nan)
        with ab.batch():
            losses = [sdpa(q, k, v, dropout_p=p).sum() for q, k, v in xs]
        torch.autograd.backward(losses[0] + losses[2])
        assert all(x.grad is not None and x.grad.isfinite().all() for x in xs[0] + xs[2])
        assert all(x.grad is None for x in xs[1])


def test_autocast() -> None:
    """In bfloat16, the error of a gradient is not larger than eager's error."""
    given, xs = rand(8, 8, dtype=torch.float32), [rand(t, 8, dtype=torch.float32) for t in (3, 5)]

    def gradient(dtype: torch.dtype, enabled: bool, cast: bool) -> tuple[list[Tensor], Tensor]:
        w, results = given.detach().to(dtype).requires_grad_(), []
        with ab.batch(enabled=enabled), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            for x in xs:
                y = F.linear(x.to(dtype), w).view(len(x), 2, -1).transpose(0, 1).unsqueeze(0)
                results.append(sdpa(y, y, y))
        torch.stack([(r.to(dtype) ** 2).sum() for r in results]).sum().backward()
        assert w.grad is not None
        return results, w.grad

    results, ours = gradient(torch.float32, True, True)
    expected, eager = gradient(torch.float32, False, True)
    _, exact = gradient(DOUBLE, False, False)
    torch.testing.assert_close(results, expected)
    error, eagers = (ours - exact).abs().max(), (eager - exact).abs().max()
    assert 0 < error <= 1.5 * eagers


# --- copies into row-major order ---


def test_row_major_copies_of_any_length() -> None:
    def copies(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.tanh()
        return y.t().contiguous(), y.view(-1, 2, 3).transpose(0, 1).reshape(2, -1), y.t().flatten()

    for lengths in (LENGTHS, [4, 4, 4], [0, 3, 1]):
        report = check(copies, *[rand(t, 6) for t in lengths])
        assert batches_of(report, "aten::clone") <= 4, report


# --- modules ---


def module_step(
    module: nn.Module, call: Callable[..., Any], lengths: list[int], enabled: bool
) -> tuple[list[Tensor], list[Tensor | None], ab.Report]:
    torch.manual_seed(0)
    module.zero_grad()
    inputs = [torch.randn(t, 8, dtype=DOUBLE, requires_grad=True) for t in lengths]
    with ab.batch(enabled=enabled) as scope:
        results = [call(module, x) for x in inputs]
    flat = [t for r in results for t in (r if isinstance(r, tuple) else (r,)) if t is not None]
    if torch.is_grad_enabled():
        torch.autograd.backward([(t * t.detach().cos()).sum() for t in flat])
    grads = [p.grad for p in module.parameters()] + [x.grad for x in inputs]
    return [t.detach() for t in flat], grads, scope.report()


def check_module(
    module: nn.Module, call: Callable[..., Any], lengths: list[int] = LENGTHS
) -> ab.Report:
    results, grads, report = module_step(module, call, lengths, True)
    expected, expected_grads, _ = module_step(module, call, lengths, False)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other)
        assert result.stride() == other.stride()
    for grad, other_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, other_grad)
    return report


def causal(t: int) -> Tensor:
    return nn.Transformer.generate_square_subsequent_mask(t, dtype=DOUBLE)


def padding(t: int) -> Tensor:
    return torch.arange(t).ge(max(1, t - 1))


CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "batched": lambda m, x: m(x[None])[0],
    "unbatched": lambda m, x: m(x),
    "causal": lambda m, x: m(x[None], causal(len(x)), is_causal=True),
    "mask": lambda m, x: m(x[None], causal(len(x))),
    "padding": lambda m, x: m(x[None], src_key_padding_mask=padding(len(x))[None]),
    "both": lambda m, x: m(
        x[None], causal(len(x)).ne(0), src_key_padding_mask=padding(len(x))[None]
    ),
}


def encoder(kind: str, **options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dtype=DOUBLE, **options)
    return layer if kind == "layer" else nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["layer", "encoder"])
@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:Converting mask")
def test_encoders(kind: str, name: str, mode: str) -> None:
    module = encoder(kind, dropout=0.0).train(mode == "train")
    with torch.set_grad_enabled(mode != "no_grad"):
        check_module(module, CALLS[name])


@pytest.mark.parametrize("options", [{"norm_first": True}, {"activation": "gelu"}, {"bias": False}])
@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_encoder_options(options: dict[str, Any], mode: str) -> None:
    module = encoder("encoder", dropout=0.0, **options).train(mode == "train")
    with torch.set_grad_enabled(mode != "no_grad"):
        check_module(module, CALLS["batched"])
        check_module(module, CALLS["unbatched"])


MULTIHEAD: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "self": lambda m, x: (lambda y: m(y, y, y, need_weights=False))(x[None]),
    "unbatched": lambda m, x: m(x, x, x, need_weights=False),
    "weights": lambda m, x: (lambda y: m(y, y, y))(x[None]),
    "weights of each head": lambda m, x: m(x, x, x, average_attn_weights=False),
    "other keys": lambda m, x: m(x[:2], x, x.flip(0), need_weights=False),
    "mask": lambda m, x: m(x, x, x, attn_mask=causal(len(x)), need_weights=False),
    "padding": lambda m, x: m(x, x, x, key_padding_mask=padding(len(x)), need_weights=False),
}


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("name", MULTIHEAD)
@pytest.mark.parametrize(
    "options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"bias": False}]
)
@pytest.mark.filterwarnings("ignore:Converting mask")
def test_multihead(name: str, mode: str, options: dict[str, Any]) -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=DOUBLE, **options)
    module.train(mode == "train")
    with torch.set_grad_enabled(mode != "no_grad"):
        check_module(module, MULTIHEAD[name])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_batches_do_not_grow_with_the_number_of_lengths(dropout: float) -> None:
    module = encoder("encoder", dropout=dropout)
    counts = []
    for lengths in ([6, 6, 6, 6, 6, 6], [2, 9, 4, 7, 3, 5]):
        _, _, report = module_step(module, CALLS["batched"], lengths, True)
        ours = [s for s in report.signatures if s.op != "aten::layer_norm"]
        counts.append(sum(s.batches for s in ours))
    assert counts[0] == counts[1], counts


def test_a_one_token_sentence_is_in_the_same_batches() -> None:
    module = encoder("layer", dropout=0.1)
    _, _, report = module_step(module, CALLS["batched"], [5, 1, 9, 4], True)
    assert batches_of(report, SDPA) == 1, report


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_one_query_over_any_number_of_keys(dtype, key_heads, transposed):
    """Tests a step of generation, in which keys and values are read in place."""

    def heads(n, number, length):
        if transposed:
            return torch.randn(n, length, number, 8, dtype=dtype).transpose(1, 2).requires_grad_()
        return torch.randn(n, number, length, 8, dtype=dtype, requires_grad=True)

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q * 1, k, v, enable_gqa=key_heads != 4, scale=0.7)

    sizes = [(1, 1, 5), (1, 1, 9), (2, 1, 3), (1, 1, 1), (1, 1, 9), (1, 7, 7), (1, 2, 4)]
    data = [(heads(n, 4, q), heads(n, key_heads, k), heads(n, key_heads, k)) for n, q, k in sizes]
    with ab.batch(adaptive=False) as scope:
        ours = [attend(*qkv) for qkv in data]
    theirs = [attend(*qkv) for qkv in data]
    torch.testing.assert_close(ours, theirs)
    found = [s for s in scope.report().signatures if "attention" in s.op]
    assert [s.batches for s in found] == [1]
    inputs = [t for qkv in data for t in qkv]
    gradients = [
        torch.autograd.grad(sum(y.square().sum() for y in ys), inputs) for ys in (ours, theirs)
    ]
    for found, expected in zip(*gradients, strict=True):
        # Some elements are near zero as differences of much larger terms, so errors are relative to
        # the largest element.
        rtol, atol = (1.3e-6, 1e-5) if dtype is torch.float32 else (1e-7, 1e-7)
        atol *= max(1.0, expected.abs().max().item())
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
