"""Cells that run as one node: eager's gradients where members, results and rows differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _C

H = 4


class Cells(nn.Module):
    """An LSTM-like cell of separate gates: the output gate's weights are for h alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(10, H)
        self.gates = nn.Linear(2 * H, 2 * H)
        self.out = nn.Linear(2 * H, H)

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        xh = torch.cat([x, h], -1)
        forget, new = self.gates(xh).chunk(2, -1)
        c = c * forget.sigmoid() + new.tanh() * (1 - forget.sigmoid())
        return self.out(xh).sigmoid() * c.tanh(), c

    def word(self, index: Tensor) -> Tensor:
        return self.embedding(index).tanh() * 2


def as_cells(model: Cells) -> Cells:
    model.step = ab.cell(model.step)  # type: ignore[method-assign]
    model.word = ab.cell(model.word)  # type: ignore[method-assign]
    return model


def has_bodies(report: ab.Report) -> bool:
    return any("as one" in row.note for row in report.signatures)


def run(model: Cells, lengths: list[int], enabled: bool) -> tuple[list[Any], ab.Report]:
    """The states (h, c) after each instance's words."""
    states = []
    with ab.batch(enabled=enabled) as scope:
        for k, length in enumerate(lengths):
            h = c = torch.zeros(1, H) + 0.1 * k
            for t in range(length):
                h, c = model.step(model.word(torch.tensor([(k * 3 + t) % 10])), h, c)
            states.append((h, c))
            del h, c
    return states, scope.report()


LENGTHS = [1, 3, 2, 5, 4, 3, 1, 2]


def compare(loss: Callable[[list[Any]], Tensor], **options: Any) -> None:
    found = []
    for enabled in (True, False):
        model = Cells()
        if enabled:
            as_cells(model)
        states, report = run(model, LENGTHS, enabled)
        assert has_bodies(report) == enabled
        total = loss(states)
        grads = torch.autograd.grad(total, list(model.parameters()), allow_unused=True, **options)
        found.append((total.detach(), list(grads)))
    torch.testing.assert_close(found[0][0], found[1][0])
    for ours, eager in zip(found[0][1], found[1][1], strict=True):
        assert (ours is None) == (eager is None)
        if eager is not None:
            torch.testing.assert_close(ours, eager)


# ---------------------------------------------------------------- what is reached


def test_all_states() -> None:
    compare(lambda states: sum((h.square() + c).sum() for h, c in states))  # type: ignore[arg-type]


def test_some_instances() -> None:
    compare(lambda states: (states[3][0] * 2).sum() + states[5][0].sum())


def test_different_results_of_different_instances() -> None:
    compare(
        lambda states: sum(  # type: ignore[arg-type]
            (s[k % 2] * (k + 1)).sum() for k, s in enumerate(states)
        )
    )


def test_weights_of_a_result_that_is_not_used_get_no_gradient() -> None:
    """c of a first step does not depend on the output gate."""
    compare(lambda states: states[0][1].sum() + states[6][1].sum())


def test_a_hook_of_weights_that_are_not_reached_does_not_run() -> None:
    model = as_cells(Cells())
    seen: list[Any] = []
    model.out.weight.register_hook(seen.append)
    states, _ = run(model, [1, 1, 1], True)
    (states[0][1].sum() + states[1][1].sum()).backward()
    assert seen == []
    assert model.out.weight.grad is None


def test_what_is_not_reached_may_be_infinite() -> None:
    """0 * inf is NaN: members and results without a gradient must not take part."""
    for enabled in (True, False):
        x = [torch.full((2,), v, requires_grad=True) for v in (1.0, 0.0, 2.0, 0.0)]

        def both(v: Tensor) -> tuple[Tensor, Tensor]:
            return (v * 2).exp(), (v * 1).log()

        called = ab.cell(both) if enabled else both
        with ab.batch(enabled=enabled) as scope:
            results = [called(v * 1) for v in x]
        assert not enabled or has_bodies(scope.report())
        # Of instances 1 and 3 the logarithm, of an infinite slope, is left out.
        (results[0][1].sum() + results[1][0].sum() + results[2][0].sum()).backward()
        grads = [v.grad for v in x]
        torch.testing.assert_close(grads[0], torch.ones(2))
        torch.testing.assert_close(grads[1], torch.full((2,), 2.0))
        assert grads[3] is None


