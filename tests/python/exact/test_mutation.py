"""Row "Mutation": in-place ops on pending tensors, on views of them, and on what they have read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import (
    DOUBLE,
    Blocks,
    assert_deferred,
    differentiate,
    each,
    inputs,
    is_pending,
    line,
    rand,
    same,
    weight,
)
from torch import Tensor, nn

Write = Callable[[Tensor, Tensor], Any]  # of a target, with a value of its shape


def setitem(index: Any, value: Any = None) -> Write:
    """``t[index] = value``, or what stands in the value's own place."""

    def write(t: Tensor, v: Tensor) -> None:
        t[index] = v[index] if value is None else value

    return write


def iadd(t: Tensor, v: Tensor) -> None:
    t += v


def isub(t: Tensor, v: Tensor) -> None:
    t -= v


def imul(t: Tensor, v: Tensor) -> None:
    t *= 2


def itruediv(t: Tensor, v: Tensor) -> None:
    t /= 2


def mask(t: Tensor) -> Tensor:
    """The same places for every tensor of one shape."""
    return (torch.arange(t.numel()) % 2 == 0).view(t.shape)


def first(t: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.long)


WRITES: dict[str, Write] = {
    # in-place ops
    "add_": lambda t, v: t.add_(v),
    "add_scalar": lambda t, v: t.add_(1),
    "add_alpha": lambda t, v: t.add_(v, alpha=3),
    "sub_": lambda t, v: t.sub_(v),
    "mul_": lambda t, v: t.mul_(3),
    "div_": lambda t, v: t.div_(2),
    "neg_": lambda t, v: t.neg_(),
    "zero_": lambda t, v: t.zero_(),
    "fill_": lambda t, v: t.fill_(5),
    "fill_tensor": lambda t, v: t.fill_(v.sum()),
    "clamp_": lambda t, v: t.clamp_(-0.5, 0.5),
    "relu_": lambda t, v: t.relu_(),
    "tanh_": lambda t, v: t.tanh_(),
    "exp_": lambda t, v: t.exp_(),
    "square_": lambda t, v: t.clone().square_(),
    "lerp_": lambda t, v: t.lerp_(v, 0.25),
    "addcmul_": lambda t, v: t.addcmul_(v, torch.ones_like(v), value=2),
    "cumsum_": lambda t, v: t.cumsum_(0),
    "masked_fill_": lambda t, v: t.masked_fill_(mask(t), 7.0),
    "masked_fill_pending_mask": lambda t, v: t.masked_fill_(v > 0, 7.0),
    "masked_scatter_": lambda t, v: t.masked_scatter_(mask(t), v),
    "index_fill_": lambda t, v: t.index_fill_(0, first(t), 7.0),
    "index_add_": lambda t, v: t.index_add_(0, first(t), v[:1]),
    "index_copy_": lambda t, v: t.index_copy_(0, first(t), v[:1]),
    "index_put_": lambda t, v: t.index_put_((first(t),), v[:1]),
    "index_put_accumulate": lambda t, v: t.index_put_((first(t),), v[:1], accumulate=True),
    "scatter_": lambda t, v: t.scatter_(0, torch.zeros(t.shape, dtype=torch.long)[:1], v[:1]),
    "scatter_add_": lambda t, v: t.scatter_add_(0, torch.zeros(v.shape, dtype=torch.long), v),
    "functional_inplace": lambda t, v: F.relu(t, inplace=True),
    "foreach_add_": lambda t, v: torch._foreach_add_([t], [v]),
    "detached": lambda t, v: t.detach().add_(v.detach()),
    "data": lambda t, v: t.data.add_(v.data),
    # copy_
    "copy_": lambda t, v: t.copy_(v),
    "copy_broadcast": lambda t, v: t.copy_(v[:1]),
    "copy_of_another_type": lambda t, v: t.copy_(v.float()),
    "copy_of_an_ordinary_tensor": lambda t, v: t.copy_(torch.ones(t.shape)),
    "copy_of_itself": lambda t, v: t.copy_(t.flip(0)),
    # x[i] = y
    "setitem_int": setitem(0),
    "setitem_negative": setitem(-1),
    "setitem_slice": setitem(slice(1)),
    "setitem_number": setitem(0, 3.0),
    "setitem_everything": setitem(slice(None)),
    "setitem_ellipsis": setitem(...),
    "setitem_list": setitem([0]),
    "setitem_tensor": setitem(torch.tensor([0])),
    "setitem_mask": lambda t, v: t.__setitem__(mask(t), 4.0),
    "setitem_pending_mask": lambda t, v: t.__setitem__(v > 0, 4.0),
    # +=
    "iadd": iadd,
    "isub": isub,
    "imul": imul,
    "itruediv": itruediv,
    # out=, which autograd refuses: of what is detached
    "out": lambda t, v: torch.add(v.detach(), 1, out=t.detach()),
    "out_of_a_product": lambda t, v: torch.mul(v.detach(), v.detach(), out=t.detach()),
    "out_of_stack": lambda t, v: torch.stack(list(v.detach()), out=t.detach()),
    "out_with_grad": lambda t, v: torch.add(v, 1, out=t),
}


