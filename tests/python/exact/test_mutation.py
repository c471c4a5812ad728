"""Row "Mutation": in-place ops on pending tensors, their views, and their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import (
    DOUBLE,
    Blocks,
    differentiate,
    each,
    inputs,
    rand,
    same,
    weight,
)
from helpers_mutation import (
    WRITES,
    attempt,
)
from torch import Tensor

# --- on pending tensors ---


@pytest.mark.parametrize("name", WRITES)
def test_mutation_of_a_pending_tensor(name: str) -> None:
    """Tests values that are read before and after the write, and every view."""

    def case(h: Tensor) -> Any:
        value = h * 3
        before, row, flat = h + 1, h[0], h.detach().view(-1)
        went = attempt(lambda: WRITES[name](h, value))
        return h, value, before, row, flat, h * 5, row * 7, went

    same(each(case))


# --- on views of pending tensors ---


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda h: h[1:],
    "columns": lambda h: h[:, ::2],
    "transposed": lambda h: h.t(),
    "flat": lambda h: h.view(-1),
    "narrow": lambda h: h.narrow(1, 1, 2),
    "alias": lambda h: h.view_as(h),
    "view_of_a_view": lambda h: h.view(-1).narrow(0, 0, 3),
    "unsqueezed": lambda h: h[None].squeeze(0),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ["add_", "copy_", "setitem_int", "iadd", "masked_fill_", "zero_"])
def test_mutation_of_a_view(name: str, view: str) -> None:
    """Every live view observes every write through any view."""

    def case(h: Tensor) -> Any:
        others = [make(h) for make in VIEWS.values()]
        target = VIEWS[view](h)
        value = target * 3
        WRITES[name](target, value)
        return h, others, target, value, h * 5, [other * 7 for other in others]

    same(each(case, (2, 3, 4, 2)))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["add_", "copy_", "zero_"])
def test_mutation_of_one_of_several_views(name: str, grad: bool) -> None:
    """If one call made several views, eager rejects a write, except without gradients."""

    def case(h: Tensor) -> Any:
        with torch.set_grad_enabled(grad):
            top, rest = (h * 1).split([1, len(h) - 1])
            went = attempt(lambda: WRITES[name](top, top * 3))
            return went, top, rest

    same(each(case))


def test_mutation_of_a_view_of_a_dead_base() -> None:
    """The base has no other reference, but its views still share memory."""

    def case(h: Tensor) -> Any:
        a, b = h[0], h.view(-1)
        del h
        a += 1
        b *= 2
        return a, b

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            results = [case(F.linear(x, w) * 2) for x in xs]
        differentiate(results)
        return results, w

    same(program)


def test_mutation_of_a_view_that_is_written_and_read_in_turn() -> None:
    """Tests several writes through several views, with reads between them."""

    def case(h: Tensor) -> Any:
        seen = []
        for i in range(len(h)):
            h[i] += i
            seen.append(h.sum(0) * 1)
            h[:, 1] *= 2
            seen.append(h[i] + 0)
        return seen, h

    same(each(case))


def test_mutation_through_an_expanded_view_is_eagers_error() -> None:
    """If several elements share memory, eager rejects the write."""
    same(each(lambda h: h[0].expand(4, 3).add_(1)), raises=RuntimeError)


# --- on ordinary tensors that pending ops have read ---


@pytest.mark.parametrize("name", WRITES)
def test_mutation_of_an_ordinary_tensor(name: str) -> None:
    """Pending ops that have read the tensor run before the write, and read the old values."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        results = []
        with block():
            for x in xs:
                buffer = rand(*x.shape)
                row = buffer[0]
                h = F.linear(x, w) * 2
                before = h + buffer
                went = attempt(lambda b=buffer, v=h * 3: WRITES[name](b, v))
                results.append((before, h + buffer, buffer, row, h, went))
        differentiate(results)
        return results, w

    same(program)


@pytest.mark.parametrize("name", ["add_", "copy_", "setitem_int", "iadd", "zero_", "fill_", "out"])
def test_mutation_of_one_buffer_for_all_instances(name: str) -> None:
    """Each instance refills one input buffer, or writes to one running state."""

    def program(block: Blocks) -> Any:
        w, xs, buffer = weight(), inputs((2, 2, 2, 2)), rand(2, 3)
        results = []
        with block():
            for x in xs:
                h = F.linear(x, w) * 2 + buffer
                WRITES[name](buffer, h.detach() * 3)
                results.append((h, F.linear(buffer.clone(), w)))
        differentiate(results)
        return results, buffer, w

    same(program)


@pytest.mark.parametrize("name", ["add_", "copy_", "setitem_int", "imul", "zero_", "out", "data"])
def test_mutation_of_a_parameter(name: str) -> None:
    """Writes to a weight, or to a view of it, under no_grad and between two uses."""

    def program(block: Blocks) -> Any:
        w, bias, xs = weight(), weight(3), inputs()
        results = []
        with block(), torch.no_grad():
            for x in xs:
                before = F.linear(x, w, bias)
                row = w[1]
                WRITES[name](w, (w * 3).detach())
                WRITES[name](bias, (bias * 3).detach())
                results.append((before, F.linear(x, w, bias), row * 1))
        return results, w, bias

    same(program)


def test_mutation_of_a_leaf_is_eagers_error() -> None:
    """A write to a leaf that requires grad, or to a view of it, is an error."""

    def program(block: Blocks) -> Any:
        w = weight()
        with block():
            h = w * 2
            return h, attempt(lambda: w.add_(1)), attempt(lambda: w[0].add_(h[0]))

    same(program)


def test_mutation_of_an_ordinary_tensor_by_a_slice_of_gradients() -> None:
    """`out[i] = w * i` makes an ordinary tensor a part of the graph, as in eager."""

    def program(block: Blocks) -> Any:
        w, out = weight(3), torch.zeros(4, 3, dtype=DOUBLE)
        with block():
            for i in range(4):
                out[i] = w * i
            total = out.sum(0)
        differentiate(total, out)
        return out, total, w

    same(program)


def test_mutation_of_slices_of_an_ordinary_tensor_that_has_a_history() -> None:
    """Writes through views to a tensor that was computed before the block."""

    def program(block: Blocks) -> Any:
        w = weight(4)
        y = w * 2
        with block():
            y[0] = 5.0
            y[1:].mul_(3)
            z = y * 1
        differentiate(z.square())
        return y, z, w

    same(program)