# ---------------------------------------------------------------- what is held


def test_gradient_of_a_held_result_that_another_is_computed_from() -> None:
    found = []
    for enabled in (True, False):
        model = Cells()
        if enabled:
            as_cells(model)
        kept, hooked = [], []
        with ab.batch(enabled=enabled):
            for k in range(5):
                h = c = torch.full((1, H), 0.1 * k)
                for t in range(3):
                    h, c = model.step(model.word(torch.tensor([t + k])), h, c)
                    kept.append(c)
                if k == 2:
                    c.register_hook(hooked.append)
                kept.append(h)
        total = torch.stack(kept[3::4]).sum()  # the h
        cs = [t for i, t in enumerate(kept) if i % 4 != 3]
        grads = torch.autograd.grad(total, [*cs, *model.parameters()])
        assert len(hooked) == 1
        found.append((list(grads), hooked))
    torch.testing.assert_close(found[0], found[1])


def test_everything_is_held() -> None:
    found = []
    for enabled in (True, False):
        model = Cells()
        if enabled:
            as_cells(model)
        kept = []
        with ab.batch(enabled=enabled):
            for k in range(4):
                h = c = torch.full((1, H), 0.1 * k)
                for t in range(k + 1):
                    h, c = model.step(model.word(torch.tensor([t + k])), h, c)
                    kept += [h, c]
        sum((t.square().sum() for t in kept), torch.zeros(())).backward()
        found.append([*(t.detach() for t in kept), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[0], found[1])


def test_a_read_within_the_block() -> None:
    found = []
    for enabled in (True, False):
        model = Cells()
        if enabled:
            as_cells(model)
        losses, read = [], []
        with ab.batch(enabled=enabled):
            for k in range(6):
                h = c = torch.full((1, H), 0.1 * k)
                for t in range(4):
                    h, c = model.step(model.word(torch.tensor([t + k])), h, c)
                    if t == 2:
                        read.append(c.sum().item())
                losses.append(h.square().sum())
        torch.stack(losses).sum().backward()
        found.append([torch.tensor(read), *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[0], found[1])


# ---------------------------------------------------------------- backward's ways


def test_twice_with_retain_graph_and_not_a_third_time() -> None:
    model = as_cells(Cells())
    states, _ = run(model, LENGTHS, True)
    total = torch.stack([h.sum() for h, _ in states]).sum()
    total.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    total.backward()
    for p, first in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(p.grad, first * 2)
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_one_instance_after_the_other() -> None:
    found = []
    for enabled in (True, False):
        model = Cells()
        if enabled:
            as_cells(model)
        states, _ = run(model, LENGTHS, enabled)
        for h, c in states:
            (h.sum() + c.square().sum()).backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_create_graph() -> None:
    found = []
    for enabled in (True, False):
        model = Cells()
        if enabled:
            as_cells(model)
        states, _ = run(model, LENGTHS, enabled)
        total = torch.stack([h.sum() for h, _ in states]).sum()
        grads = torch.autograd.grad(total, list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()  # type: ignore[union-attr]
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])


def test_a_weight_that_was_written_to_before_backward() -> None:
    for enabled in (True, False):
        model = Cells()
        if enabled:
            as_cells(model)
        states, _ = run(model, LENGTHS, enabled)
        with torch.no_grad():
            model.gates.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.stack([h.sum() for h, _ in states]).sum().backward()


def test_a_weight_that_needs_no_value_may_be_written_to() -> None:
    found = []
    for enabled in (True, False):
        model = Cells()
        if enabled:
            as_cells(model)
        states, _ = run(model, LENGTHS, enabled)
        with torch.no_grad():
            model.gates.bias.mul_(2)
        torch.stack([h.sum() for h, _ in states]).sum().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1])