def attempt(action: Callable[[], Any]) -> str:
    """How it went; a program compares errors as it compares values."""
    try:
        action()
    except RuntimeError as error:
        return str(error)[:40]
    return "fine"


# --- on pending tensors ---


@pytest.mark.parametrize("name", WRITES)
def test_mutation_of_a_pending_tensor(name: str) -> None:
    """What was read before the write, what is read after it, and every view."""

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
    """Every live view sees every write, whichever of them it went through."""

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
    """Where one call made several views, eager refuses the write, unless without gradients."""

    def case(h: Tensor) -> Any:
        with torch.set_grad_enabled(grad):
            top, rest = (h * 1).split([1, len(h) - 1])
            went = attempt(lambda: WRITES[name](top, top * 3))
            return went, top, rest

    same(each(case))


def test_mutation_of_a_view_of_a_dead_base() -> None:
    """The base has no other reference; its views still share memory."""

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
    """Several writes through several views, with reads between them."""

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
    """Where several entries share one place, eager refuses the write."""
    same(each(lambda h: h[0].expand(4, 3).add_(1)), raises=RuntimeError)


# --- on ordinary tensors that pending ops have read ---


@pytest.mark.parametrize("name", WRITES)
def test_mutation_of_an_ordinary_tensor(name: str) -> None:
    """Pending ops that have read it run first, on the values that it had."""

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
    """One input buffer, or one running state, refilled or written by each instance."""

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
    """A weight under no_grad, between two uses; and a view of it."""

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
    """A leaf that requires grad is not for writing, nor is a view of it."""

    def program(block: Blocks) -> Any:
        w = weight()
        with block():
            h = w * 2
            return h, attempt(lambda: w.add_(1)), attempt(lambda: w[0].add_(h[0]))

    same(program)


def test_mutation_of_an_ordinary_tensor_by_a_slice_of_gradients() -> None:
    """`out[i] = w * i` into a plain tensor makes it part of the graph, as in eager."""

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
    """In-place through views, of a tensor that was computed before the block."""

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


# --- the common patterns stay deferred and batched ---

STEPS = 3


def test_mutation_accumulating_stays_deferred() -> None:
    """`total += h` over the steps of an instance: a batch a step, not one an instance."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), [inputs([1] * STEPS) for _ in range(8)]
        with block():
            totals = []
            for steps in xs:
                total = torch.zeros(1, 3, dtype=DOUBLE)
                for x in steps:
                    total += F.linear(x, w).tanh()
                totals.append(total)
        differentiate(totals)
        return totals, w

    assert_deferred(same(program), batches=2 + STEPS)


def test_mutation_accumulating_over_instances_stays_deferred() -> None:
    """`total += loss`: the losses are batched all the same."""

    def program(block: Blocks) -> Any:
        w, xs, total = weight(), inputs([2] * 8), torch.zeros((), dtype=DOUBLE)
        with block():
            for x in xs:
                total += F.linear(x, w).tanh().square().sum()
        total.backward()
        return total, w

    assert_deferred(same(program), batches=4 + 8)


def test_mutation_accumulating_into_a_pending_tensor_stays_deferred() -> None:
    """The first term is itself computed in the block."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), [inputs([2] * STEPS) for _ in range(8)]
        with block():
            totals = []
            for steps in xs:
                total = F.linear(steps[0], w) * 1
                for x in steps[1:]:
                    total += F.linear(x, w).tanh()
                totals.append(total)
        differentiate(totals)
        return totals, w

    assert_deferred(same(program), batches=3 + STEPS)


