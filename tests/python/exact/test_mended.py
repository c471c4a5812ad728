"""Regression tests: a program for each fixed bug, compared with eager."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import Blocks, differentiate, inputs, rand, same, weight
from torch import Tensor, nn

# --- weights, detached and frozen ---


def detached_leaf(block: Blocks) -> Any:
    """`w * x` and `w.detach() * x` are not one weight: only the first has a gradient."""
    w, x = weight(3), rand(3).requires_grad_()
    with block():
        results = [(w * x).sum(), (w.detach() * x).sum() * 10, (w.data * x).sum() * 100]
    sum(results).backward()
    return results, w, x


def detached_weight(block: Blocks) -> Any:
    """Uses detached and ordinary weight and bias of a linear layer."""
    layer, xs = nn.Linear(3, 3).double(), inputs()
    with block():
        results = []
        for x in xs:
            target = F.linear(x, layer.weight.detach(), layer.bias.detach())
            results.append((layer(x) - target - 1).square().sum())
            results.append(F.linear(x, layer.weight.data, layer.bias).sum())
    sum(results).backward()
    return results, list(layer.parameters())


def detached_before(block: Blocks) -> Any:
    """The detached tensor is made before the block, or under no_grad inside it."""
    w, x = weight(3), rand(3).requires_grad_()
    before = w.detach()
    with block():
        with torch.no_grad():
            copy, alias = w * 1, w.detach()
        results = [(w * x).sum(), (before * x).sum() * 10, (copy * x).sum(), (alias * x).sum()]
    sum(results).backward()
    return results, w, x


def frozen_for_one_use(block: Blocks) -> Any:
    """Toggles requires_grad_ between two uses of an operand."""
    w, y = weight(3), rand(3).requires_grad_()
    with block():
        w.requires_grad_(False)
        a = (w * y).sum()
        w.requires_grad_(True)
        b = (w * y).sum()
    (a + 10 * b).backward()
    return a, b, w, y


def frozen_after_its_use(block: Blocks) -> Any:
    layer, x = nn.Linear(3, 1).double(), rand(1, 3).requires_grad_()
    with block():
        g = layer(x).sum()
        layer.requires_grad_(False)
    g.backward()
    return g, x, list(layer.parameters())


def input_that_starts_to_require_grad(block: Blocks) -> Any:
    xs, w = inputs(), weight()
    with block():
        results = []
        for x in xs:
            results.append(F.linear(x, w).sum())
            x.requires_grad_()
            results.append(F.linear(x, w).sum() * 3)
    sum(results).backward()
    return results, xs, w


# --- values from before the block ---


def encoder_before_the_block(block: Blocks) -> Any:
    """The block's inputs have an eager graph. Runs one backward for each loss."""
    encoder, head, x = weight(), weight(), rand(4, 3)
    encoded = F.linear(x, encoder).tanh()
    with block():
        losses = [F.linear(row, head).square().sum() for row in encoded]
    for loss in losses:
        loss.backward(retain_graph=True)
    return losses, encoder, head


def encoder_rows_before_the_block(block: Blocks) -> Any:
    """Each loss needs a different part of the eager graph."""
    encoder, head = weight(), weight()
    rows = [F.linear(x, encoder).tanh() for x in inputs()]
    with block():
        losses = [F.linear(row, head).square().sum() for row in rows]
    for loss in losses:
        loss.backward()
    return losses, encoder, head


# --- hooks of parameters that are left out ---


def hooks_of_left_out_parameters(block: Blocks) -> Any:
    """A parameter that the loss does not depend on gets no hook call and no .grad."""
    a, b, calls = weight(3), weight(3), []
    a.register_hook(lambda g: calls.append("a"))
    b.register_hook(lambda g: calls.append("b"))
    b.register_post_accumulate_grad_hook(lambda p: calls.append("b accumulated"))
    with block():
        losses = [(a * 2).sum(), (b * 3).sum()]
    losses[0].backward()
    return calls, a, b


