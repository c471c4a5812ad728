"""Row "Reads": autograd metadata of a pending tensor, and writes that capture does not see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from exactly import (
    DOUBLE,
    Blocks,
    differentiate,
    inputs,
    same,
    weight,
)
from torch import Tensor, nn

# --- autograd metadata of a pending tensor, before and after the flush ---


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("which", ["data", "detach"])
def test_read_data_and_detach(which: str, flushed: bool) -> None:
    """The results share the tensor's memory and do not require grad. Writes reach the tensor."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []
        with block() as scope:
            for x in xs:
                h = F.linear(x, w) * 2
                if flushed:
                    scope.flush()
                other = h.data if which == "data" else h.detach()
                read = other * 3
                other.mul_(10)
                results.append((h, other, read, h + 1, other.requires_grad, other.grad_fn))
        differentiate([r[3] for r in results])
        return results, w

    same(program)


@pytest.mark.parametrize("flushed", [False, True])
def test_read_grad_fn(flushed: bool) -> None:
    """A tensor has a grad_fn if it has one in eager. The graph leads to the parameters."""

    def leaves(node: Any, seen: set[int]) -> list[tuple[int, ...]]:
        found = [tuple(node.variable.shape)] if hasattr(node, "variable") else []
        for child, _ in node.next_functions:
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found += leaves(child, seen)
        return found

    def program(block: Blocks) -> Any:
        w, bias, xs, results = weight(), weight(3), inputs(), []
        with block() as scope:
            for x in xs:
                h = F.linear(x, w, bias).tanh()
                cut = h.detach()
                if flushed:
                    scope.flush()
                with torch.no_grad():
                    frozen = F.linear(x, w, bias)
                results.append([t.grad_fn is None for t in (h, cut, frozen, w, x, h[0], h.data)])
                results.append(sorted(set(leaves(h.grad_fn, set()))))
        return results

    same(program)


@pytest.mark.parametrize("flushed", [False, True])
def test_read_is_leaf(flushed: bool) -> None:
    """Tests tensors that do not require grad, views, and leaves made in the block."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []
        with block() as scope:
            for x in xs:
                h = F.linear(x, w)
                made = h.detach().requires_grad_()
                results.append([t.requires_grad for t in (h, h.detach(), h[0], made)])
                if flushed:
                    scope.flush()
                results.append([t.is_leaf for t in (h, h.detach(), h[0], w, x, made)])
                (made * 2).sum().backward()
                results.append([made, h * 2])
        return results, w

    same(program)


@pytest.mark.parametrize("when", ["pending", "flushed", "after"])
@pytest.mark.parametrize("kind", ["look", "change", "remove"])
def test_read_register_hook(when: str, kind: str) -> None:
    """A hook of a value gets its gradient once, and may replace it."""

    def program(block: Blocks) -> Any:
        w, xs, seen = weight(), inputs(), []

        def hook(g: Tensor) -> Tensor | None:
            seen.append(g.clone())
            return g * 2 if kind == "change" else None

        def register(h: Tensor) -> None:
            handle = h.register_hook(hook)
            if kind == "remove":
                handle.remove()

        with block() as scope:
            hidden = []
            for x in xs:
                h = F.linear(x, w).tanh()
                if when == "flushed":
                    scope.flush()
                if when != "after":
                    register(h)
                hidden.append(h)
            losses = [(h * h).sum() for h in hidden]
        if when == "after":
            for h in hidden:
                register(h)
        for loss in losses:
            loss.backward()
        return seen, w, losses

    same(program)


@pytest.mark.parametrize("when", ["pending", "flushed", "after"])
def test_read_retain_grad(when: str) -> None:
    """Reads `.grad` of a value that is not a leaf, in two backward passes."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block() as scope:
            hidden = [F.linear(x, w).tanh() for x in xs]
            if when == "flushed":
                scope.flush()
            if when != "after":
                for h in hidden:
                    h.retain_grad()
            losses = [(h * h).sum() for h in hidden]
        if when == "after":
            for h in hidden:
                h.retain_grad()
        losses[0].backward(retain_graph=True)
        first = [h.grad for h in hidden]
        sum(losses).backward()
        return first, [h.grad for h in hidden], [h.retains_grad for h in hidden], w

    same(program)


