"""Row "Mutation": common patterns stay deferred, and writes to materialised results work."""

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
from helpers_mutation import (
    WRITES,
    attempt,
)
from torch import Tensor, nn

# --- the common patterns stay deferred and batched ---


STEPS = 3


def test_mutation_accumulating_stays_deferred() -> None:
    """`total += h` over the steps of an instance has one batch per step, and not per instance."""

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

    assert_deferred(same(program), batches=3 + STEPS)  # linear, tanh, zeros, and the sums


def test_mutation_accumulating_over_instances_stays_deferred() -> None:
    """With `total += loss`, the losses are still batched."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs([2] * 8)
        with block():
            total = torch.zeros((), dtype=DOUBLE)
            for x in xs:
                total += F.linear(x, w).tanh().square().sum()
        total.backward()
        return total, w

    assert_deferred(same(program), batches=5 + 8)


def test_mutation_accumulating_into_a_pending_tensor_stays_deferred() -> None:
    """The first term is also computed in the block."""

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
    """Each step writes `out[t] = h`."""

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
    """After `out = h.new_zeros(...)` and `out[t] = h`, the recurrent state is read from `out`."""

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
    """The mask of attention is written into the scores."""

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
    """Tests ops such as `h.add_(x)` on a value that is computed in the block."""

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
    """A write after the block or a flush changes no batch sibling; backward matches eager."""

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


@pytest.mark.parametrize("many", [False, True])
def test_mutation_that_pytorch_is_told_of(many: bool) -> None:
    """Calls torch.autograd.graph.increment_version on pending results."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            results = [F.linear(x, w).exp() for x in xs]
            told = results[:2] if many else results[0]
            torch.autograd.graph.increment_version(told)
            versions = [r._version for r in results]
            losses = [r.sum() for r in results]
        losses[-1].backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[0].backward()
        return versions, losses, w

    same(program)


@pytest.mark.parametrize("op", [torch.tanh, torch.exp, torch.sigmoid, torch.sqrt, torch.relu])
def test_mutation_of_a_result_that_backward_needs_is_eagers_error(
    op: Callable[[Tensor], Tensor],
) -> None:
    """Eager has saved the result. A write to a batch sibling is allowed."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            results = [op(F.linear(x, w).abs()) for x in xs]
        results[1].mul_(2)
        results[2].sum().backward()
        return attempt(lambda: results[1].sum().backward()), w

    same(program)


def test_mutation_of_a_result_that_backward_does_not_need() -> None:
    """No op has saved the result, so eager's backward raises no error."""

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
    """The write also changes the other tensor, whose gradient passes through the write."""

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
    """A view of a parameter that is made in the block is still a view of a leaf."""

    def program(block: Blocks) -> Any:
        w = weight()
        with block():
            v = w[0]
            other = w * 2
        return attempt(lambda: v.mul_(2)), w, other

    same(program)


def test_mutation_of_a_value_that_pending_ops_have_read() -> None:
    """A write to a flushed value waits for the ops that have read it, or flushes them."""

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
    """Tests in-place ops that change the metadata of a tensor, and not its values."""

    def case(h: Tensor) -> Any:
        before = h + 1
        write(h)
        return h, before, h * 2, list(h.shape), h.requires_grad, h.is_leaf

    same(each(case))


def test_mutation_of_integers_and_booleans() -> None:
    """Tests counters and masks that are updated in place."""

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


@pytest.mark.parametrize("to_view", [lambda d: d.t(), lambda d: d[:1]], ids=["transposed", "part"])
def test_mutation_of_set_data_to_a_view_of_it(to_view: Callable[[Tensor], Tensor]) -> None:
    """After `p.data = p.data.t()` the tensor has another geometry, but the same address."""

    def program(block: Blocks) -> Any:
        w, b, xs = rand(3, 3), rand(3, 3), [rand(3, 3) for _ in range(3)]
        results = []
        with block():
            for x in xs:
                results += [F.linear(x.tanh(), w), x.tanh() + b]
            w.data, b.data = to_view(w.data), to_view(b.data)
            for x in xs:
                results += [F.linear(x.tanh(), w), x.tanh() + b]
        return results, w, b

    same(program)


def test_mutation_of_a_parameters_data_to_a_view_of_it() -> None:
    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        results = []
        with block():
            for x in xs:
                results.append(F.linear(x.tanh(), w))
                w.data = w.data.t()
        return results, w

    same(program)


def test_mutation_of_nn_init() -> None:
    """Makes and initialises a module in the block."""

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
    """The report shows the line of a write that can't be deferred."""
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
