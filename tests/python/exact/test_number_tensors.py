"""Tensors that a program makes from Python numbers while a block is open."""

import math
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch.distributions import Normal

NUMBERS = [
    0,
    1,
    -7,
    2**40,
    2**60 + 2**36 + 1,
    -(2**63),
    True,
    False,
    0.0,
    -0.0,
    1.5,
    1e30,
    math.inf,
    -math.inf,
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": None},
    {"dtype": torch.float32},
    {"dtype": torch.float64},
    {"dtype": torch.int64},
    {"dtype": torch.bool},
    {"dtype": torch.float16},
    {"dtype": torch.complex64},
    {"device": "cpu"},
    {"device": torch.device("cpu")},
    {"device": None, "dtype": torch.float64},
    {"requires_grad": True},
]


def made(maker: Any, number: Any, options: dict[str, Any]) -> torch.Tensor | str:
    try:
        return maker(number, **options)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("maker", [torch.tensor, torch.as_tensor])
def test_they_are_what_eager_makes(maker: Any) -> None:
    for options in OPTIONS:
        for number in NUMBERS:
            expected = made(maker, number, options)
            with ab.batch():
                got = made(maker, number, options)
            if isinstance(expected, str):
                assert got == expected
                continue
            assert isinstance(got, torch.Tensor)
            assert (got.dtype, got.shape, got.device) == (
                expected.dtype,
                expected.shape,
                expected.device,
            )
            assert got.requires_grad == expected.requires_grad
            assert got.is_leaf
            assert torch.equal(got.detach(), expected.detach()), (number, options)


def test_nan_and_numbers_that_float32_can_not_hold() -> None:
    with ab.batch():
        nan, large = torch.tensor(math.nan), torch.tensor(1e300)
    assert nan.isnan()
    assert large == math.inf
    with ab.batch(), pytest.raises((RuntimeError, ValueError), match="Overflow"):
        torch.tensor(2**64)


def test_the_default_dtype_counts() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with ab.batch():
            number = torch.tensor(0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert number.dtype == torch.float64
    assert number.item() == 0.1


@pytest.mark.needs("number_tensors")
def test_different_numbers_are_one_batch() -> None:
    x = torch.randn(8, 3)
    with ab.batch(adaptive=False) as scope:
        scales = [torch.tensor(float(i)) for i in range(8)]
        assert all(ab.is_pending(scale) for scale in scales)
        results = [x[i] * scales[i].exp() for i in range(8)]
    for i in range(8):
        torch.testing.assert_close(results[i], x[i] * torch.tensor(float(i)).exp())
    report = scope.report()
    assert len(report.flushes) == 1
    assert report.launches == 3


def test_a_read_flushes_nothing() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    with ab.batch(adaptive=False) as scope:
        pending = torch.randn(2, 3) @ weight
        number = torch.tensor(3)
        assert number.item() == 3
        assert int(number) == 3
        assert number > 2
        assert bool(number)
        assert [*range(number)] == [0, 1, 2]
        assert f"{number + 1}" == "4"
        assert torch.tensor(2).tolist() == 2
        assert torch.tensor(2.5).numpy() == 2.5
        assert len(scope.report().flushes) == 0
        assert ab.is_pending(pending)


def test_each_is_written_to_alone() -> None:
    with ab.batch():
        one, other = torch.tensor(1.0), torch.tensor(1.0)
        alias = one.view(1)
        one += 2
        alias.mul_(2)
    assert (one.item(), alias.item(), other.item()) == (6, 6, 1)


def test_sums_start_from_a_number() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(5, 3)

    def losses() -> list[torch.Tensor]:
        found = []
        for i in range(5):
            loss = torch.tensor(0.0)
            for _ in range(i + 1):
                loss += (x[i] @ weight).sum()
            found.append(loss)
        return found

    expected = torch.stack(losses())
    (expected_grad,) = torch.autograd.grad(expected.sum(), weight)
    with ab.batch(adaptive=False) as scope:
        got = torch.stack(losses())
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), weight)[0], expected_grad)
    assert len(scope.report().flushes) == 1


def test_it_may_be_given_a_gradient() -> None:
    x = torch.randn(3)
    with ab.batch():
        number = torch.tensor(2.0).requires_grad_()
        loss = (x * number).sum()
    loss.backward()
    torch.testing.assert_close(number.grad, x.sum())


@pytest.mark.parametrize("train", [False, True])
def test_distributions_of_numbers_run_batched(train: bool) -> None:
    weight = torch.randn(3, 3, requires_grad=train)
    x = [torch.randn(3) for _ in range(6)]

    def one(v: torch.Tensor) -> torch.Tensor:
        return Normal(v @ weight, 2.0).log_prob(v).sum()

    expected = [one(v) for v in x]
    with ab.batch(adaptive=False) as scope:
        got = [one(v) for v in x]
    torch.testing.assert_close(got, expected)
    assert len(scope.report().flushes) == 1
    assert scope.report().launches < 20


def test_lists_and_arrays_are_data() -> None:
    with ab.batch():
        assert not ab.is_pending(torch.tensor([1.0, 2.0]))
        assert not ab.is_pending(torch.as_tensor(torch.ones(2).numpy()))
    assert not ab.is_pending(torch.tensor(1.0))


def test_where_ops_run_at_once_numbers_do_too() -> None:
    with ab.batch(), ab.eager():
        assert not ab.is_pending(torch.tensor(1.0))
    with ab.batch(), torch.device("cpu"):  # a mode of torch functions
        assert torch.tensor(1.0).item() == 1


def test_in_inference_mode_they_are_inference_tensors() -> None:
    weight = torch.randn(3, requires_grad=True)
    with ab.batch():
        with torch.inference_mode():
            number = torch.tensor(2.0)
        assert number.is_inference()
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            number.add_(1)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            number * weight
    assert number.is_inference()


def test_a_shared_tensor_is_filled_with_each_instance_s_number() -> None:
    weight = torch.randn(4, requires_grad=True)
    with ab.batch(adaptive=False):
        filled = [weight.index_fill(0, torch.tensor([1]), torch.tensor(float(k))) for k in range(3)]
    assert [one[1].item() for one in filled] == [0, 1, 2]
    (gradient,) = torch.autograd.grad(sum(one.sum() for one in filled), weight)
    assert gradient.tolist() == [3, 0, 3, 3]


def test_in_transforms_and_cells_they_are_constants() -> None:
    def shifted(v: torch.Tensor) -> torch.Tensor:
        return v * torch.tensor(3.0) + torch.tensor(1)

    x = torch.randn(4, 3)
    for function in (shifted, ab.cell(shifted), ab.cell(shifted, dynamic=True)):
        with ab.batch():
            got = [function(v) for v in x]
        torch.testing.assert_close(torch.stack(got), x * 3 + 1)
    with ab.batch():
        got_by_vmap = torch.vmap(shifted)(x)
    torch.testing.assert_close(got_by_vmap, x * 3 + 1)
