"""Row "Contexts", first part: modes of autograd and of the dispatcher, around ops and flushes."""

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
    assert_deferred,
    differentiate,
    inputs,
    rand,
    same,
    weight,
)
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

Context = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    """Numbers become tensors of this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def autocast() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


# --- grad modes ---

GRAD_MODES: dict[str, Context] = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "inference_mode_off": lambda: torch.inference_mode(False),
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "set_multithreading_enabled": lambda: torch.autograd.set_multithreading_enabled(False),
}


@pytest.mark.parametrize("place", ["around", "inside", "each"])
@pytest.mark.parametrize("mode", GRAD_MODES)
def test_context_grad_mode(mode: str, place: str) -> None:
    """A mode around the block, in it, or around every other instance."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs([2] * 6), []
        context = GRAD_MODES[mode]
        idle = contextlib.nullcontext
        outer, inner = (context if place == "around" else idle), context
        if place != "inside":
            inner = idle
        with outer(), block(), inner():
            for i, x in enumerate(xs):
                with context() if place == "each" and i % 2 else idle():
                    h = F.linear(x, w).tanh()
                    results += [h, h[0] * 2, h.detach() + 1]
        with contextlib.suppress(RuntimeError):  # inference tensors have no backward
            differentiate(results)
        return results, w

    assert_deferred(same(program), batches=8 if place == "each" else 4)


@pytest.mark.parametrize("decorated", ["no_grad", "enable_grad", "inference_mode"])
def test_context_grad_mode_as_decorator(decorated: str) -> None:
    """A function decorated with a mode, called in the block, some calls within no_grad."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()

        @GRAD_MODES[decorated]()
        def layer(x: Tensor) -> Tensor:
            return F.linear(x, w).tanh()

        with block():
            results = [layer(x) for x in xs]
            with torch.no_grad():
                results += [layer(x) for x in xs]
            plain = [F.linear(x, w) for x in xs]
        differentiate(plain)
        return results, plain, w

    same(program)


def test_context_requires_grad_toggled() -> None:
    """A discriminator frozen for the generator's loss, then trained again, all in one block."""

    def program(block: Blocks) -> Any:
        judge, maker, xs = weight(1, 3), weight(), inputs()
        losses = []
        with block():
            for x in xs:
                losses.append(F.linear(F.linear(x, maker).detach(), judge).sum())
                judge.requires_grad_(False)
                losses.append(10 * F.linear(F.linear(x, maker), judge).sum())
                judge.requires_grad_(True)
        differentiate(losses)
        return losses, judge, maker

    same(program)


# --- autocast ---

