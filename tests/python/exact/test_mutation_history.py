"""Gradients of tensors that were written to, and of the values that they held before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import Blocks, same, weight
from torch import Tensor

# Each function returns the written tensor. Eager's gradient of an overwritten value is zero, and
# not None.
OVERWRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a result, by another": lambda w, v: (w * 2).copy_(v),
    "a result, by a number": lambda w, v: (w * 2).fill_(0.5),
    "a result, by zero": lambda w, v: (w * 2).zero_(),
    "a copy, by another": lambda w, v: torch.zeros(3).double().copy_(w).copy_(v),
    "a copy, by a number": lambda w, v: torch.empty_like(v).copy_(w).fill_(0.5),
    "a copy, by what was made of it": lambda w, v: torch.zeros(3).double().copy_(w).mul_(v),
    "zeroed, then accumulated": lambda w, v: (w * 2).zero_().add_(v),
}


def pieces(*values: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """Writes one piece after the other to the same place."""

    def function(w: Tensor, v: Tensor) -> Tensor:
        x = torch.zeros(2, 3).double()
        for value in values:
            x[0] = value(x, w, v)
        return x

    return function


OVERWRITTEN |= {
    "a piece, by a number": pieces(lambda x, w, v: w * 2, lambda x, w, v: 0.5),
    "a piece, by another": pieces(lambda x, w, v: w * 2, lambda x, w, v: v * 2),
    "a piece, by what was made of it": pieces(
        lambda x, w, v: w * 2, lambda x, w, v: x[0] + v, lambda x, w, v: x[0].tanh()
    ),
    "a piece, by what was made of a constant of it": pieces(
        lambda x, w, v: w * 2, lambda x, w, v: x[0].detach() + v
    ),
}


@pytest.mark.parametrize("how", OVERWRITTEN)
def test_gradient_of_what_was_overwritten(how: str) -> None:
    """The gradient is zero if it is zero in eager. The written tensor has a history as in eager."""

    def program(block: Blocks) -> Any:
        ws, vs = [weight(3) for _ in range(3)], [weight(3) for _ in range(3)]
        with block():
            results = [OVERWRITTEN[how](w, v) for w, v in zip(ws, vs, strict=True)]
            total = sum(x.sum() for x in results)
        total.backward()
        return results, ws, vs

    same(program)


def whole(w: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = w * 2
    x.copy_(v)
    return x.sum(), [x]


def view_of_written(w: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = w * 2
    y, z = x[:2], x[1:]
    x.mul_(v)
    return (y * 3).sum() + z.sum(), [x, y, z]


def view_of_written_view(w: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = torch.zeros(2, 3).double()
    y = x[0]
    x[0] = v * w
    return y[:2].sum(), [x, y]


def view_written_twice(w: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = w * 2
    y = x[:2]
    x.mul_(v)
    first = y.sum()
    x.add_(1)
    return first + (y * y).sum(), [x, y]


def same_view_twice(w: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = w * 2
    views = [x[:2], x[:2], x[:]]
    x.add_(v)
    return sum((i * y.sum() for i, y in enumerate(views, 1)), x.sum()), [x, *views]


WRITTEN = [whole, view_of_written, view_of_written_view, view_written_twice, same_view_twice]


@pytest.mark.parametrize("function", WRITTEN)
def test_gradient_with_respect_to_what_was_written_to(function: Any) -> None:
    """A value read after the last write depends on the tensor, and on the view of the read."""

    def program(block: Blocks) -> Any:
        w, v = weight(3), weight(3)
        with block():
            loss, held = function(w, v)
        grads = torch.autograd.grad(loss, [*held, w, v], allow_unused=True)
        return [
            None if g is None else g.clone(memory_format=torch.contiguous_format) for g in grads
        ]

    same(program)


def test_attention_does_not_read_what_was_written_to() -> None:
    """Eager keeps scaled copies of query and key. A block raises an error instead."""
    w = weight(2, 2, 2)
    x = w + 1
    with ab.batch():
        y = F.scaled_dot_product_attention(x, x, w)
    x[-1].mul_(0.7)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def leak(block: Blocks) -> list[Any]:
    """Writes to an older tensor a value from a block that read a result of this tensor."""
    w = weight(3)
    with block():
        x = torch.tanh(w)
    y = w * x
    with block():
        other = torch.add(y, w, alpha=0.1)
        z = x.reshape(-1).clone()
    x += z
    return [weakref.ref(t) for t in (w, x, y, other, z)]


@pytest.mark.parametrize("enabled", [False, True])
def test_what_one_value_depends_on_is_not_kept_by_another(enabled: bool) -> None:
    refs = leak(Blocks(enabled))
    gc.collect()
    assert [r() is None for r in refs] == [True] * len(refs)


DETACHED: dict[str, Callable[[Tensor], Tensor]] = {
    "an outside tensor": lambda x: x.detach(),
    "a view of one": lambda x: x[:].detach(),
    "a result": lambda x: (x * 2).detach(),
    "a detached one": lambda x: x.detach().detach(),
}


@pytest.mark.parametrize("how", DETACHED)
@pytest.mark.parametrize("place", [slice(1, None), slice(3, None), slice(None)])
def test_write_to_a_part_of_what_was_detached(how: str, place: slice) -> None:
    """A write to a view of the detached tensor gives it the history of the written value."""

    def program(block: Blocks) -> Any:
        x, y = weight(3, 4), weight(3, 4)
        with block():
            copied, multiplied = [DETACHED[how](x.clone() if how != "a result" else x)] * 2
            copied[place] = y[place]
            multiplied[place].mul_(y[place])
            loss = (copied * 2).sum() + multiplied.sum()
        loss.backward()
        return copied, multiplied, x, y

    same(program)


PIECES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "the whole": lambda x, h: (x[0].sum(), x, h),
    "the same piece": lambda x, h: ((y := x[0]).sum(), y, h),
}


@pytest.mark.parametrize("of", PIECES)
@pytest.mark.xfail(
    reason="autograd.grad says that the written tensor was not used: the gradient of"
    " a piece that was read as it was written goes past it",
    raises=RuntimeError,
    strict=True,
)
def test_gradient_with_respect_to_what_a_piece_was_written_to(of: str) -> None:
    def program(block: Blocks) -> Any:
        w = weight(3)
        with block():
            x = torch.zeros(2, 3).double()
            h = w * 2
            x[0] = h
            loss, held, _ = PIECES[of](x, h)
        return torch.autograd.grad(loss, [held, w])

    same(program)


def test_what_has_no_gradient_asks_for_none() -> None:
    """The view is no longer valid for autograd, but its argmin can be computed."""

    def program(block: Blocks) -> Any:
        w = weight(1, 4)
        with block():
            x = w * 1
            with torch.inference_mode():
                y = x.narrow(0, 0, 1)
                x[1:] *= 2
            return y.argmin(-1)

    same(program)


# Each function returns a value that depends on a view, and the view. In eager, a write rebases the
# existing views onto the written base. Views made after the write belong to the tensor that they
# are made from.
WITH_RESPECT_TO_A_VIEW: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {}


def of_a_view(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
    WITH_RESPECT_TO_A_VIEW[function.__name__.replace("_", " ")] = function


@of_a_view
def base_written_then_used(h: Tensor) -> tuple[Tensor, Tensor]:
    v = h[:, 1:3]
    u = v.expand(2, *v.shape)
    h.mul_(2)
    return u.sum(), v


@of_a_view
def view_of_it_written(h: Tensor) -> tuple[Tensor, Tensor]:
    v = h[:1, 1:3]
    u = v.view(-1)
    u.mul_(2)
    return u.sum() + v.sum(), v


@of_a_view
def itself_written(h: Tensor) -> tuple[Tensor, Tensor]:
    v = h[:1, 1:3]
    u = v.view(-1)
    v.mul_(2)
    return u.sum(), v


@of_a_view
def used_after_a_write(h: Tensor) -> tuple[Tensor, Tensor]:
    v = h[:1, 1:3]
    h.mul_(2)
    return v.view(-1).sum(), v


@of_a_view
def used_between_writes(h: Tensor) -> tuple[Tensor, Tensor]:
    v = h[:1, 1:3]
    h.mul_(2)
    u = v.view(-1)
    h.mul_(2)
    return u.sum(), v


@of_a_view
def part_of_a_view_of_it_written(h: Tensor) -> tuple[Tensor, Tensor]:
    v = h.reshape(-1)[::2]
    u = v.view(-1)
    u[0] = 1.5
    return u.sum() + v.sum(), v


@pytest.mark.parametrize("how", WITH_RESPECT_TO_A_VIEW)
def test_gradient_with_respect_to_a_view_of_what_was_written(how: str) -> None:
    def program(block: Blocks) -> Any:
        w, results, views = weight(4, 4), [], []
        with block():
            for n in (1, 2, 1):
                h = torch.ones(n, 4, dtype=torch.float64) @ w
                loss, view = WITH_RESPECT_TO_A_VIEW[how](h)
                results.append(loss)
                views.append(view)
        grads = torch.autograd.grad(sum(results), [w, *views], allow_unused=True)
        return [
            None if g is None else g.clone(memory_format=torch.contiguous_format) for g in grads
        ]

    same(program)


@pytest.mark.parametrize("op", ["sum", "where"])
def test_write_to_what_eager_does_not_save(op: str) -> None:
    """Ops that functorch's rules run are computed again in backward."""

    def program(block: Blocks) -> Any:
        w, losses, held = weight(4, 4), [], []
        with block():
            for i in range(3):
                h = torch.full((2, 4), i + 1.0, dtype=torch.float64) @ w
                v = h.expand(2, 2, 4)
                s = v.sum(0) if op == "sum" else torch.where(v > 1, v, h[0])
                if i == 0:
                    with torch.no_grad():
                        h.mul_(0.9)
                    losses.append(sum(t.clamp(-3, 3).sum() for t in (h, v)))
                losses.append(s.clamp(-3, 3).sum())
                held += [h, v, s]
        torch.autograd.backward(losses)
        return [w.grad, *held]

    same(program)