def hooks_of_left_out_values(block: Blocks) -> Any:
    """Tests held values of instances that are not differentiated."""
    w, calls = weight(), []
    with block():
        hidden = [F.linear(x, w).tanh() for x in inputs()]
        losses = [(h * h).sum() for h in hidden]
    for i, h in enumerate(hidden):
        h.register_hook(lambda g, i=i: calls.append(i))
    (losses[1] + losses[2]).backward()
    return sorted(calls), w


def hooks_off_the_path(block: Blocks) -> Any:
    """Calls autograd.grad for inputs whose paths contain no held value."""
    w, u, calls = weight(), weight(3), []
    with block():
        h = F.linear(rand(2, 3), w).tanh()
        loss = (h * u).sum()
    h.register_hook(lambda g: calls.append("h"))
    w.register_hook(lambda g: calls.append("w"))
    return torch.autograd.grad(loss, [u]), calls


def hooks_of_left_out_modules(block: Blocks) -> Any:
    """Tests backward hooks of a layer that the loss does not use."""
    layers, calls = [nn.Linear(3, 3).double() for _ in range(2)], []
    for i, layer in enumerate(layers):
        layer.register_full_backward_hook(lambda m, a, b, i=i: calls.append(i))
    with block():
        losses = [layer(rand(2, 3)).sum() for layer in layers]
    losses[1].backward()
    return calls, [list(layer.parameters()) for layer in layers]


# --- backward again ---


def second_backward(block: Blocks) -> Any:
    """A second backward of each loss raises eager's error, and adds no gradient."""
    w, outcomes = weight(), []
    with block():
        losses = [F.linear(x, w).tanh().sum() for x in inputs()]
    for loss in losses:
        loss.backward()
    for loss in losses:
        try:
            loss.backward()
            outcomes.append("fine")
        except RuntimeError as error:
            outcomes.append(str(error)[:60])
    return outcomes, w


def second_backward_of_one_of_a_sum(block: Blocks) -> Any:
    w, outcomes = weight(), []
    with block():
        losses = [F.linear(x, w).tanh().sum() for x in inputs()]
    sum(losses).backward()
    try:
        losses[1].backward()
    except RuntimeError as error:
        outcomes.append(str(error)[:60])
    return outcomes, w


def second_backward_where_nothing_is_saved(block: Blocks) -> Any:
    w = weight(3)
    with block():
        losses = [(w + x).flip(0).sum() for x in (rand(3), rand(3))]
    losses[0].backward()
    losses[0].backward()
    return losses, w


