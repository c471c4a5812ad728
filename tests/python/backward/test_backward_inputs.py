"""Backward through a block: roots and inputs of gradients, and in-place changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_backward import (
    DOUBLE,
    Block,
    Chain,
    assert_close,
    backward_each,
    backward_sum,
    grads_of,
    losses_in,
    rand,
    same,
)
from torch import Tensor, nn

# --- where gradients come from and go to ---


def test_no_grad_and_detach_in_the_block(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            losses = []
            for x in instances:
                states = model.states(x)
                with torch.no_grad():
                    factor = states[-1].exp().sum() * model.scale.sum()
                with torch.no_grad(), torch.enable_grad():
                    extra = model.scale.tanh().sum()
                fixed = states[0].detach().square()
                assert not factor.requires_grad
                losses.append((states[-1] * factor * fixed).sum() + extra)
        backward_each(losses)
        return losses, grads_of(model)

    same(scenario)


def test_frozen_parameters(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        model.cell.weight.requires_grad_(False)
        model.table.requires_grad_(False)
        backward_each(losses_in(block, model, instances))
        return grads_of(model)

    same(scenario)


def test_inputs_that_require_grad() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        inputs = [rand(2, 4).requires_grad_() for _ in range(4)]
        with block():
            losses = [w(x).tanh().sum() + x[0].sin().sum() for x in inputs]
        (losses[0] + losses[3]).backward()
        assert inputs[1].grad is None
        found = torch.autograd.grad(losses[1], [inputs[1], w.weight])
        return found, [x.grad for x in inputs], grads_of(w)

    same(scenario)


def test_inputs_that_are_not_leaves() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        base = rand(4, 2, 4).requires_grad_()
        rows = base.exp()
        inputs = [*rows.unbind(), rows[0].t().contiguous().t(), rows.sum(0), rows[1]]
        with block():
            losses = [(w(x) * x).sum() for x in inputs]
        torch.stack([losses[0], *losses[2:]]).sum().backward()
        return base.grad, grads_of(w)

    same(scenario)


def test_strided_and_expanded_inputs() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        bases = [rand(4, 2).requires_grad_() for _ in range(3)]
        rows = [rand(4).requires_grad_() for _ in range(3)]
        with block():
            losses = [
                (w(b.t()) * r.expand(2, 4)).sum() + (b[::2] * b[1::2]).sum()
                for b, r in zip(bases, rows, strict=True)
            ]
        backward_each(losses)
        return [t.grad for t in bases + rows], grads_of(w)

    same(scenario)


def test_one_input_used_by_all_instances() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        x = rand(1, 4).requires_grad_()
        with block():
            losses = [(w(x * i) + x).tanh().sum() for i in range(1, 5)]
        backward_each(losses[1:])
        return x.grad, grads_of(w)

    same(scenario)


def test_losses_in_further_eager_ops(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x)[-1] for x in instances]
            losses = [s.sum() for s in states]
        head = model.scale.exp() * torch.cat(states)
        weights = torch.softmax(torch.stack(losses), 0)
        penalty = sum(p.square().sum() for p in model.parameters())
        (head.sum(1) @ weights + penalty).backward()
        return grads_of(model)

    same(scenario)


def test_results_of_one_block_in_the_next(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x)[-1] for x in instances]
        with block():
            losses = [model.cell(torch.cat([s, s.sin()], 1)).sum() for s in states]
        losses[2].backward()
        losses[0].backward()
        return grads_of(model)

    same(scenario)


def test_weight_produced_in_the_block() -> None:
    """[dynet] A weight that is itself the result of a captured op gets its gradient."""

    def scenario(block: Block) -> Any:
        w = nn.Parameter(rand(4, 4))
        b = nn.Parameter(rand(4))
        inputs = [rand(n, 4) for n in (2, 1, 3)]
        with block():
            weight = w.tanh() * 2
            bias = b.exp()
            losses = [F.linear(x, weight, bias).sin().sum() for x in inputs]
            losses += [(x @ weight.t()).cos().sum() for x in inputs]
        (losses[0] + losses[4]).backward(retain_graph=True)
        backward_sum([losses[1], losses[2], losses[3], losses[5]])
        return w.grad, b.grad

    same(scenario)


def test_weight_of_each_instance_produced_in_the_block() -> None:
    """[dynet]"""

    def scenario(block: Block) -> Any:
        w = nn.Parameter(rand(4, 4))
        inputs = [rand(2, 4) for _ in range(3)]
        with block():
            losses = []
            for x in inputs:
                weight = (x.t() @ x) * w
                losses.append(F.linear(x, weight).sum() + (x @ weight).square().sum())
        backward_each(losses)
        return w.grad

    same(scenario)


def test_parameter_as_weight_and_as_data() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Parameter(rand(4, 4))
        inputs = [rand(n, 4) for n in (2, 1, 3, 2)]
        with block():
            losses = []
            for x in inputs:
                h = F.linear(x, w) + (x @ w) * w[0]
                losses.append((h @ w.t()).sum() + (w * w.sum()).sin().sum())
                rows = F.embedding(torch.tensor([1, 3]), w)
                losses.append(F.linear(w, x * w[1]).tanh().sum() + rows.sin().sum())
        backward_each(losses[::2])
        backward_sum(losses[1:4:2])
        return w.grad

    same(scenario)


def test_tied_weights() -> None:
    def scenario(block: Block) -> Any:
        table = nn.Embedding(6, 4, dtype=DOUBLE)
        out = nn.Linear(4, 6, bias=False, dtype=DOUBLE)
        out.weight = table.weight
        with block():
            losses = [
                F.cross_entropy(out(table(ids).tanh()), ids.flip(0))
                for ids in [torch.randint(6, (n,)) for n in (2, 4, 2)]
            ]
        backward_each(losses)
        return table.weight.grad

    same(scenario)


# --- in-place changes ---


@pytest.mark.parametrize("held", ["not", "behind", "within"])
@pytest.mark.parametrize("as_cell", [False, True])
def test_products_with_a_transposed_weight(as_cell: bool, held: str) -> None:
    """Products with `w.t()` are collected with those of `w`, unless the view is held."""

    def scenario(block: Block) -> Any:
        torch.manual_seed(0)
        w, square = (torch.randn(4, n, dtype=DOUBLE, requires_grad=True) for n in (3, 4))
        bias = torch.randn(4, dtype=DOUBLE, requires_grad=True)

        def step(x: Tensor) -> Tensor:
            y = torch.addmm(bias, x, w.t()) + F.linear(x, w)
            return (y @ square.t() + y @ square + x @ w.detach().t() + y @ w @ w.mT).tanh()

        called = ab.cell(step) if as_cell else step
        xs = [x.view(1, 3).requires_grad_() for x in rand(5, 3)]
        with block():
            turned = w.t()
            losses = [called(x * 1).sum() + (x @ turned).sum() for x in xs]
            if held == "within":
                turned.retain_grad()
                losses.append((xs[0] @ turned).sin().sum())
            elif held == "not":
                del turned
        if held == "behind":
            turned.retain_grad()
        backward_sum(losses)
        return losses, [t.grad for t in (w, square, bias, *xs)], held != "not" and turned.grad

    same(scenario)


@pytest.mark.parametrize("when", ["within", "behind"])
def test_hooks_of_views_of_weights_that_ops_have_read(when: str) -> None:
    """Ops that read the weight or another view do not contribute to the gradient of a view."""

    def scenario(block: Block) -> Any:
        torch.manual_seed(0)
        w = torch.randn(4, 4, dtype=DOUBLE, requires_grad=True)
        table = torch.randn(8, 4, dtype=DOUBLE, requires_grad=True)
        xs = [x.view(1, 4).requires_grad_() for x in rand(5, 4)]
        seen = []

        def watch(views: list[Tensor]) -> None:
            for k, view in enumerate(views):
                view.register_hook(lambda grad, k=k: seen.append((k, grad * 1)))

        with block():
            views = [w.t(), w[1:], w[0], table[:5], table[:5][1:]]
            losses = []
            for k, x in enumerate(xs):
                index = torch.tensor([k % 4])
                y = x @ views[0] + x @ w.t() + F.linear(x, w)
                z = F.linear(x, views[1]).sum() + F.linear(x, w[1:]).sum()
                n = F.layer_norm(y, (4,), views[2]) + F.layer_norm(y, (4,), w[0])
                e = F.embedding(index, views[3]) + F.embedding(index, table[:5])
                losses.append((n * e).sum() + z + F.embedding(index, views[4]).sum())
            if when == "within":
                watch(views)
        if when == "behind":
            watch(views)
        backward_sum(losses)
        seen.sort(key=lambda item: item[0])
        return losses, [w.grad, table.grad, *(x.grad for x in xs)], [grad for _, grad in seen]

    same(scenario)


def eager_error(function: Callable[[Block], Any]) -> str:
    with pytest.raises(RuntimeError) as eager:
        function(lambda: ab.batch(enabled=False))
    return str(eager.value)


@pytest.mark.parametrize("kind", ["linear", "mul", "layer_norm"])
def test_weight_changed_before_backward(kind: str) -> None:
    def scenario(block: Block) -> None:
        w = nn.Parameter(rand(4, 4))
        inputs = [rand(1, 4).requires_grad_() for _ in range(3)]
        with block():
            if kind == "linear":
                losses = [F.linear(x, w).sum() for x in inputs]
            elif kind == "mul":
                losses = [(x * w).sum() for x in inputs]
            else:
                losses = [F.layer_norm(x, (4,), w[0]).sum() for x in inputs]
        with torch.no_grad():
            w.mul_(2)
        backward_sum(losses)

    beginning = "has been modified by an inplace operation"
    assert beginning in eager_error(scenario)
    with pytest.raises(RuntimeError, match=beginning):
        scenario(ab.batch)


def test_change_of_what_is_not_saved() -> None:
    """If eager allows a write, the block allows it too."""

    def scenario(block: Block) -> Any:
        b = nn.Parameter(rand(4))
        inputs = [rand(1, 4) for _ in range(3)]
        with block():
            losses = [(x + b).sum() for x in inputs]
        with torch.no_grad():
            b.mul_(2)
            inputs[0].zero_()
        backward_each(losses)
        return b.grad

    same(scenario)


def test_change_in_the_block(instances: list[Tensor]) -> None:
    """Ops that were captured before the write read the old value."""

    def scenario(block: Block) -> Any:
        scale = rand(4)
        w = nn.Parameter(rand(4))
        with block():
            first = [(w.exp() + scale).sum() for _ in range(3)]
            scale.mul_(3)
            second = [(w.exp() * scale).sum() for _ in range(3)]
        backward_each(first)
        backward_each(second)
        return first, second, w.grad

    same(scenario)


def test_held_result_modified_after_the_block(instances: list[Tensor]) -> None:
    """The write changes neither batch siblings nor values that backward kept."""
    model = Chain()
    with ab.batch():
        states = [model.states(x)[-1] for x in instances]
    siblings = [s.detach().clone() for s in states]
    with torch.no_grad():
        states[0].fill_(100)
    assert_close(states[1:], siblings[1:])
    loss = torch.cat(states[1:]).square().sum()
    loss.backward()
    other = Chain()
    other.load_state_dict(model.state_dict())
    torch.cat([other.states(x)[-1] for x in instances[1:]]).square().sum().backward()
    assert_close(grads_of(model), grads_of(other))


def test_in_place_autograd_op_on_a_held_result() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        with block():
            results = [w(x) for x in [rand(2, 4) for _ in range(3)]]
        results[0].mul_(3)
        results[1][0].exp_()
        results[2].add_(results[0])
        backward_each([r.square().sum() for r in results[1:]])
        return results, grads_of(w)

    same(scenario)


def test_in_place_op_in_the_block() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        with block():
            losses = []
            for x in [rand(2, 4) for _ in range(3)]:
                h = w(x)
                h += x
                h.mul_(2)
                losses.append(h.tanh().sum())
        backward_sum(losses)
        return losses, grads_of(w)

    same(scenario)


@pytest.mark.parametrize("count", [3, 63, 64, 65, 200, 400])
def test_a_loss_reaches_what_it_was_computed_from_and_no_more(count: int) -> None:
    """This holds for any number of tensors that require grad."""
    leaves = [torch.full((2,), 1.0 + k, requires_grad=True) for k in range(count)]
    met: list[int] = []
    for k, leaf in enumerate(leaves):
        leaf.register_hook(lambda grad, k=k: met.append(k))
    with ab.batch():
        losses = [(leaves[k] * leaves[k - 1]).tanh().sum() for k in range(count)]
    for k in (0, count - 1):
        met.clear()
        losses[k].backward()
        assert sorted(met) == sorted({k, (k - 1) % count})
    torch.stack(losses[1:-1]).sum().backward()
    fresh = [leaf.detach().requires_grad_() for leaf in leaves]
    torch.stack([(fresh[k] * fresh[k - 1]).tanh().sum() for k in range(count)]).sum().backward()
    for leaf, eager in zip(leaves, fresh, strict=True):
        torch.testing.assert_close(leaf.grad, eager.grad)
