"""Row "Contexts": saved tensor hooks, anomaly mode, checkpoint, create_graph, forward mode."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import (
    DOUBLE,
    Blocks,
    differentiate,
    inputs,
    rand,
    same,
    weight,
)
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

# --- saved tensor hooks ---


def ordered(values: list[Tensor]) -> list[Tensor]:
    """Sorts tensors in an order that does not depend on when they were saved."""
    return sorted((v.detach().clone() for v in values), key=lambda v: (v.shape, v.sum().item()))


@pytest.mark.parametrize("op", ["linear", "tanh", "mul", "softmax", "cross_entropy", "exp"])
def test_context_saved_tensor_hooks(op: str) -> None:
    """pack and unpack get the values that eager saves, and backward uses the result of unpack."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        packed: list[Tensor] = []
        unpacked: list[Tensor] = []
        ops: dict[str, Callable[[Tensor], Tensor]] = {
            "linear": lambda h: F.linear(h, w),
            "tanh": torch.tanh,
            "mul": lambda h: h * w[0],
            "softmax": lambda h: h.softmax(-1),
            "cross_entropy": lambda h: F.cross_entropy(h, torch.zeros(len(h), dtype=torch.long)),
            "exp": torch.exp,
        }

        def pack(t: Tensor) -> Tensor:
            packed.append(t)
            return t

        def unpack(t: Tensor) -> Tensor:
            unpacked.append(t)
            return t * 2 if t.is_floating_point() else t

        with block():
            hidden = [F.linear(x, w) for x in xs]
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                results = [ops[op](h) for h in hidden]
        differentiate(results)
        return results, w, ordered(packed), ordered(unpacked)

    same(program)


def test_context_saved_tensor_hooks_save_on_cpu() -> None:
    """Tests save_on_cpu, which uses the hooks."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with torch.autograd.graph.save_on_cpu(), block():
            results = [F.linear(x, w).tanh() for x in xs]
        differentiate(results)
        return results, w

    same(program)


def test_context_saved_tensor_hooks_disabled() -> None:
    """disable_saved_tensors_hooks raises eager's error at the same place."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"), block():
            results = [F.linear(x, w).tanh() for x in xs]
            with pytest.raises(RuntimeError, match="no hooks here"):
                torch.autograd.graph.save_on_cpu().__enter__()
        return results

    same(program)


def test_context_saved_tensor_hooks_allow_mutation() -> None:
    """Saved tensors that are written to before backward keep their former values."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            with block():
                results = [F.linear(x, w).tanh() for x in xs]
            for r in results:
                r.detach().mul_(2)
            differentiate(results)
        return results, w

    same(program)


# --- anomaly mode ---


@pytest.mark.parametrize("when", ["all", "forward", "backward"])
def test_context_anomaly_mode(when: str) -> None:
    """A NaN in backward raises an error if eager raises one. Otherwise nothing changes."""

    def program(block: Blocks) -> Any:
        w, xs, caught = weight(), inputs(), []
        on, off = torch.autograd.detect_anomaly, contextlib.nullcontext
        with (on if when != "backward" else off)(), block():
            good = [F.linear(x, w).tanh().sum() for x in xs]
            bad = [(F.linear(x, w) * 0).sqrt().sum() * 0 for x in xs]
        with (on if when != "forward" else off)():
            for loss in good:
                loss.backward()
            for loss in bad:
                try:
                    loss.backward()
                    caught.append("fine")
                except RuntimeError as error:
                    caught.append("returned nan values" in str(error))
        return caught, good, w if when != "forward" else None

    with pytest.warns(UserWarning, match="Anomaly Detection"):
        same(program)


def test_context_anomaly_mode_names_the_forward_line() -> None:
    """The warning contains the traceback of the forward call that produced the NaN."""

    def program(block: Blocks) -> Any:
        w = weight()
        with warnings.catch_warnings(record=True) as caught, torch.autograd.detect_anomaly():
            warnings.simplefilter("always")
            with block():
                losses = [(F.linear(x, w) * 0).sqrt().sum() * 0 for x in inputs()]  # culprit
            with pytest.raises(RuntimeError, match="nan"):
                losses[1].backward()
        return any("# culprit" in str(warning.message) for warning in caught)

    same(program)


# --- checkpoint ---


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", ["in_the_block", "around_the_block", "block_in_it"])
def test_context_checkpoint(place: str, reentrant: bool) -> None:
    """Backward runs the function again as often as eager, and dropout draws the same numbers."""

    def program(block: Blocks) -> Any:
        w, u, xs, calls = weight(), weight(), inputs(), []

        def part(h: Tensor) -> Tensor:
            calls.append(tuple(h.shape))
            if place == "block_in_it":
                with block():
                    return F.linear(F.linear(h, w).tanh(), u)
            return F.linear(F.linear(h, w).tanh(), u)

        def whole(x: Tensor) -> Tensor:
            return checkpoint(part, x * w[0], use_reentrant=reentrant)

        if place == "block_in_it":
            results = [whole(x) for x in xs]
        else:
            with block():
                results = [whole(x) for x in xs]
        sum((r * r).sum() for r in results).backward()
        return results, w, u, calls[: len(xs)], sorted(calls)

    same(program)


def test_context_checkpoint_frees_what_it_recomputes() -> None:
    """Tests early stopping and a sequence of checkpoints, with a backward for each instance."""
    from torch.utils.checkpoint import checkpoint_sequential

    def program(block: Blocks) -> Any:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)])
        model.double()
        xs = [x.requires_grad_() for x in inputs()]
        with block():
            results = [checkpoint_sequential(model, 2, x, use_reentrant=False) for x in xs]
        for r in results:
            r.sum().backward()
        return results, list(model.parameters()), xs

    same(program)


# --- create_graph ---


def energy(x: Tensor, w: Tensor) -> Tensor:
    return (F.linear(x, w).tanh().exp() * x).sum()


@pytest.mark.parametrize("inside", [False, True])
def test_context_create_graph(inside: bool) -> None:
    """A gradient penalty: the norm of the inputs' gradient, differentiated again."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), [x.requires_grad_() for x in inputs()]

        def penalty(x: Tensor, loss: Tensor) -> Tensor:
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            return g.square().sum()

        with block():
            losses = [energy(x, w) for x in xs]
            if inside:
                penalties = [penalty(x, loss) for x, loss in zip(xs, losses, strict=True)]
        if not inside:
            penalties = [penalty(x, loss) for x, loss in zip(xs, losses, strict=True)]
        (sum(losses) + sum(penalties)).backward()
        return losses, penalties, w, xs

    same(program)