# ---------------------------------------------------------------- what goes in


def check(
    function: Callable[..., Any], inputs: list[tuple[Any, ...]], *, body: bool = True
) -> None:
    """Results and gradients of calls as cells, on pending tensors, and in eager."""
    found = []
    cell = function if isinstance(function, _C.Cell) else ab.cell(function)
    for enabled in (True, False):
        called = cell if enabled else function
        leaves = [
            [
                a.clone().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a
                for a in i
            ]
            for i in inputs
        ]
        with ab.batch(enabled=enabled) as scope:
            results = [
                called(*(a * 1 if isinstance(a, Tensor) and a.requires_grad else a for a in args))
                for args in leaves
            ]
        if enabled:
            assert has_bodies(scope.report()) == body, scope.report().signatures
        tensors = [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, Tensor)]
        floats = [a for args in leaves for a in args if isinstance(a, Tensor) and a.requires_grad]
        total = sum((t * t).sum() for t in tensors if t.requires_grad)
        grads = torch.autograd.grad(total, floats, allow_unused=True, materialize_grads=True)  # type: ignore[arg-type]
        found.append(([t.detach() for t in tensors], list(grads)))
    torch.testing.assert_close(found[0], found[1])


def rows(n: int, *sizes: int) -> list[Tensor]:
    torch.manual_seed(n)
    return [torch.randn(*sizes) for _ in range(n)]


def test_views_of_inputs_and_results() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = (x.view(2, 3) * 2).tanh() + x.view(2, 3)[1]
        return z[0], x[:2], z.t()

    check(f, [(x,) for x in rows(5, 6)])


def test_a_result_in_column_order_runs_op_by_op() -> None:
    check(lambda x: (x.view(2, 3).t() * 2).tanh() + 1, [(x,) for x in rows(5, 6)], body=False)


def test_an_input_that_is_a_column() -> None:
    """Its rows have gaps, so that no view of it can be taken of its copy."""

    def whole(x: Tensor) -> Tensor:
        return (x.t() * 2).tanh()

    def viewed(x: Tensor) -> Tensor:
        return (x[:, 0] * 2).tanh()

    found = []
    for enabled in (True, False):
        leaves = [x.requires_grad_() for x in rows(4, 3, 8)]
        one, other = (ab.cell(whole), ab.cell(viewed)) if enabled else (whole, viewed)
        with ab.batch(enabled=enabled):
            wide = [(x * 1).sin() for x in leaves]
            results = [f(x[:, 2:5]) for x in wide for f in (one, other)]
        torch.stack([r.square().sum() for r in results]).sum().backward()
        found.append([*(r.detach() for r in results), *(x.grad for x in leaves)])
    torch.testing.assert_close(found[0], found[1])


def test_the_same_tensor_for_all_and_twice() -> None:
    shared = torch.randn(3)

    def f(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return (x * y + z).tanh() * shared

    check(f, [(x, x, shared) for x in rows(5, 3)])


def test_a_shared_pending_tensor() -> None:
    found = []
    for enabled in (True, False):
        leaf = torch.ones(3, requires_grad=True)
        leaves = [x.requires_grad_() for x in rows(4, 3)]

        def f(x: Tensor, y: Tensor) -> Tensor:
            return (x * y).tanh() * 2

        called = ab.cell(f) if enabled else f
        with ab.batch(enabled=enabled) as scope:
            shared = (leaf * 1).sin()
            results = [called(x * 1, shared) for x in leaves]
        assert not enabled or has_bodies(scope.report())
        torch.stack(results).square().sum().backward()
        found.append([leaf.grad, *(x.grad for x in leaves)])
    torch.testing.assert_close(found[0], found[1])


def test_detached_within() -> None:
    check(lambda x: ((x * 2).detach() * x).tanh(), [(x,) for x in rows(5, 3)])


def test_without_gradients_within() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x * 2).exp()
        return (x * scale).tanh()

    check(f, [(x,) for x in rows(5, 3)], body=False)


