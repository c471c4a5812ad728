"""Row "Reads": a read of a value without gradient leaves held values pending. Later operations on
them give eager's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import Blocks, differentiate, inputs, is_pending, same, weight
from torch import Tensor, nn


def sum_of(x: Tensor) -> int:
    """Reads a value without gradient."""
    return int(x.argmax())


@pytest.mark.parametrize("read", [sum_of, lambda x: (x > 0).tolist(), lambda x: x.sum().item()])
def test_what_is_held_stays_pending(read: Callable[[Tensor], Any]) -> None:
    """A read computes a real tensor. A read of a number makes no tensor real."""
    w = weight()
    with ab.batch():
        held = [F.linear(x, w).tanh() for x in inputs()]
        for h in held:
            read(h)
        assert all(is_pending(h) for h in held)
        loss = torch.stack([(h * h).sum() for h in held]).sum()
        del held, h
    loss.backward()
    assert w.grad is not None
    names, node = [], loss.grad_fn
    while node is not None:  # one record: nodes of the loss, of outputs and of the weight
        names.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    assert len(names) <= 4, names


def after_read(case: Callable[[Tensor, Tensor], Any]) -> Callable[[Blocks], Any]:
    """Returns a program that applies ``case`` to a held value, computed but still pending."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []
        with block():
            held = [F.linear(x, w) * 2 for x in xs]
            later = [h + 2 for h in held]  # captured before the read, and computed after it
            for h in held:
                sum_of(h)
            for h, g in zip(held, later, strict=True):
                results.append((case(h, g), g, h * 3))
        differentiate(results)
        return results, held, w

    return program


CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "op": lambda h, g: h.sin() + g,
    "tolist": lambda h, g: h.tolist(),
    "item": lambda h, g: (h.sum().item(), h[0, 0].item()),
    "grad_fn": lambda h, g: h.grad_fn is None,
    "retain_grad": lambda h, g: h.retain_grad(),
    "detach": lambda h, g: h.detach(),
    "detach, read": lambda h, g: h.detach().tolist(),
    "view": lambda h, g: h[:1].t(),
    "view, read": lambda h, g: (h[:1], h[:1].tolist()),
    "split": lambda h, g: (h.split(1, dim=1), sum_of(h.split(1, dim=1)[0])),
    "clone": lambda h, g: h.clone(),
    "read twice": lambda h, g: (sum_of(h), sum_of(h * 2)),
    "grad": lambda h, g: torch.autograd.grad((h * g).sum(), h, retain_graph=True),
    "second order": lambda h, g: torch.autograd.grad((h * h).sum(), h, create_graph=True),
    "in place": lambda h, g: h[0].mul_(2) + 1,
    "in place, read": lambda h, g: (h[0].add_(2), sum_of(h), h + 1),
    "data": lambda h, g: (h.data.mul_(1), h.data),
}


@pytest.mark.parametrize("name", CASES)
def test_after_a_read(name: str) -> None:
    same(after_read(CASES[name]))


def test_hooks_set_after_a_read() -> None:
    """The hooks get the whole gradient, also for ops captured before the hooks were set."""

    def program(block: Blocks) -> Any:
        w, seen = weight(), []
        with block():
            held = [F.linear(x, w).tanh() for x in inputs()]
            later = [h.exp() * 2 for h in held]
            picked = [sum_of(g) for g in later]
            for h in held[:2]:
                h.register_hook(lambda grad: seen.append(grad) or grad * 2)
            losses = [(g * h).sum() for g, h in zip(later, held, strict=True)]
        torch.stack(losses).sum().backward()
        return picked, losses, w, sorted(seen, key=lambda t: float(t.sum()))

    same(program)


def test_in_place_after_it_was_saved() -> None:
    """The block raises eager's error for a value that was computed but is still pending."""

    def program(block: Blocks) -> Any:
        w = weight()
        with block():
            h = F.linear(inputs()[0], w)
            g = h.sigmoid()
            sum_of(g)
            g.add_(1)
            loss = g.sum()
        loss.backward()

    same(program, raises=RuntimeError)


@pytest.mark.parametrize("saved", [False, True])
def test_what_was_read_is_written_to(saved: bool) -> None:
    """After the read it is an ordinary tensor. Eager raises an error if an op has saved it."""

    def program(block: Blocks) -> Any:
        w, losses = weight(), []
        with block():
            for x in inputs():
                scores = F.linear(x, w)
                label = scores.argmax(-1)
                other = label.clone()
                losses.append(F.cross_entropy(scores, label if saved else other))
                label.tolist()
                label.add_(1)
        torch.stack(losses).sum().backward()
        return losses, w

    same(program, raises=RuntimeError if saved else None)


