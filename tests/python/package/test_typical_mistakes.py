"""Typical mistakes of new users give the right result, or an error or a report that says what to
do. Other files test mistakes with decorators and inner blocks (test_blocks_inside.py), with
coroutines and generators (test_suspension.py), and with arguments of `map` (map/test_arguments.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(4, 3)


@pytest.fixture
def embedding() -> nn.Embedding:
    return nn.Embedding(10, 4)


def line_of(function: Callable[..., object], code: str) -> str:
    """Returns the first line of the function that contains this code, with the file's name."""
    lines, first = inspect.getsourcelines(function)
    number = next(i for i, line in enumerate(lines, first) if code in line)
    return f"test_typical_mistakes.py:{number}"


# --- errors at the user's line ---


def test_a_wrong_shape(linear: nn.Linear) -> None:
    with ab.batch():
        with pytest.raises(RuntimeError, match=r"\(1x5 and 4x3\)") as error:
            linear(torch.randn(5).tanh())
        assert "aten::linear(Float[5], Float[3, 4], Float[3])" in str(error.value)
        x = torch.randn(5, requires_grad=True).tanh()
        with pytest.raises(RuntimeError, match=r"size of tensor a \(5\) must match") as error:
            x + torch.randn(4)
        assert "aten::add.Tensor(Float[5], Float[4])" in str(error.value)


def test_a_wrong_dtype_or_device(linear: nn.Linear) -> None:
    with ab.batch():
        with pytest.raises(RuntimeError, match="same dtype, but got Double and Float"):
            linear(torch.randn(4, dtype=torch.float64).tanh())
        with pytest.raises(RuntimeError, match="device"):
            linear(torch.randn(4, device="meta").tanh())


def test_options_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"'agend'.*one of 'auto', 'agenda', 'depth', 'frontier'"):
        ab.batch("agend")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"max_pending=0\): expected at least 1, or None"):
        ab.batch(max_pending=0)
    with pytest.raises(TypeError, match="max_pendings"):
        ab.batch(max_pendings=1)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": ["depth"]}, r"batch\(policy=\['depth'\]\): expected one of 'auto', 'agenda'"),
        ({"granularity": 1}, r"batch\(granularity=1\): expected one of 'auto', 'cell', 'op'"),
        ({"max_pending": 2.5}, r"batch\(max_pending=2.5\): expected a whole number of at least 1"),
        ({"enabled": "no"}, r"batch\(enabled='no'\): expected True or False$"),
        ({"verify": 2}, r"batch\(verify=2\): expected True or False$"),
        ({"adaptive": "yes"}, r"batch\(adaptive='yes'\): expected True, False or None"),
    ],
)
def test_options_of_another_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ab.batch(**options)


def test_options_that_equal_right_ones() -> None:
    with ab.batch(enabled=np.True_, verify=0, max_pending=np.int64(3)):  # type: ignore[call-overload]
        pass


def test_what_is_no_function_is_not_decorated(linear: nn.Linear) -> None:
    with pytest.raises(TypeError, match=r"got a Linear: call the module inside `with batch\(\):`"):
        ab.batch(linear)
    with pytest.raises(TypeError, match=r"got the class .*Model'"):

        @ab.batch
        class Model: ...

    with pytest.raises(TypeError, match=r"got the class"):

        @ab.batch("depth")
        class Other: ...


async def awaits() -> None: ...


@functools.wraps(awaits)
def coroutine_of() -> Any:
    return awaits()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (functools.partial(awaits), "can't decorate the async function 'awaits'"),
        (classmethod(lambda cls: 1), "got a classmethod: write @batch below @classmethod"),
        (staticmethod(lambda: 1), "got a staticmethod: write @batch below @staticmethod"),
        (property(lambda self: 1), "got a property: write @batch below @property"),
    ],
)
@pytest.mark.parametrize("decorate", [ab.batch, ab.batch()])
def test_what_can_not_be_decorated(
    function: Any, message: str, decorate: Callable[[Any], Any]
) -> None:
    with pytest.raises(TypeError, match=message):
        decorate(function)


def test_a_function_that_returns_a_coroutine_is_not_left_unawaited() -> None:
    decorated = ab.batch(coroutine_of)
    with pytest.raises(TypeError, match=r"can't run 'awaits': the function returned a coroutine"):
        decorated()


def test_eager_on_an_async_function_has_its_own_advice() -> None:
    with pytest.raises(TypeError, match=r"eager\(\) can't .* Put `with eager\(\):` around"):
        ab.eager(awaits)


# --- errors that come late ---