def test_a_transposed_weight_and_a_part_of_one() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    found = []
    for enabled in (True, False):
        weight.grad = None

        def f(x: Tensor) -> Tensor:
            return F.linear(x @ weight, weight[:2]).tanh()

        called = ab.cell(f) if enabled else f
        with ab.batch(enabled=enabled):
            results = [called(x * 1) for x in rows(5, 1, 3)]
        torch.stack(results).square().sum().backward()
        assert weight.grad is not None
        found.append([torch.stack(results).detach(), weight.grad])
    torch.testing.assert_close(found[0], found[1])


def test_products_of_inputs_that_wait_for_no_cell_come_first() -> None:
    """From the second block on: it is known then which inputs are states."""
    torch.manual_seed(0)
    of_x, of_h = nn.Linear(3, 4), nn.Linear(4, 4)

    def step(x: Tensor, h: Tensor) -> Tensor:
        y = x.view(1, 3)
        return (of_x(y.tanh()) + of_h(h) + y.sum()).tanh()

    cell = ab.cell(step)
    reports, found = [], []
    for called in (cell, cell, step):
        of_x.zero_grad(), of_h.zero_grad()
        leaves = [x.requires_grad_() for x in rows(12, 3)]
        with ab.batch(enabled=called is cell) as scope:
            states = []
            for k in range(4):
                h = torch.full((1, 4), 0.1 * k)
                for x in leaves[: 3 * k + 1]:
                    h = called(x * 1, h)
                states.append(h.sum())
                del h
        torch.stack(states).sum().backward()
        reports.append(scope.report())
        parameters = [*of_x.parameters(), *of_h.parameters()]
        found.append([torch.stack(states).detach(), *(t.grad for t in [*parameters, *leaves])])
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[1], found[2])
    products = [
        sum(row.batches for row in r.signatures if row.op == "aten::linear") for r in reports
    ]
    assert products[:2] == [0, 1]


def test_losses_within() -> None:
    weight = torch.randn(5, 3)

    def f(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), target) + F.mse_loss(x, x.tanh())

    check(f, [(x, torch.tensor([k % 5])) for k, x in enumerate(rows(6, 1, 3))])


def test_stacks_and_sums_within() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        both = torch.stack([x, y.tanh(), x * y])
        return both.sum(0) + both.max(0).values * both.softmax(0).mean()

    check(f, [(x, y) for x, y in zip(rows(5, 3), rows(6, 3), strict=False)])


def test_a_layer_within() -> None:
    layer = nn.LSTM(3, 4)

    def f(x: Tensor) -> Tensor:
        out, (h, c) = layer(x.tanh())
        return out.sum(0) + h[0] * c[0]

    check(f, [(x,) for x in rows(4, 5, 3)], body=False)  # it might be random


def test_instances_of_many_lengths_run_op_by_op() -> None:
    def f(x: Tensor) -> Tensor:
        return (x * 2).tanh().sum(0)

    f = ab.cell(f)
    inputs = [(torch.randn(k % 4 + 1, 3),) for k in range(12)]
    check(f, inputs)  # the first one does not know yet
    check(f, inputs, body=False)


def test_random_ops_are_drawn_for_each_instance() -> None:
    @ab.cell
    def f(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.5) * 2

    with ab.batch():
        results = [f(torch.ones(64) * 1) for _ in range(4)]
    values = {tuple(r.tolist()) for r in results}
    assert len(values) == 4
    assert set(torch.stack(results).unique().tolist()) == {0.0, 8.0}


# ---------------------------------------------------------------- errors


def test_an_error_within_is_the_members_own() -> None:
    table = nn.Embedding(4, 3)

    @ab.cell
    def f(index: Tensor) -> Tensor:
        return table(index).tanh() * 2

    with pytest.raises(IndexError, match="out of range"):  # noqa: SIM117
        with ab.batch():
            results = [f(torch.tensor([k])) for k in (0, 1, 9, 2)]
    torch.testing.assert_close(results[1].detach(), (table.weight[1:2].tanh() * 2).detach())
    with pytest.raises(RuntimeError):
        results[2].sum()


