"""Hooks on views and on results that share a node, and views whose base has another dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import Blocks, differentiate, rand, same, weight
from torch import Tensor

# --- a hook on a pending view ---


@pytest.mark.parametrize("taken", ["in the block", "after it"])
def test_hook_on_a_view_leaves_it_a_view(taken: str) -> None:
    """Views of it that are made under no_grad have the right base, and know if it requires grad."""

    def program(block: Blocks) -> Any:
        x, calls = weight(4), []
        with block():
            y = (x * 2).view(2, 2)
            y.register_hook(lambda g: calls.append(g))
            if taken == "in the block":
                views = views_without_grad(y)
        if taken == "after it":
            views = views_without_grad(y)
        differentiate(y * 3)
        return [(v.requires_grad, v.is_leaf, v._is_view()) for v in views], calls, x

    same(program)


@torch.no_grad()
def views_without_grad(y: Tensor) -> list[Tensor]:
    return [*torch.meshgrid(y[0], y.view(-1), indexing="ij"), y.view(-1), y.expand(2, 2, 2), y]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_ itself": lambda y: y.add_(y),
    "mul_": lambda y: y.mul_(2),
    "copy_": lambda y: y.copy_(y * 3),
    "set an item": lambda y: y.__setitem__(0, 5.0),
    "zero_": lambda y: y.zero_(),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_hook_fires_once_after_a_write(write: str, view: bool, inside: bool) -> None:
    """Each hook gets the gradient of the value that the tensor had when the hook was set."""

    def program(block: Blocks) -> Any:
        x, calls = weight(4), []
        with block():
            base = x * 2
            y = base[1:] if view else base
            y.register_hook(lambda g: calls.append(("before", g)))
            if inside:
                WRITES[write](y)
        if not inside:
            WRITES[write](y)
        y.register_hook(lambda g: calls.append(("after", g)))
        differentiate(y * y, base * 3)
        return calls, y, base, x

    same(program)


# --- results of one node ---

GATES = [torch.ones(4, n, dtype=torch.float64) for n in (4, 1)]
SEVERAL: dict[str, Callable[[Tensor], Any]] = {
    "split": lambda x: x.split(2),
    "split with sizes": lambda x: x.split([1, 2, 1]),
    "chunk": lambda x: x.chunk(2),
    "unbind": lambda x: x.unbind(),
    "tensor_split": lambda x: x.tensor_split(2),
    "unsafe_chunk": lambda x: x.unsafe_chunk(2),
    "two splits": lambda x: (x.split(2)[0], x.split(2)[1]),
    "rows": lambda x: (x[0], x[1:]),
    "of a piece": lambda x: (x.split(3)[0][0], x.split(3)[0][1:]),
    "var_mean": lambda x: torch.var_mean(x, 0),
    "svd": lambda x: torch.linalg.svd(x.view(2, 2)),
    "lstm_cell": lambda x: torch.lstm_cell(x[None], (x[None, :1], x[None, 1:2]), *GATES),
}


@pytest.mark.parametrize("used", ["later", "in the block", "both", "base"])
@pytest.mark.parametrize("op", SEVERAL)
def test_hook_on_one_of_several_results(op: str, used: str) -> None:
    """If only another result of the node has a gradient, eager calls the hook with None."""

    def program(block: Blocks) -> Any:
        x, calls = weight(4), []
        with block():
            base = x * 2
            results = SEVERAL[op](base)
            loss = (results[1] * 3).sum() + (base.sum() if used == "base" else 0)
            for i, t in enumerate(results):
                t.register_hook(lambda g, i=i: calls.append((i, g)))
        if used == "later":
            loss = (results[1] * 3).sum()
        elif used == "both":
            loss = loss + (results[0] * 5).sum()
        loss.backward()
        return calls, x

    same(program)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_several_results(create_graph: bool) -> None:
    """Tests gradients with respect to each piece, and retained gradients."""

    def program(block: Blocks) -> Any:
        xs, out = [weight(4) for _ in range(3)], []
        with block():
            pieces = [(x * x).split(2) for x in xs]
            losses = [(p * p * p).sum() * (q * q * q).sum() for p, q in pieces]
            for t in pieces[1]:
                t.retain_grad()
        for (p, q), loss in zip(pieces, losses, strict=True):
            out.append(
                torch.autograd.grad(loss, [q, p], retain_graph=True, create_graph=create_graph)
            )
        sum(losses).backward(retain_graph=create_graph)
        if create_graph:
            differentiate(out)
        return out, [p.grad for p in pieces[1]], xs

    same(program)


def test_hook_of_left_out_instances_siblings() -> None:
    """If an instance has no gradient, the hooks of its pieces are not called."""

    def program(block: Blocks) -> Any:
        w, calls = weight(4), []
        with block():
            pieces = [(w * i).split(2) for i in range(3)]
            for i, (p, q) in enumerate(pieces):
                p.register_hook(lambda g, i=i: calls.append((i, "p", g)))
                q.register_hook(lambda g, i=i: calls.append((i, "q", g)))
            losses = [(q * q).sum() for _, q in pieces]
        losses[1].backward()
        return calls, w

    same(program)


# --- complex views ---

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "imag": lambda z: z.imag,
    "real": lambda z: z.real,
    "row of imag": lambda z: z.imag[1:],
    "view_as_real": torch.view_as_real,
    "imag of a row": lambda z: z[1].imag,
}


@pytest.mark.parametrize("write", ["sigmoid_", "mul_", "zero_", "add_ itself"])
@pytest.mark.parametrize("part", PARTS)
def test_write_to_a_part_of_a_complex_result(part: str, write: str) -> None:
    """View and base have different dtypes, and autograd recreates such a view in a special way."""

    def program(block: Blocks) -> Any:
        a, b = weight(4), weight(2, 4)
        with block():
            z = torch.complex(a * 2, b)
            x = PARTS[part](z)
            writes = {"sigmoid_": x.sigmoid_, "mul_": lambda: x.mul_(3), "zero_": x.zero_}
            writes.get(write, lambda: x.add_(x))()
            y = x * 2
        differentiate(x, y, z)
        return x, y, z, a, b

    same(program)


# --- more cases found by fuzzing ---


def test_write_to_no_element_gives_a_history() -> None:
    """After `buffer[1:2] = h`, a buffer with one row requires grad."""

    def program(block: Blocks) -> Any:
        w = weight(4)
        with block():
            h = (w * 2)[None]
            buffers = [(h > 0).double() for _ in range(2)]
            buffers[0][1:2] = h
            buffers[1][1:2] = 3
            results = [b + b for b in buffers]
        differentiate(results)
        return results, buffers, w

    same(program)


def test_view_of_one_of_several_after_a_write_is_eagers_error() -> None:
    """After a write to the whole tensor, no piece of a split can be used."""

    def program(block: Blocks) -> Any:
        w = weight(4)
        with block():
            h = w * 2
            a, b = h.split(2)
            h[1:] += 0.7
            c = h * 2
        differentiate(c)
        with pytest.raises(RuntimeError, match="function that returns multiple views") as error:
            _ = a + b
        return c, w, type(error.value)

    same(program)


def test_reshape_that_copies_is_no_view() -> None:
    """The result can be detached in place, and has no base."""

    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with block():
            results = [w.T.reshape(-1), (w * 2).t().reshape(2, -1)]
        known = [r._is_view() for r in results]
        results[0].detach_()
        differentiate(results)
        return known, results, w

    same(program)


def test_backward_under_autocast() -> None:
    """Runs backward under autocast. The forward ran without autocast."""

    def program(block: Blocks) -> Any:
        w, x = weight(4, 4, dtype=torch.float32), rand(4, 4, dtype=torch.float32)
        with block():
            h = F.linear(torch.addmm(w[0], x, w), w)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                (gradient,) = torch.autograd.grad(h.sum(), [w])
        return h, gradient

    same(program, tolerance=3e-2)


def test_gradient_of_what_was_written_to_itself() -> None:
    """`y[0:2] = y` writes through a view of all of y. The gradient belongs to the new value."""

    def program(block: Blocks) -> Any:
        w = weight(2)
        with block():
            y = (w * 2)[None]
            y[0:2] = y
            (y.sum() * 3).backward(inputs=[y])
        return y, y.grad, w

    same(program)


def test_views_of_a_fresh_memory_share_their_history() -> None:
    """The base of two views is freed. A write to one view gives the other view a history."""

    def program(block: Blocks) -> Any:
        w = weight(1)
        with block():
            whole = torch.full((2,), 0.25, dtype=w.dtype)
            a, b = whole[::2], whole.view(2)
            del whole
        a.add_(w)
        differentiate(a, b)
        return a, b, w

    same(program)


# --- strides of results computed from outside tensors ---


def expanded(x: Tensor) -> Tensor:
    return x.t().expand(2, 4, 3)


def from_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().clone().numpy()).t()


@pytest.mark.parametrize("given", [expanded, from_numpy, lambda x: x.t(), lambda x: x[:, :1].t()])
@pytest.mark.parametrize("first", [True, False])
def test_strides_of_results_of_outside_tensors(
    given: Callable[[Tensor], Tensor], first: bool
) -> None:
    """The strides follow the tensor's strides, even if it is copied or the signature is cached."""

    def program(block: Blocks) -> Any:
        x, w, mask = rand(3, 4), weight(4, 3), rand(4, 3) > 0
        outside = given(x)
        if not first:  # the same op with contiguous operands
            plain = torch.rand(outside.shape, dtype=outside.dtype)
            with block():
                operations(plain, w[: plain.shape[-2]], mask[: plain.shape[-2]])
        with block():
            results = operations(outside, w[: outside.shape[-2]], mask[: outside.shape[-2]])
            pending = [strides(t) for t in results]
        return pending, results

    same(program)


def strides(t: Tensor) -> list[int]:
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def operations(x: Tensor, w: Tensor, mask: Tensor) -> list[Tensor]:
    return [
        x + w, w * x, torch.where(mask, x, w), torch.where(x > 0, w, x), torch.atan2(x, w * 1),
        torch.lerp(w, x, 0.5), (w * x).tanh(), torch.maximum(x, w), x + w.t().contiguous().t(),
    ]  # fmt: skip