@pytest.mark.parametrize("inside", [False, True])
def test_read_gradients_of_held_values(inside: bool) -> None:
    """Tests `autograd.grad(loss, h)` for intermediate values, their views, and several values."""

    def program(block: Blocks) -> Any:
        w, u, xs = weight(), weight(), inputs()

        def grads() -> Any:
            first = [
                torch.autograd.grad(losses[i], [hidden[i], deeper[i]], retain_graph=True)
                for i in range(len(xs))
            ]
            unused = torch.autograd.grad(losses[0], hidden[1], allow_unused=True, retain_graph=True)
            return first, unused, torch.autograd.grad(sum(losses), [*hidden, w, u])

        with block():
            hidden = [F.linear(x, w).tanh() for x in xs]
            deeper = [F.linear(h, u).sigmoid() for h in hidden]
            losses = [(d * h).sum() for h, d in zip(hidden, deeper, strict=True)]
            if inside:
                found = grads()
        if not inside:
            found = grads()
        return found

    same(program)


# --- writes that capture does not see ---


@pytest.mark.parametrize("remade", [False, True])
@pytest.mark.parametrize("use", ["linear", "add", "matmul", "weight", "index"])
def test_read_of_a_numpy_buffer_that_is_refilled(use: str, remade: bool) -> None:
    """Each instance fills the buffer of `torch.from_numpy(buffer)`."""

    def program(block: Blocks) -> Any:
        w, buffer, results = weight(), np.zeros((3, 3)), []
        shared = torch.from_numpy(buffer)
        with block():
            for i in range(4):
                buffer[:] = np.arange(9).reshape(3, 3) % (i + 1)
                x = torch.from_numpy(buffer) if remade else shared
                if use == "index":
                    results.append(w[x[0].long()])
                elif use == "weight":
                    results.append(F.linear(w * 1, x))
                elif use == "add":
                    results.append(w + x)
                else:
                    results.append(F.linear(x, w) if use == "linear" else x @ w)
        return results

    same(program)


@pytest.mark.parametrize("how", ["at_once", "nothing_saved"])
def test_read_of_a_numpy_buffer_that_is_refilled_and_gradients(how: str) -> None:
    """Eager is well-defined if backward runs before the next refill, or needs no values."""

    def program(block: Blocks) -> Any:
        w, buffer, results = weight(), np.zeros((3, 3)), []
        x = torch.from_numpy(buffer)
        with block():
            for i in range(4):
                buffer[:] = np.arange(9).reshape(3, 3) % (i + 1)
                results.append(w + x if how == "nothing_saved" else F.linear(x, w).tanh())
                if how == "at_once":
                    results[-1].sum().backward()
        if how == "nothing_saved":
            differentiate(results)
        return results, w

    same(program)


@pytest.mark.parametrize("way", ["numpy", "data", "detach", "dlpack", "view", "storage"])
def test_read_of_a_tensor_that_is_written_behind_the_tracer(way: str) -> None:
    """Writes to a tensor's memory through another object that shares the memory."""

    def program(block: Blocks) -> Any:
        w, x, results = weight(), torch.zeros(2, 3, dtype=DOUBLE), []
        array, bare = x.numpy(), np.from_dlpack(x)
        storage = torch.tensor([], dtype=DOUBLE).set_(x.untyped_storage(), 0, (2, 3))
        with block():
            for i in range(4):
                if way == "numpy":
                    array[:] = i
                elif way == "data":
                    x.data.fill_(i)
                elif way == "detach":
                    x.detach().fill_(i)
                elif way == "dlpack":
                    if not bare.flags.writeable:
                        bare.flags.writeable = True
                    bare[:] = i
                elif way == "view":
                    x.view(-1)[1:].fill_(i)
                else:
                    storage.fill_(i)
                results.append((F.linear(x, w), w[:2] * x))
        return results

    same(program)


def test_read_of_a_weight_that_is_written_through_data() -> None:
    """Tests `p.data.mul_()` and `p.data = ...` between two instances."""

    def program(block: Blocks) -> Any:
        w, u, xs, results = weight(), weight(), inputs(), []
        with block():
            for x in xs:
                results.append(F.linear(x, w) + F.linear(x, u))
                w.data.mul_(2)
                u.data = u.data + 1
        return results, w, u

    same(program)


def test_read_of_a_dead_weights_address() -> None:
    """Each instance makes a weight. It is freed, and the next weight reuses its memory."""

    def program(block: Blocks) -> Any:
        xs, results = inputs([2] * 6), []
        with block():
            for x in xs:
                layer = nn.Linear(3, 3).double()
                results.append(layer(x))
                del layer
        return results

    same(program)


def test_read_of_a_dead_inputs_address() -> None:
    """Each instance makes an input. It is freed, and the next input reuses its memory."""

    def program(block: Blocks) -> Any:
        w, results = weight(), []
        with block():
            for i in range(6):
                results.append(F.linear(torch.full((2, 3), float(i), dtype=DOUBLE), w))
        differentiate(results)
        return results, w

    same(program)