# ---------------------------------------------------------------- found by random programs


def test_one_tensor_at_two_places_of_the_result() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        y = (x * 2).tanh()
        return y, y.contiguous(), y[0], x

    check(f, [(x,) for x in rows(5, 3)])
    called = ab.cell(f)
    with ab.batch():
        results = [called(x) for x in [x.requires_grad_() for x in rows(3, 3)]]
    assert all(r[0] is r[1] and r[0].data_ptr() == r[2].data_ptr() for r in results)


@pytest.mark.parametrize("like", [True, False])
def test_each_call_makes_tensors_of_its_own(like: bool) -> None:
    @ab.cell
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.full_like(x, 3.0) if like else torch.zeros(2) + 3

    with ab.batch():
        results = [f(x.requires_grad_() * 1) for x in rows(4, 2)]
    results[1][1].mul_(2)
    for k, (_, made) in enumerate(results):
        torch.testing.assert_close(made, torch.full((2,), 6.0 if k == 1 else 3.0))


def test_the_data_of_an_argument() -> None:
    """Not captured: another tensor object over the same memory, made without an op."""
    found = []
    for enabled in (True, False):
        leaves = [x.requires_grad_() for x in rows(4, 3)]

        def f(x: Tensor) -> Tensor:
            return (x * x.data).tanh() * 2

        called = ab.cell(f) if enabled else f
        with ab.batch(enabled=enabled):
            results = [called(x) for x in leaves]
        torch.stack(results).sum().backward()
        found.append([*(r.detach() for r in results), *(x.grad for x in leaves)])
    torch.testing.assert_close(found[0], found[1])


def test_a_leaf_whose_values_are_listed() -> None:
    leaf = torch.ones(2, requires_grad=True)
    inputs = [torch.full((2,), float(k), requires_grad=True) for k in range(3)]
    called = ab.cell(lambda x: leaf * x.tolist()[0])
    with ab.batch():
        results = [called(x) for x in inputs]
    torch.testing.assert_close([r.detach() for r in results], [x.detach() for x in inputs])


@pytest.mark.parametrize("change", ["requires_grad", "dtype", "shape"])
def test_a_tensor_from_outside_that_looks_different_by_now(change: str) -> None:
    found = []
    for enabled in (True, False):
        scale = torch.full((3,), 2.0)
        leaves = [x.requires_grad_() for x in rows(4, 3)]

        def f(x: Tensor, scale: Tensor = scale) -> Tensor:
            return x.double() + (scale * 2).sin()

        called = ab.cell(lambda x: f(x)) if enabled else f
        results = []
        with ab.batch(enabled=enabled):
            for k, x in enumerate(leaves):
                if k == 2 and change == "requires_grad":
                    scale.requires_grad_()
                elif k == 2:
                    scale.data = torch.ones(3).double() if change == "dtype" else torch.ones(1)
                results.append(called(x * 1))
        torch.stack(results).sum().backward()
        assert (scale.grad is not None) == (change == "requires_grad")
        found.append([*(r.detach() for r in results), *(x.grad for x in leaves), scale.grad])
    torch.testing.assert_close(found[0], found[1])


def test_a_hook_of_a_module_that_was_used_without() -> None:
    found = []
    for enabled in (True, False):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        called = ab.cell(layer) if enabled else layer
        results = []
        with ab.batch(enabled=enabled):
            for k, x in enumerate(rows(4, 3)):
                if k == 2:
                    layer[0].register_forward_hook(lambda module, args, out: out * 2)
                results.append(called(x))
        found.append([r.detach() for r in results])
    torch.testing.assert_close(found[0], found[1])


def test_a_leaf_that_is_made_in_the_block() -> None:
    found = []
    for enabled in (True, False):
        leaves = [x.requires_grad_() for x in rows(3, 3)]

        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            new = torch.ones(3, requires_grad=True)
            return (x * new).tanh() * 2, new

        called = ab.cell(f) if enabled else f
        with ab.batch(enabled=enabled):
            results = [called(x * 1) for x in leaves]
        torch.stack([r for r, _ in results]).sum().backward()
        found.append([*(r.detach() for r, _ in results), *(new.grad for _, new in results)])
    torch.testing.assert_close(found[0], found[1])