def test_context_create_graph_of_a_batched_backward() -> None:
    """Runs `backward(create_graph=True)` of the sum, and then backward of `.grad`."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            losses = [energy(x, w) for x in xs]
        with warnings.catch_warnings():  # about the reference cycle through .grad, once per process
            warnings.simplefilter("ignore")
            sum(losses).backward(create_graph=True)
        first = w.grad
        assert first is not None
        w.grad = None
        first.square().sum().backward()
        return first, w.grad

    same(program)


def test_context_gradgradcheck() -> None:
    """PyTorch's own check of first and second derivatives, through a block."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        with ab.batch():
            parts = [F.linear(row, w).tanh() * row for row in x]
            parts.append(torch.cat(parts[:2]).softmax(0)[:3])
        return torch.stack(parts)

    arguments = (rand(3, 3).requires_grad_(), weight())
    assert torch.autograd.gradcheck(function, arguments)
    assert torch.autograd.gradgradcheck(function, arguments)


def test_context_hessian() -> None:
    """Tests torch.autograd.functional.hessian, which sets create_graph itself."""

    def program(block: Blocks) -> Any:
        w = weight()

        def function(x: Tensor) -> Tensor:
            with block():
                return sum(energy(row, w) for row in x)

        return torch.autograd.functional.hessian(function, rand(2, 3))

    same(program)


# --- forward mode ---


@pytest.mark.parametrize("which", ["input", "weight", "both"])
def test_context_forward_mode(which: str) -> None:
    """Tangents of forward-mode AD pass through captured ops."""

    def program(block: Blocks) -> Any:
        w, xs, tangents = weight(), inputs(), []
        with forward_ad.dual_level(), block():
            for x in xs:
                a = forward_ad.make_dual(x, torch.ones_like(x)) if which != "weight" else x
                b = forward_ad.make_dual(w * 1, torch.ones_like(w)) if which != "input" else w
                h = F.linear(a, b).tanh() * a
                primal, tangent = forward_ad.unpack_dual(h.sum())
                tangents += [primal.detach(), tangent]
        return tangents

    same(program)


def test_context_forward_mode_of_a_pending_tensor() -> None:
    """Makes a dual tensor from a value that was computed in the block."""

    def program(block: Blocks) -> Any:
        w, xs, tangents = weight(), inputs(), []
        with forward_ad.dual_level(), block():
            for x in xs:
                h = forward_ad.make_dual(F.linear(x, w), torch.ones(len(x), 3, dtype=DOUBLE))
                tangents.append(forward_ad.unpack_dual(h.tanh().sum()).tangent)
        return tangents

    same(program)
