"""Errors in a block, the state after them, and early flushes."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_capture import (
    is_pending,
    line,
    rand,
    works,
)
from torch import Tensor, nn

# --- errors, and what is left after them ---


def test_ops_that_touch_no_parameter_run_at_once() -> None:
    with ab.batch() as scope:
        x = torch.arange(3.0) * 2
        assert not is_pending(x)
        assert x.sum().item() == 6
    assert (scope.report().ops, scope.report().flushes) == (0, [])


def test_a_shape_error_names_the_op_and_both_shapes_at_the_users_line(linear: nn.Linear) -> None:
    with pytest.raises(RuntimeError) as raised, ab.batch():  # noqa: PT012
        h = linear(rand(2, 3)).tanh()
        where = line() + 1
        h @ rand(7, 5)
    with pytest.raises(RuntimeError) as in_eager:
        rand(2, 4) @ rand(7, 5)
    message = str(raised.value)
    assert "mat1 and mat2 shapes cannot be multiplied (2x4 and 7x5)" in message
    assert message.startswith(str(in_eager.value))
    assert "aten::matmul(Double[2, 4], Double[7, 5])" in message
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert (__file__, where) in [(f.filename, f.lineno) for f in frames]
    torch.testing.assert_close(h.shape, torch.Size((2, 4)))
    assert not is_pending(h)  # the end of the block has computed it
    works(linear)


@pytest.mark.parametrize("computed", [False, True])
def test_gradients_that_eager_refuses_are_refused_at_the_users_line(computed: bool) -> None:
    table = nn.Parameter(torch.randn(5, 3, dtype=torch.cfloat))
    indices = torch.tensor([1, 2])
    with ab.batch():
        weight = table * 2 if computed else table
        with pytest.raises(RuntimeError, match="does not support automatic differentiation"):
            nn.functional.embedding(indices, weight)
        with torch.no_grad():
            rows = nn.functional.embedding(indices, weight)
    torch.testing.assert_close(rows, weight.detach()[indices])


def test_an_error_that_is_caught_leaves_the_block_usable(linear: nn.Linear) -> None:
    x = rand(2, 3)
    with ab.batch():
        h = linear(x)
        with pytest.raises(RuntimeError, match="must match the size"):
            h + rand(3, 7)
        with pytest.raises(IndexError):
            h[9]
        with pytest.raises(TypeError):
            torch.add(h)  # type: ignore[call-overload]
        after = h.tanh()
    torch.testing.assert_close(after, linear(x).tanh())


def test_an_exception_in_the_block_is_the_users(linear: nn.Linear) -> None:
    x = rand(2, 3)
    with pytest.raises(KeyError, match="mine"), ab.batch():  # noqa: PT012
        h = linear(x).tanh()
        raise KeyError("mine")
    torch.testing.assert_close(h, linear(x).tanh())
    works(linear)


def test_an_exception_wins_over_an_error_of_the_flush() -> None:
    table = nn.Embedding(5, 3)
    with pytest.raises(KeyError, match="mine"), ab.batch():  # noqa: PT012
        lost = table(torch.tensor([9]))
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="never computed"):
        lost.sum()
    works(nn.Linear(3, 4).double())


def test_an_op_that_fails_at_the_flush(linear: nn.Linear) -> None:
    table = nn.Embedding(5, 3).double()
    x = rand(2, 3)
    with pytest.raises(IndexError) as raised, ab.batch():  # noqa: PT012
        first = linear(x).tanh()
        where = line() + 1
        good, bad = [table(torch.tensor([i])) for i in (1, 7)]
        after = linear(bad)
        assert bad.shape == (1, 3)
    message = str(raised.value)
    assert message.startswith("index out of range")
    assert "aten::embedding(Double[5, 3], Long[1])" in message
    assert f"{__file__}:{where}" in message
    reads: list[Callable[[Tensor], Any]] = [
        Tensor.sum,
        Tensor.tolist,
        Tensor.item,
        Tensor.data_ptr,
        str,
        lambda t: t + 1,
        lambda t: t.sum().backward(),
    ]
    for lost in (bad, after):
        for read in reads:
            with pytest.raises(RuntimeError, match=r"never computed: index out of range"):
                read(lost)
        with pytest.raises(RuntimeError, match="never computed"), ab.batch():
            lost * 2
    for tensor, expected in ((first, linear(x).tanh()), (good, table(torch.tensor([1])))):
        try:
            torch.testing.assert_close(tensor, expected)
        except RuntimeError as error:  # a value is computed or lost, never wrong
            assert "never computed" in str(error)  # noqa: PT017
    works(linear)


def test_an_early_read_raises_the_error_of_the_flush() -> None:
    table = nn.Embedding(5, 3)
    with ab.batch():
        bad = table(torch.tensor([7]))
        with pytest.raises(IndexError, match="aten::embedding"):
            bad.tolist()
        good = table(torch.tensor([2]))
    torch.testing.assert_close(good, table(torch.tensor([2])))


# --- flushes ---


def test_print(linear: nn.Linear, capsys: pytest.CaptureFixture[str]) -> None:
    x = rand(2, 3)
    with ab.batch():
        print(linear(x).detach())
    print(linear(x).detach())
    inside, outside = capsys.readouterr().out.strip().split("tensor(")[1:]
    assert inside.strip() == outside.strip()


def test_a_flush_says_what_read_and_where(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        h = linear(rand(2, 3))
        where = line() + 1
        h.tolist()
        h.sum().item()
    (first, second) = scope.report().flushes
    assert first.reason == "a raw read of a pending tensor's data"
    assert first.site == f"{__file__}:{where}"
    assert "aten::" in second.reason
    assert (first.nodes, second.nodes) == (1, 1)


def test_branching_on_shapes_does_not_flush(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        h = linear(rand(2, 3))
        if h.size(0) == 2 and h.shape[1] == 4 and len(h) == 2 and h.is_floating_point():
            h = h.new_zeros(h.shape) + torch.ones_like(h) + h
        assert is_pending(h)
        assert scope.report().flushes == []