def test_operands_that_each_instance_has_of_its_own() -> None:
    """In a body a value's number is the same for all members, its memory is not."""

    def f(matrix: Tensor, vector: Tensor, row: Tensor, one: Tensor) -> Tensor:
        scaled = torch.where(matrix > one, matrix * row, one) + torch.lerp(matrix, row, 0.3)
        return scaled @ vector + torch.mv(matrix, vector * 2) + vector @ matrix.t() * one

    sizes = ((2, 3), (3,), (1, 3), (1,))
    inputs = list(zip(*(rows(5 + k, *s)[:5] for k, s in enumerate(sizes)), strict=True))
    check(f, inputs)
    check(f, [(matrix, *inputs[0][1:]) for matrix, *_ in inputs])


def test_a_second_backward_through_what_keeps_nothing() -> None:
    found = []
    for enabled in (True, False):
        leaves = [x.requires_grad_() for x in rows(3, 3)]

        def f(x: Tensor) -> tuple[Tensor, Tensor]:
            return x + x.detach(), (x - 1).sum()

        called = ab.cell(f) if enabled else f
        with ab.batch(enabled=enabled):
            results = [called(x + 1) for x in leaves]
        for _ in range(2):
            torch.stack([r.sum() for pair in results for r in pair]).sum().backward()
        results[0][1].backward()
        found.append([x.grad for x in leaves])
    torch.testing.assert_close(found[0], found[1])


def test_held_views_of_one_memory_have_gradients_of_their_own() -> None:
    found = []
    for enabled in (True, False):
        leaf = torch.arange(12.0).sin().view(3, 4).requires_grad_()

        def f(x: Tensor, y: Tensor) -> Tensor:
            return (x @ y + (x * y).sum()).tanh() * y

        called = ab.cell(f) if enabled else f
        with ab.batch(enabled=enabled):
            whole = leaf * 1
            views = [whole[1] for _ in range(4)]
            results = [called(x * 2, y) for x, y in zip(rows(4, 4), views, strict=True)]
        grads = torch.autograd.grad(torch.stack(results).sum(), [*views[1:], leaf])
        found.append([*(r.detach() for r in results), *grads])
    torch.testing.assert_close(found[0], found[1])


def test_a_viewed_parameter_that_is_given_other_data() -> None:
    found = []
    for enabled in (True, False):
        weight = nn.Parameter(torch.arange(9.0).sin().view(3, 3))
        called = (ab.cell if enabled else lambda f: f)(lambda x, w=weight: (x @ w.t()).tanh() * 2)
        results = []
        with ab.batch(enabled=enabled):
            for k, x in enumerate(rows(4, 2, 3)):
                if k == 2:
                    weight.data = weight.data * 3
                results.append(called(x))
        found.append([r.detach() for r in results])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("view", [lambda w: w.t(), lambda w: w[:2], lambda w: w.chunk(2)[1]])
def test_views_of_weights_that_are_arguments(
    view: Callable[[Tensor], Tensor], recorded: bool
) -> None:
    found = []
    for enabled in (True, False):
        weights = [w.requires_grad_(recorded) for w in rows(3, 4, 4)]

        def f(x: Tensor, w: Tensor) -> Tensor:
            return F.linear(x, view(w)).tanh() * 2

        called = ab.cell(f) if enabled else f
        for _ in range(2):  # in the second block each op is known
            leaves = [x.requires_grad_() for x in rows(6, 2, 4)]
            with ab.batch(enabled=enabled):
                results = [called(x * 1, weights[k % 3]) for k, x in enumerate(leaves)]
            torch.stack(results).square().sum().backward()
            found.append([*(r.detach() for r in results), *(t.grad for t in leaves + weights)])
            for w in weights:
                w.grad = None
    torch.testing.assert_close(found[:2], found[2:])