def test_an_index_out_of_range(embedding: nn.Embedding) -> None:
    kept: list[Tensor] = []
    with pytest.raises(IndexError, match="index out of range") as error, ab.batch():
        kept += [embedding(torch.tensor(i)).tanh() for i in (1, 2, 30)]
    assert "aten::embedding(Float[10, 4], Long[])" in str(error.value)
    assert line_of(test_an_index_out_of_range, "kept +=") in str(error.value)
    torch.testing.assert_close(kept[0], embedding.weight[1].tanh())
    with pytest.raises(RuntimeError, match=r"never computed: .* Run the block again, or outside"):
        print(kept[2])


def test_an_error_of_the_users_own(linear: nn.Linear) -> None:
    x, kept = torch.ones(4), []

    def run() -> None:
        with ab.batch():
            for i in range(4):
                kept.append(linear(x).tanh())
                if i == 2:
                    raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run()
    torch.testing.assert_close(kept, [linear(x).tanh()] * 3)
    kept[0].sum().backward()
    assert linear.weight.grad is not None


def test_an_error_in_a_map(linear: nn.Linear) -> None:
    def run(i: int) -> Tensor:
        h = linear(torch.ones(4))
        if h.sum() > -1e9 and i == 3:
            raise ValueError("bad example")
        return h

    with pytest.raises(ValueError, match="bad example") as error:
        ab.map(run, range(5))
    assert error.value.__notes__ == ["in instance 3 of ab.map"]


# --- blocks ---


def test_a_block_in_a_block(linear: nn.Linear) -> None:
    x = torch.ones(4)
    with ab.batch() as outer:
        first = linear(x)
        with (
            pytest.warns(RuntimeWarning, match="Pass these options to the outer block"),
            ab.batch("depth") as inner,
        ):
            second = linear(x)
        assert str(inner.report()).startswith("No op has run yet: 2 ops captured.")
        assert ab.is_pending(second)
    torch.testing.assert_close(first, second)
    assert (outer.report().nodes, outer.report().launches) == (2, 1)


def test_one_block_object_twice(linear: nn.Linear) -> None:
    block, x = ab.batch(), torch.ones(4)
    with block:
        first = linear(x)
    with block:
        second = linear(x)
    torch.testing.assert_close(first, second)
    assert block.report().ops == 1  # report of the second block


def test_verify(linear: nn.Linear) -> None:
    x = torch.ones(4)
    with ab.batch(verify=True) as scope:
        kept = [linear(x).sum() for _ in range(3)]
    torch.testing.assert_close(kept, [linear(x).sum()] * 3)
    assert scope.report().launches == 2


# --- cells ---


def test_a_cell_that_reads_a_value(linear: nn.Linear) -> None:
    @ab.cell
    def score(x: Tensor) -> Tensor:
        y = linear(x)
        return y if y.sum() > 0 else -y

    with (
        pytest.raises(RuntimeError, match="Return the tensor and read its value outside the cell"),
        ab.batch(),
    ):
        score(torch.ones(4))


@pytest.mark.parametrize("argument", [{1, 2}, np.arange(3)], ids=["set", "ndarray"])
def test_a_cell_with_an_argument_that_it_can_not_compare(
    linear: nn.Linear, argument: object
) -> None:
    @ab.cell
    def score(x: Tensor, options: object) -> Tensor:
        return linear(x)

    with (
        pytest.raises(
            TypeError,
            match=r"not hashable\. Arguments must be hashable objects, tensors, or tuples",
        ),
        ab.batch(),
    ):
        score(torch.ones(4), argument)


# --- reports ---


def test_a_read_in_the_loop(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        for _ in range(3):
            h = linear(torch.ones(4)).sum()
            if h.item() > 0:
                h = h * 2
    [worst] = scope.report().findings
    assert worst.what.startswith(".item(): 3 early flushes")
    assert "ab.map" in worst.remedy
    assert worst.site.endswith(line_of(test_a_read_in_the_loop, "h.item()"))


def test_a_backward_in_the_loop(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        for _ in range(3):
            linear(torch.ones(4)).sum().backward()
    [worst] = scope.report().findings
    assert worst.what.startswith("backward(): 3 early flushes")
    assert "scope.backward(loss)" in worst.remedy
    torch.testing.assert_close(linear.bias.grad, 3 * torch.ones(3))


def test_a_step_of_the_optimizer_in_the_loop() -> None:
    def train(enabled: bool) -> tuple[Tensor, ab.Report]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with ab.batch(enabled=enabled) as scope:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(4)).square().sum().backward()
                optimizer.step()
        return model.weight.detach(), scope.report()

    ours, report = train(True)
    torch.testing.assert_close(ours, train(False)[0])
    assert report.findings[0].what.startswith("backward(): 3 early flushes")