@pytest.mark.parametrize("saved", [False, True])
def test_an_outside_tensor_is_written_to(saved: bool) -> None:
    """The write occurs after the ops that read the tensor. Later ops read the new value."""

    def program(block: Blocks) -> Any:
        w, results = weight(), []
        with block():
            for x in inputs():
                h = x * w[:1] if saved else x + w[:1]
                picked = sum_of(h)
                x.add_(1)
                results.append((h, picked, F.linear(x, w)))
        differentiate(results)
        return results, w

    same(program, raises=RuntimeError if saved else None)


@pytest.mark.parametrize("how", ["a piece", "all of it", "a caught error in place of the read"])
def test_what_was_put_into_a_piece_is_written_to(how: str) -> None:
    """No node reads the source, and the tensor into which it was written is still pending."""

    def program(block: Blocks) -> Any:
        w, results = weight(), []
        scratch = torch.zeros(4, 3, dtype=torch.float64)
        with block():
            for x in inputs():
                h = F.linear(x, w)
                if how.startswith("a caught"):
                    with pytest.raises(RuntimeError):
                        h + torch.ones(7)
                else:
                    h.sum().item()
                y = torch.zeros(4, 3, dtype=torch.float64)
                for k in range(3):
                    scratch.fill_(k + 1.0)
                    if how == "all of it":
                        y.copy_(scratch)
                    else:
                        y[k] = scratch[0]
                scratch.zero_()
                results += [h, y]
        return results

    same(program)


def test_weights_are_updated() -> None:
    """Updates weights between reads, while no op is pending. Each op reads the current weights."""

    def program(block: Blocks) -> Any:
        w, results = weight(), []
        with block():
            for _ in range(3):
                hs = [F.linear(x, w).tanh() for x in inputs()]
                results.append([sum_of(h) for h in hs])
                with torch.no_grad():
                    w.add_(0.5)
                results.append([F.linear(x, w).detach() for x in inputs()])
        return results, w

    same(program)


def test_a_factory_is_made_once() -> None:
    """The factory's result is computed for another value, and is read later."""
    w = weight()
    with ab.batch():
        noise = torch.rand(3, 3, dtype=w.dtype)
        h = w * noise
        sum_of(h)
        again = noise * 1
    torch.testing.assert_close(h.detach() / w.detach(), noise)
    torch.testing.assert_close(again, noise)


def test_a_failure_among_what_is_read() -> None:
    """Eager's error is raised. Values that do not depend on the failed op are computed."""
    table = nn.Embedding(3, 3)
    with ab.batch():
        first = table(torch.tensor([1])).tanh()
        sum_of(first)
        good = first * 2
        bad = table(torch.tensor([7])).tanh()
        with pytest.raises(IndexError):
            sum_of(bad + good)
        assert sum_of(good) == sum_of(good)
    good.sum().backward()
    assert table.weight.grad is not None
    torch.testing.assert_close(first, table(torch.tensor([1])).tanh())


@pytest.mark.parametrize("deep", [3, 40])
def test_losses_over_many_reads(deep: int) -> None:
    """Runs a chain of steps. Each step reads the result of the previous step."""

    def program(block: Blocks) -> Any:
        cell, score = weight(), weight(2, 3)
        losses, path = [], []
        with block():
            for x in inputs((1, 1, 1)):
                h = x
                for _ in range(deep):
                    h = F.linear(h, cell).tanh()
                    scores = F.linear(h, score)
                    action = int(scores.argmax())
                    losses.append(F.cross_entropy(scores, torch.tensor([1 - action])))
                    path.append(action)
                    if action == 1:
                        h = h * 0.5
        differentiate(losses)
        return path, losses, cell, score

    same(program)


def test_memory_of_what_nobody_looks_at() -> None:
    """Runs a long chain of reads. Only the last value is held, and backward reads no value."""
    w = weight(64, 64)
    with ab.batch():
        h = w + 0
        start = torch.ones(())
        for _ in range(50):
            h = h + start
            h.sum().item()
        assert is_pending(h)
    torch.testing.assert_close(h, w + 50)
    h.sum().backward()
    torch.testing.assert_close(w.grad, torch.ones_like(w))