# --- writes in torch.no_grad(): the values change, and the history stays ---

UNRECORDED: dict[str, Callable[[Tensor], Any]] = {
    "clamp": lambda x: x.clamp_(min=0.5),
    "multiply": lambda x: x.mul_(3),
    "zero": lambda x: x.zero_(),
    "fill": lambda x: x.fill_(0.25),
    "copy": lambda x: x.copy_(torch.arange(3.0)),
    "copy of a gradient's source": lambda x: x.copy_(x * 2),
    "mask": lambda x: x.masked_fill_(x > 1, 0.5),
    "twice": lambda x: x.mul_(3).clamp_(max=2),
    "a part": lambda x: x[:2].zero_(),
    "through a view": lambda x: x.view(3, 1).mul_(2),
}
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda w: w.clone(),
    "product": lambda w: w * 2,
    "saved by eager": lambda w: w.exp(),  # backward is an error
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("name", UNRECORDED)
def test_a_write_without_grad_mode_keeps_the_history(name: str, made: str) -> None:
    def program(block: Blocks) -> Any:
        w, v, losses, held = weight(3), weight(3), [], []
        with block():
            for i in range(3):
                x = MADE[made](w * (i + 1))
                before, view = x + 1, x[1:]
                with torch.no_grad():
                    UNRECORDED[name](x)
                after = x * 5
                x.add_(v)
                losses.append((before.sum() + view.sum() * 2 + after.sum() + x.sum()) * (i + 1))
                held += [before, view, after, x]
        torch.stack(losses).sum().backward()
        return [w.grad, v.grad, *held]

    same(program, raises=RuntimeError if made == "saved by eager" else None)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_within_and_twice_through_an_unrecorded_write(create_graph: bool) -> None:
    def program(block: Blocks) -> Any:
        w, found = weight(3), []
        with block():
            for i in range(3):
                x = w * (i + 1)
                with torch.no_grad():
                    x.clamp_(max=0.5)
                (grad,) = torch.autograd.grad((x * x).sum(), w, create_graph=create_graph)
                found.append(grad)
        if create_graph:
            found += torch.autograd.grad(torch.stack(found).square().sum(), w)
        return found

    same(program)


def test_an_unrecorded_write_causes_no_flush() -> None:
    w, x = weight(3, 3), torch.rand(4, 3, dtype=torch.float64)
    with ab.batch(adaptive=False) as scope:
        losses = [F.gaussian_nll_loss(x @ w, x, (x @ w).exp()) for _ in range(4)]
    torch.stack(losses).sum().backward()
    assert len(scope.report().flushes) == 1