@pytest.mark.parametrize("make", [torch.zeros, torch.empty, torch.ones])
def test_mutation_filling_stays_deferred(make: Callable[..., Tensor]) -> None:
    """`out[t] = h` for each step."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), [inputs([1] * STEPS) for _ in range(8)]
        with block():
            outs = []
            for steps in xs:
                out = make(STEPS, 3, dtype=DOUBLE)
                for t, x in enumerate(steps):
                    out[t] = F.linear(x, w).tanh()[0]
                outs.append(out * 2)
        differentiate(outs)
        return outs, w

    assert_deferred(same(program), batches=3 + STEPS)


@pytest.mark.parametrize("make", [Tensor.new_zeros, Tensor.new_empty])
def test_mutation_filling_what_was_made_from_a_pending_tensor_stays_deferred(
    make: Callable[..., Tensor],
) -> None:
    """`out = h.new_zeros(...)`, then `out[t] = h`, and the recurrent state read back from it."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), [inputs([1] * STEPS) for _ in range(8)]
        with block():
            outs = []
            for steps in xs:
                h = F.linear(steps[0], w)
                out = make(h, (STEPS, 3))
                out[0] = h[0]
                for t in range(1, STEPS):
                    out[t] = torch.tanh(F.linear(steps[t], w)[0] + out[t - 1])
                outs.append(out * 2)
        differentiate(outs)
        return outs, w

    assert_deferred(same(program), batches=2 + 4 * STEPS)


@pytest.mark.parametrize("pending_mask", [False, True])
def test_mutation_masked_fill_stays_deferred(pending_mask: bool) -> None:
    """Attention's mask, written into the scores."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs([2] * 8)
        causal = torch.ones(2, 3, dtype=torch.bool).triu(1)
        with block():
            results = []
            for x in xs:
                scores = F.linear(x, w) * 2
                scores.masked_fill_(scores > 1 if pending_mask else causal, float("-inf"))
                results.append(scores.softmax(-1))
        differentiate(results)
        return results, w

    assert_deferred(same(program), batches=5)


@pytest.mark.parametrize("name", ["add_", "add_scalar", "add_alpha", "mul_", "relu_", "imul"])
def test_mutation_pointwise_stays_deferred(name: str) -> None:
    """`h.add_(x)` and the like, on a value computed in the block."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs([2] * 8)
        with block():
            results = []
            for x in xs:
                h = F.linear(x, w)
                WRITES[name](h, x)
                results.append(h.tanh())
        differentiate(results)
        return results, w

    assert_deferred(same(program), batches=3)


# --- materialised results ---


@pytest.mark.parametrize("name", ["add_", "copy_", "setitem_int", "zero_", "relu_", "data", "out"])
@pytest.mark.parametrize("flushed", [False, True])
def test_mutation_of_materialised_results(name: str, flushed: bool) -> None:
    """After the block, or after a flush in it: siblings do not notice, and backward is eager's."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block() as scope:
            results = [F.linear(x, w) * 2 for x in xs]
            if flushed:
                scope.flush()
                WRITES[name](results[1], torch.full_like(results[1], 9))
            sums = [h.sum() * 2 for h in results]
        WRITES[name](results[2], torch.full_like(results[2], 9))
        differentiate(results, sums)
        return results, sums, w

    same(program)


def test_mutation_of_a_result_leaves_its_siblings_version_alone() -> None:
    """Batch siblings share no version counter."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            results = [F.linear(x, w) * 2 for x in xs]
        versions = [r._version for r in results]
        results[0].add_(1)
        results[0].mul_(2)
        return results, [r._version - v for r, v in zip(results, versions, strict=True)]

    same(program)