CAST_OPS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "linear": lambda h, w: F.linear(h, w),
    "matmul": lambda h, w: h @ w,
    "mm": lambda h, w: torch.mm(h, w),
    "addmm": lambda h, w: torch.addmm(h, h, w),
    "bmm": lambda h, w: torch.bmm(h[None], w[None]),
    "einsum": lambda h, w: torch.einsum("ij,jk->ik", h, w),
    "conv1d": lambda h, w: F.conv1d(h.t()[None], w[:, :, None]),
    "softmax": lambda h, w: F.linear(h, w).softmax(-1),
    "log_softmax": lambda h, w: F.log_softmax(F.linear(h, w), -1),
    "layer_norm": lambda h, w: F.layer_norm(F.linear(h, w), (3,)),
    "group_norm": lambda h, w: F.group_norm(h[:, :, None], 1, w[0], w[1]),
    "sum": lambda h, w: F.linear(h, w).sum(),
    "mean": lambda h, w: F.linear(h, w).mean(0),
    "exp": lambda h, w: F.linear(h, w).exp(),
    "pow": lambda h, w: F.linear(h, w) ** 2,
    "norm": lambda h, w: F.linear(h, w).norm(),
    "cumsum": lambda h, w: F.linear(h, w).cumsum(0),
    "prod": lambda h, w: F.linear(h, w).prod(0),
    "mse_loss": lambda h, w: F.mse_loss(F.linear(h, w), torch.ones_like(h)),
    "cross_entropy": lambda h, w: F.cross_entropy(h @ w, torch.zeros(len(h), dtype=torch.long)),
    "bce": lambda h, w: F.binary_cross_entropy_with_logits(h @ w, torch.ones_like(h)),
    "add_mixed": lambda h, w: F.linear(h, w) + h,
    "cat_mixed": lambda h, w: torch.cat([F.linear(h, w), h]),
    "stack_mixed": lambda h, w: torch.stack([F.linear(h, w), h]),
    "tanh": lambda h, w: F.linear(h, w).tanh(),
    "relu": lambda h, w: F.linear(h, w).relu(),
    "double": lambda h, w: F.linear(h.double(), w.double()),
    "lstm_cell": lambda h, w: torch.lstm_cell(
        h, (h, h), w.repeat(4, 1), w.repeat(4, 1), w.flatten()[:1].expand(12), w[0].repeat(4)
    ),
    "gru_cell": lambda h, w: torch.gru_cell(h, h, w.repeat(3, 1), w.repeat(3, 1)),
    "attention": lambda h, w: F.scaled_dot_product_attention(h[None], h[None] @ w, h[None]),
    "baddbmm": lambda h, w: torch.baddbmm(h[None], h[None], w[None]),
    "prelu": lambda h, w: F.prelu(F.linear(h, w), w[0, :1]),
    "embedding": lambda h, w: F.embedding(torch.tensor([0, 2]), w) + F.linear(h[:1], w),
    "multi_head": lambda h, w: F.multi_head_attention_forward(
        h[:, None], h[:, None], h[:, None], 3, 1, w.repeat(3, 1), w.flatten(), None, None, False,
        0.0, w, w[0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAST_OPS)
def test_context_autocast(name: str) -> None:
    """Each op's dtypes under autocast are eager's, and so are the gradients'."""

    def program(block: Blocks) -> Any:
        w = weight(dtype=torch.float32)
        xs, results = [rand(2, 3, dtype=torch.float32) for _ in range(4)], []
        with block(), autocast():
            results += [CAST_OPS[name](x + w[0], w) for x in xs]
        loss = sum(t.float().sum() for r in results for t in (r if isinstance(r, tuple) else (r,))
                   if t is not None)  # fmt: skip
        loss.backward()
        return results, w

    assert_deferred(same(program, tolerance=3e-2))


@pytest.mark.parametrize("kind", ["float16", "disabled_inside", "around", "cache"])
def test_context_autocast_modes(kind: str) -> None:
    """Other types, regions without it, and its cache of cast weights."""

    def program(block: Blocks) -> Any:
        w = weight(dtype=torch.float32)
        xs, results = [rand(2, 3, dtype=torch.float32) for _ in range(4)], []
        outer: Any = contextlib.nullcontext()
        inner: Any = autocast()
        if kind == "around":
            outer, inner = inner, outer
        if kind == "float16":
            inner = torch.autocast("cpu", torch.float16)
        if kind == "cache":
            inner = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
        with outer, block(), inner:
            for x in xs:
                h = F.linear(x, w)
                with torch.autocast("cpu", enabled=kind != "disabled_inside"):
                    results += [h, F.linear(h.float(), w), F.linear(h.float(), w).sum()]
        differentiate([r.float() for r in results])
        return results, w

    same(program, tolerance=3e-2)


# --- set_default_dtype ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_context_set_default_dtype(dtype: torch.dtype) -> None:
    """What numbers and integers become; changed between instances as well."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []
        with block():
            for i, x in enumerate(xs):
                with default_dtype(dtype if i % 2 else torch.float32):
                    h = F.linear(x, w)
                    n = h.argmax()
                    results += [n / 2, n * 1.5, n.sqrt(), h + 1, torch.ones(2) * h[0, 0].float()]
                    results += [(h > 0) * 0.5, n.float() * 2, torch.true_divide(n, 3), n.exp()]
        return results

    same(program)


# --- saved tensor hooks ---


def ordered(values: list[Tensor]) -> list[Tensor]:
    """In an order that does not depend on when they were saved."""
    return sorted((v.detach().clone() for v in values), key=lambda v: (v.shape, v.sum().item()))


@pytest.mark.parametrize("op", ["linear", "tanh", "mul", "softmax", "cross_entropy", "exp"])
def test_context_saved_tensor_hooks(op: str) -> None:
    """pack and unpack are called with the values that eager saves; what unpack gives is used."""

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
    """PyTorch's own user of them."""

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
    """Saved tensors that are written before backward keep the values that they had."""

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
    """NaN in backward is an error that says so, where eager has one; else nothing changes."""

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
    """The warning shows the traceback of the forward call that made the NaN."""

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
    """The function runs again in backward, as often as in eager, and dropout draws the same."""

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
    """Early stopping and a sequence of checkpoints, with per-instance backward."""
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
    """`backward(create_graph=True)` of the sum; then of what `.grad` holds."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            losses = [energy(x, w) for x in xs]
        with pytest.warns(UserWarning, match="create_graph"):
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
    """torch.autograd.functional's, which sets create_graph itself."""

    def program(block: Blocks) -> Any:
        w = weight()

        def function(x: Tensor) -> Tensor:
            with block():
                return sum(energy(row, w) for row in x)

        return torch.autograd.functional.hessian(function, rand(2, 3))

    same(program)


# --- a flush under another context than the capture ---

OTHERS: dict[str, Context] = {
    **GRAD_MODES,
    "autocast": autocast,
    "default_dtype": lambda: default_dtype(torch.bfloat16),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda: torch.backends.mkldnn.flags(enabled=False),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "device": lambda: torch.device("meta"),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("at", ["capture", "flush"])
@pytest.mark.parametrize("other", OTHERS)
def test_context_of_the_flush_is_another(other: str, at: str) -> None:
    """The context counts that an op was written in, not the one in which it is computed."""

    def program(block: Blocks) -> Any:
        w, xs = weight(dtype=torch.float32), [rand(2, 3, dtype=torch.float32) for _ in range(4)]
        idle = contextlib.nullcontext
        with block() as scope:
            with (OTHERS[other] if at == "capture" else idle)():
                results = [F.linear(x, w).tanh() * 2 for x in xs]
            with (OTHERS[other] if at == "flush" else idle)():
                scope.flush()
        with contextlib.suppress(RuntimeError):  # inference tensors have no backward
            differentiate([r.float() for r in results])
        return results, w

    same(program, tolerance=3e-2 if other == "autocast" else 0.0)


# --- forward mode ---


@pytest.mark.parametrize("which", ["input", "weight", "both"])
def test_context_forward_mode(which: str) -> None:
    """Tangents of a dual level go through captured ops."""

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
    """A dual made of a value that was computed in the block."""

    def program(block: Blocks) -> Any:
        w, xs, tangents = weight(), inputs(), []
        with forward_ad.dual_level(), block():
            for x in xs:
                h = forward_ad.make_dual(F.linear(x, w), torch.ones(len(x), 3, dtype=DOUBLE))
                tangents.append(forward_ad.unpack_dual(h.tanh().sum()).tangent)
        return tangents

    same(program)