def custom_function_per_loss(block: Blocks) -> Any:
    """Calls a custom Function in the block, and runs one backward for each loss."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 100 * ctx.saved_tensors[0]

    w = weight()
    with block():
        losses = [Doubled.apply(F.linear(x, w)).tanh().sum() for x in inputs()]
    for loss in losses:
        loss.backward()
    return losses, w


# --- the rest ---


def long_chain(op: Callable[[Tensor], Tensor]) -> Callable[[Blocks], Any]:
    """Applies a generic op a hundred times, each time to the previous result."""

    def program(block: Blocks) -> Any:
        w, losses = weight(), []
        with block():
            for x in inputs((2, 2, 2)):
                h = F.linear(x, w)
                for _ in range(100):
                    h = op(h)
                losses.append(h.square().sum())
        for loss in losses:
            loss.backward()
        return losses, w

    return program


def conjugated(block: Blocks) -> Any:
    w = nn.Parameter(torch.randn(3, dtype=torch.complex128))
    with block():
        results = [(w * 2j * i).conj() + 1 for i in range(3)]
    sum(torch.view_as_real(r.resolve_conj()).prod(-1).sum() for r in results).backward()
    return results, w


def parameter_made_in_the_block(block: Blocks) -> Any:
    w = weight()
    with block():
        made = [nn.Parameter(F.linear(x, w).detach()) for x in inputs()]
        losses = [(p * 3).sum() for p in made]
    sum(losses).backward()
    return made, losses


def weight_changed_that_no_gradient_needs(block: Blocks) -> Any:
    w, bias = weight(), weight(3)
    with block():
        losses = [F.linear(x, w, bias).sum() for x in inputs()]
    with torch.no_grad():
        w.add_(1)
    sum(losses).backward()
    return losses, w, bias


def embedding_with_max_norm(block: Blocks) -> Any:
    table = nn.Embedding(5, 3, max_norm=1.0).double()
    with block():
        losses = [table(torch.tensor(i)).sum() for i in ([1, 2], [0, 4], [2])]
    sum(losses).backward()
    return losses, table.weight


def index_by_pending_indices(block: Blocks) -> Any:
    w = weight()
    with block():
        results = []
        for x in inputs((2, 2, 2)):
            y = F.linear(x, w)[0]
            results.append(torch.stack([y, y * 2, y * 3])[y.topk(2)[1]])
            results.append(w[y.argsort()])
    differentiate(results)
    return results, w


PROGRAMS = [
    detached_leaf, detached_weight, detached_before, frozen_for_one_use, frozen_after_its_use,
    input_that_starts_to_require_grad, encoder_before_the_block, encoder_rows_before_the_block,
    hooks_of_left_out_parameters, hooks_of_left_out_values, hooks_off_the_path,
    hooks_of_left_out_modules, second_backward, second_backward_of_one_of_a_sum,
    second_backward_where_nothing_is_saved, custom_function_per_loss, conjugated,
    parameter_made_in_the_block, weight_changed_that_no_gradient_needs, embedding_with_max_norm,
    index_by_pending_indices,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_mended(program: Callable[[Blocks], Any]) -> None:
    """The program behaves as in eager mode."""
    same(program)


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "flip": lambda h: h.flip(0),
    "cumsum": lambda h: h.cumsum(0) / 2,
    "layer_norm": lambda h: F.layer_norm(h, (3,)),
    "roll": lambda h: h.roll(1, 1),
    "sort": lambda h: h.sort(-1)[0],
    "where": lambda h: torch.where(h > 0, h, h * 0.5),
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", CHAINS)
def test_mended_long_chain(name: str) -> None:
    """Tests deep graphs of one signature, with one backward for each loss."""
    same(long_chain(CHAINS[name]))


@pytest.mark.parametrize("index", ["list", "tensor", "pending", "two", "mask"])
def test_mended_verify_of_index_lists(index: str) -> None:
    """verify=True also runs `x[i]` eagerly, for any kind of index."""

    def program(block: Blocks) -> Any:
        w, results = weight(), []
        with block(verify=True):
            for x in inputs((2, 2, 2)):
                h = F.linear(x, w)
                pending = h[0].topk(2)[1]
                indices: dict[str, Any] = {
                    "list": [0, 2],
                    "tensor": torch.tensor([2, 0]),
                    "pending": pending,
                    "two": (torch.tensor([0, 1]), pending),
                    "mask": torch.tensor([True, False, True]),
                }
                results.append((w * 2)[indices[index]] * h.sum())
        differentiate(results)
        return results, w

    same(program)


HEAD = "import torch, torch_autobatch as ab\nW = torch.nn.Parameter(torch.ones(3))\n"
FUNCTION = """
class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2
    @staticmethod
    def backward(ctx, g):
        return g * 100
"""
SECOND = """
try:
    {0}.backward()
except RuntimeError as e:
    assert "second time" in str(e)
else:
    raise AssertionError("a second backward")
"""
CRASHED = {
    "nothing_saved_twice": "with ab.batch(): l = (W + 1).sum()\n"
    "l.backward(); l.backward()\nassert W.grad.tolist() == [2, 2, 2]",
    "saved_twice": "with ab.batch(): l = (W * W).sum()\nl.backward()" + SECOND.format("l"),
    "sum_then_one": "with ab.batch(): ls = [(W * i).tanh().sum() for i in range(3)]\n"
    "sum(ls).backward()" + SECOND.format("ls[1]"),
    "custom_function": FUNCTION + "with ab.batch(): ls = [Fn.apply(W * i).sum() for i in (0, 1)]\n"
    "for l in ls: l.backward()\nassert W.grad.tolist() == [100, 100, 100]",
}


@pytest.mark.parametrize("name", CRASHED)
def test_mended_crash(name: str) -> None:
    """Runs programs that once crashed, in a separate process."""
    command = [sys.executable, "-c", HEAD + CRASHED[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-500:]}"