@pytest.mark.parametrize("op", [torch.tanh, torch.exp, torch.sigmoid, torch.sqrt, torch.relu])
def test_mutation_of_a_result_that_backward_needs_is_eagers_error(
    op: Callable[[Tensor], Tensor],
) -> None:
    """Eager saved the result; a sibling's write does no harm."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            results = [op(F.linear(x, w).abs()) for x in xs]
        results[1].mul_(2)
        results[2].sum().backward()
        return attempt(lambda: results[1].sum().backward()), w

    same(program)


def test_mutation_of_a_result_that_backward_does_not_need() -> None:
    """Nothing saved it, so eager's backward goes through."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            hidden = [F.linear(x, w) for x in xs]
            results = [h + 1 for h in hidden]
        for h in hidden:
            h.mul_(3)
        differentiate(results, hidden)
        return hidden, results, w

    same(program)


@pytest.mark.parametrize("which", ["base", "view"])
def test_mutation_after_the_block_of_a_base_or_a_view(which: str) -> None:
    """The other one sees the write, and its gradient goes through it."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs((2, 3, 2))
        with block():
            bases = [F.linear(x, w) * 1.5 for x in xs]
            views = [h[1:] for h in bases]
        for written in bases if which == "base" else views:
            written.mul_(2)
        differentiate(views if which == "base" else bases)
        return bases, views, w

    same(program)


def test_mutation_of_a_view_of_a_leaf_after_the_block_is_eagers_error() -> None:
    """A view of a parameter, taken in the block, is still a view of a leaf."""

    def program(block: Blocks) -> Any:
        w = weight()
        with block():
            v = w[0]
            other = w * 2
        return attempt(lambda: v.mul_(2)), w, other

    same(program)


def test_mutation_of_a_value_that_pending_ops_have_read() -> None:
    """A write to a flushed value waits for, or flushes, the pending ops that have read it."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block() as scope:
            hidden = [F.linear(x, w) for x in xs]
            scope.flush()
            before = [h + 1 for h in hidden]
            for h in hidden:
                h.mul_(2)
            after = [h + 1 for h in hidden]
        differentiate(before, after)
        return hidden, before, after, w

    same(program)


# --- shapes, types and storages that change in place ---


@pytest.mark.parametrize(
    "write",
    [
        lambda h: h.t_(),
        lambda h: h.transpose_(0, 1),
        lambda h: h.unsqueeze_(0),
        lambda h: h.squeeze_(),
        lambda h: h.detach_(),
        lambda h: h.requires_grad_(),
    ],
    ids=["t_", "transpose_", "unsqueeze_", "squeeze_", "detach_", "requires_grad_"],
)
def test_mutation_of_metadata(write: Callable[[Tensor], Any]) -> None:
    """In-place ops that change what a tensor is rather than what it holds."""

    def case(h: Tensor) -> Any:
        before = h + 1
        write(h)
        return h, before, h * 2, list(h.shape), h.requires_grad, h.is_leaf

    same(each(case))


def test_mutation_of_integers_and_booleans() -> None:
    """Counters and masks that are built up in place."""

    def case(h: Tensor) -> Any:
        wins, count = h > 0, (h > 1).long()
        wins |= h < -1
        wins.logical_not_()
        count += wins
        count[0] = 4
        count <<= 1
        return wins, count, h * wins

    same(each(case))


def test_mutation_of_set_data() -> None:
    """`p.data = ...` between two uses replaces the values and keeps the history."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        results = []
        with block():
            for x in xs:
                results.append(x + w[:1] * 1)
                w.data = w.data * 2
        differentiate(results)
        return results, w

    same(program)


def test_mutation_of_nn_init() -> None:
    """A module made and initialised in the block."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        results, layers = [], []
        with block():
            for x in xs:
                layer = nn.Linear(3, 3).double()
                nn.init.constant_(layer.weight, 0.5)
                nn.init.zeros_(layer.bias)
                nn.init.eye_(layer.weight)
                layers.append(layer)
                results.append(layer(F.linear(x, w)))
        differentiate(results)
        return results, w, [list(layer.parameters()) for layer in layers]

    same(program)


def test_mutation_flushes_name_line_and_reason() -> None:
    """A write that cannot wait says where it was."""
    w, buffer = weight(), rand(2, 3)
    with ab.batch() as scope:
        pending = F.linear(buffer, w)
        where = line() + 1
        buffer.set_(rand(2, 3).untyped_storage(), 0, (2, 3))
        assert len(scope.report().flushes) == 1
        assert not is_pending(pending)
    flush = scope.report().flushes[0]
    assert flush.site == f"{__file__}:{where}"
    assert "set_" in flush.reason
