"""Convolutions and pooling: values, gradients, strides, and numbers of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import BOTH, DOUBLE, check, raises_as_eager, rand, rules_of
from torch import Tensor, nn

LENGTHS = [7, 9, 7, 5, 12, 7]


def check_native(
    function: Callable[..., Any], instances: list[Any], parameters: list[Tensor], batches: int = 1
) -> None:
    report = check(function, *instances, parameters=parameters)
    convolutions = [s for s in report.signatures if "conv" in s.op]
    assert convolutions
    assert {s.rule for s in convolutions} == {"native"}, report
    assert sum(s.batches for s in convolutions) == batches, report


def calls_of(op: str, function: Callable[[], list[Tensor]]) -> int:
    """Returns how often a flush calls the op."""
    with ab.batch(adaptive=False) as scope:
        kept = function()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            scope.flush()
    assert kept
    return sum(event.name == op for event in profile.events())


# --- images of one size ---

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": 2},
    "padding": {"padding": 1},
    "all": {"stride": 2, "padding": 2, "dilation": 2},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
}
FUNCTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@pytest.mark.parametrize("lead", [(), (1,), (2,)], ids=["C", "1C", "2C"])
@pytest.mark.parametrize("dims", FUNCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_one_size(name: str, dims: int, lead: tuple[int, ...]) -> None:
    xs = [rand(*lead, 3, *(8, 7, 6)[:dims]) for _ in range(4)]
    weight, bias = rand(4, 3, *[3] * dims), rand(4)
    options = OPTIONS[name]
    check_native(lambda w, b, x: FUNCTIONS[dims](x, w, b, **options), xs, [weight, bias])
    check_native(lambda w, x: FUNCTIONS[dims](x.sin(), w, **options), xs, [weight])


@BOTH
def test_groups(dtype: torch.dtype) -> None:
    xs = [rand(4, 6, 5, dtype=dtype) for _ in range(3)]
    weight = rand(8, 2, 3, 3, dtype=dtype)
    check_native(lambda w, x: F.conv2d(x, w, groups=2), xs, [weight])


@pytest.mark.parametrize("lead", [(), (1,), (2,)], ids=["C", "1C", "2C"])
@pytest.mark.parametrize("dims", TRANSPOSED)
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"dilation": 2, "groups": 2}]
)
def test_transposed(options: dict[str, Any], dims: int, lead: tuple[int, ...]) -> None:
    xs = [rand(*lead, 4, *(5, 4, 3)[:dims]) for _ in range(3)]
    weight, bias = rand(4, 2, *[3] * dims), rand(2 * options.get("groups", 1))
    check_native(lambda w, b, x: TRANSPOSED[dims](x, w, b, **options), xs, [weight, bias])


@pytest.mark.parametrize("lead", [(), (1,), (2,)], ids=["C", "1C", "2C"])
@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d"])
@pytest.mark.parametrize("groups", [1, 2])
def test_weights_of_each_instance(name: str, lead: tuple[int, ...], groups: int) -> None:
    """The weight is computed from the instance. Instances of one size run as one call."""
    convolution, dims = getattr(F, name), 1 if name.endswith("1d") else 2
    instances = [
        (rand(*lead, 4, *(n, 6)[:dims]), rand(4, 4 // groups, *[3] * dims), rand(4))
        for n in (7, 7, 5, 7)
    ]

    def own(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return convolution(x, w.sin(), b.sin() if groups == 1 else None, groups=groups, padding=1)

    check_native(own, instances, [])


def test_one_computed_bias() -> None:
    instances = [(rand(4, 7), rand(4)) for _ in range(3)]
    check_native(lambda w, x, b: F.conv1d(x, w, b.sin()), instances, [rand(4, 4, 3)])


def test_a_batch_and_a_single_image_are_apart() -> None:
    xs = [rand(3, 6, 6), rand(1, 3, 6, 6), rand(3, 6, 6)]
    check_native(F.conv2d, [(x, rand(2, 3, 3, 3)) for x in xs], [], batches=3)  # weights differ
    check_native(lambda w, x: F.conv2d(x, w), xs, [rand(2, 3, 3, 3)], batches=2)


def test_images_of_several_sizes_are_one_batch() -> None:
    xs = [rand(3, h, w) for h, w in [(6, 6), (4, 8), (6, 6), (3, 3)]]
    check_native(lambda w, x: F.conv2d(x, w, padding=1), xs, [rand(2, 3, 3, 3)])


def test_channels_last_is_as_eager() -> None:
    xs = [rand(1, 4, 6, 6).to(memory_format=torch.channels_last) for _ in range(2)]
    report = check(lambda w, x: F.conv2d(x, w), *xs, parameters=[rand(2, 4, 3, 3)])
    assert report.batches == 1


def test_errors_are_eagers() -> None:
    w = rand(4, 3, 3, 3).requires_grad_()
    for x in [rand(2, 5, 5), rand(3, 2, 5), rand(3, 5, 5).float(), rand(3, 5)]:
        raises_as_eager(lambda x=x: F.conv2d(x, w))  # type: ignore[misc]
    raises_as_eager(lambda: F.conv2d(rand(3, 5, 5), w, padding=-1))
    raises_as_eager(lambda: F.conv2d(rand(3, 5, 5), w, groups=2))
    raises_as_eager(lambda: F.conv2d(rand(3, 5, 5), w, stride=2, padding="same"))


def test_no_images() -> None:
    check(
        lambda w, x: F.conv2d(x, w),
        rand(0, 3, 5, 5),
        rand(2, 3, 5, 5),
        parameters=[rand(2, 3, 3, 3)],
    )


def test_only_what_is_differentiated_counts() -> None:
    w = rand(2, 3, 3).requires_grad_()
    xs = [rand(3, t).requires_grad_() for t in (5, 7, 5)]
    xs[1].data.fill_(torch.nan)
    with ab.batch():
        losses = [F.conv1d(x, w).sum() for x in xs]
    torch.autograd.backward(losses[0] + losses[2])
    assert w.grad is not None
    assert w.grad.isfinite().all()
    assert xs[1].grad is None
    expected = torch.autograd.grad(sum(F.conv1d(x, w).sum() for x in xs[::2]), w)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(w.grad, expected)


# --- sequences of different lengths ---


@pytest.mark.parametrize("lead", [(), (1,), (2,)], ids=["C", "1C", "2C"])
@pytest.mark.parametrize("name", OPTIONS)
@BOTH
def test_lengths(name: str, lead: tuple[int, ...], dtype: torch.dtype) -> None:
    xs = [rand(*lead, 3, t, dtype=dtype) for t in LENGTHS]
    weight, bias = rand(4, 3, 3, dtype=dtype), rand(4, dtype=dtype)
    options = OPTIONS[name]
    check_native(lambda w, b, x: F.conv1d(x, w, b, **options), xs, [weight, bias])
    check_native(lambda w, x: F.conv1d(x.sin(), w, **options), xs, [weight])


@pytest.mark.parametrize("lead", [(), (1,), (2,)], ids=["C", "1C", "2C"])
@pytest.mark.parametrize("axis", ["height", "width"])
@pytest.mark.parametrize("name", OPTIONS)
def test_images_that_differ_in_one_size_are_one_call(
    name: str, axis: str, lead: tuple[int, ...]
) -> None:
    xs = [rand(*lead, 3, *((t, 8) if axis == "height" else (8, t))) for t in LENGTHS]
    weight, bias = rand(4, 3, 3, 3), rand(4)
    options = OPTIONS[name]

    def convolve(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        return F.conv2d(x, w, b, **options)

    check_native(convolve, xs, [weight, bias])
    check_native(lambda w, x: F.conv2d(x.sin(), w, **options), xs, [weight])
    parameters = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    assert calls_of("aten::convolution", lambda: [convolve(*parameters, x) for x in xs]) == 1


def test_other_dimensions_of_images() -> None:
    options = {"stride": (2, 1, 3), "padding": (0, 2, 1), "dilation": (1, 2, 1)}
    for axis in range(3):
        sizes = [[8, 8, 8] for _ in LENGTHS]
        for size, t in zip(sizes, LENGTHS, strict=True):
            size[axis] = t
        xs = [rand(2, *size) for size in sizes]
        check_native(lambda w, x: F.conv3d(x, w, **options), xs, [rand(3, 2, 2, 3, 2)])  # type: ignore[arg-type]


def test_kernels_over_whole_words() -> None:
    """The convolutions of Kim (2014, arXiv:1408.5882), as they are usually written."""
    xs = [rand(t, 5) for t in LENGTHS]

    def pooled(*arguments: Tensor) -> Tensor:
        *weights, x = arguments
        maps = [F.conv2d(x[None, None], w).squeeze(3).relu() for w in weights]
        return torch.cat([F.max_pool1d(m, m.size(2)).squeeze(2) for m in maps], 1)

    check_native(pooled, xs, [rand(4, 1, k, 5) for k in (2, 3, 4)], batches=3)


def test_lengths_transposed() -> None:
    xs = [rand(3, t) for t in LENGTHS]
    check_native(lambda w, x: F.conv_transpose1d(x, w, stride=2), xs, [rand(3, 2, 3)])


def test_words_as_rows() -> None:
    def convolve(w: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        words = x.tanh()
        return F.conv1d(words.t(), w, b), F.conv1d(words.t()[None], w, b, padding=1).relu()

    xs = [rand(t, 3) for t in LENGTHS]
    check_native(convolve, xs, [rand(4, 3, 3), rand(4)], batches=2)


def test_one_word() -> None:
    xs = [rand(3, t) for t in (1, 4, 1, 2)]
    check_native(lambda w, x: F.conv1d(x, w, padding=1), xs, [rand(4, 3, 3)])
    check_native(lambda w, x: F.conv1d(x, w), xs, [rand(4, 3, 1)])


# --- pooling ---

POOLS: dict[str, Callable[[Tensor], Any]] = {
    "max": lambda x: F.max_pool1d(x, 2),
    "max_all": lambda x: F.max_pool1d(x, 3, 2, 1, 2, ceil_mode=True),
    "avg": lambda x: F.avg_pool1d(x, 3, 2, 1),
    "adaptive_max": lambda x: F.adaptive_max_pool1d(x, 2),
    "adaptive_avg": lambda x: F.adaptive_avg_pool1d(x, 2),
    "max2d": lambda x: F.max_pool2d(x, 2, padding=1),
    "avg2d": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "adaptive_max2d": lambda x: F.adaptive_max_pool2d(x, 2),
    "adaptive_avg2d": lambda x: F.adaptive_avg_pool2d(x, 1),
    "max3d": lambda x: F.max_pool3d(x, 2),
    "avg3d": lambda x: F.avg_pool3d(x, 2),
}


@pytest.mark.parametrize("lead", [(), (1,), (2,)], ids=["C", "1C", "2C"])
@pytest.mark.parametrize("name", POOLS)
def test_pools_of_one_size(name: str, lead: tuple[int, ...]) -> None:
    dims = int(name[-2]) if name.endswith("d") else 1
    xs = [rand(*lead, 3, *(8, 7, 6)[:dims]) for _ in range(4)]
    report = check(POOLS[name], *xs)
    assert report.batches == 1, report
    check(lambda x: POOLS[name](x.sin()), *xs)


@pytest.mark.parametrize("lead", [(), (1,)], ids=["C", "1C"])
@pytest.mark.parametrize("name", [n for n in POOLS if not n.endswith("d")])
def test_pools_of_any_length(name: str, lead: tuple[int, ...]) -> None:
    report = check(POOLS[name], *[rand(*lead, 3, t) for t in LENGTHS])
    assert set(rules_of(report).values()) == {"native"}, report
    assert report.batches == 1, report


# --- models ---


def test_text_classifier() -> None:
    torch.manual_seed(0)
    words = nn.Embedding(20, 6, dtype=DOUBLE)
    filters = nn.ModuleList([nn.Conv1d(6, 4, k, padding=1, dtype=DOUBLE) for k in (2, 3)])
    out = nn.Linear(8, 3, dtype=DOUBLE)
    parameters = [*words.parameters(), *filters.parameters(), *out.parameters()]

    def loss(sentence: Tensor) -> Tensor:
        x = words(sentence).t()[None]
        found = [F.adaptive_max_pool1d(F.relu(f(x)), 1)[0, :, 0] for f in filters]
        return F.cross_entropy(out(torch.cat(found)), sentence[0] % 3)

    sentences = [torch.randint(20, (t,)) for t in [4, 9, 3, 4, 12]]
    expected = torch.stack([loss(s) for s in sentences])
    expected_grads = torch.autograd.grad(expected.sum(), parameters)
    with ab.batch() as scope:
        losses = [loss(s) for s in sentences]
    torch.testing.assert_close(torch.stack(losses), expected)
    for grad, other in zip(
        torch.autograd.grad(torch.stack(losses).sum(), parameters), expected_grads, strict=True
    ):
        torch.testing.assert_close(grad, other)
    with ab.batch() as one:
        _held = loss(sentences[0])
    assert scope.report().batches == one.report().batches, scope.report()


def test_images() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 8, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(0), nn.Linear(8, 3),
    ).double()  # fmt: skip
    xs = [rand(1, 10, 10) for _ in range(5)]
    report = check(lambda x: model(x).square().sum(), *xs)
    assert report.batches <= 11, report


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("column", [0, 6])
@pytest.mark.parametrize("stride", [1, 2])
def test_infinity_stays_in_its_window(value: float, column: int, stride: int) -> None:
    """The windows across two examples have gradients of zero, and zero times infinity is NaN."""
    xs = [rand(3, t) for t in LENGTHS]
    xs[0][0, column] = value
    weight = rand(4, 3, 2).requires_grad_()
    gradients = []
    for enabled in (True, False):
        with ab.batch(enabled=enabled, adaptive=False):
            loss = torch.stack([F.conv1d(x, weight, stride=stride).sum() for x in xs]).sum()
        gradients.append(torch.autograd.grad(loss, weight)[0])
    torch.testing.assert_close(*gradients, equal_nan=True)


def test_lower_precision_is_not_joined() -> None:
    xs = [rand(3, t, dtype=torch.bfloat16) for t in LENGTHS]
    xs[1].fill_(torch.nan)
    weight = rand(8, 3, 2, dtype=torch.bfloat16).requires_grad_()
    with ab.batch(adaptive=False):
        found = [F.conv1d(x, weight, dilation=2) for x in xs]
    assert all(y.isfinite().all() == (i != 1) for i, y in enumerate(found))
