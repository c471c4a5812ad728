"""Row "Contexts": grad modes, autocast, default dtype, flushes in another context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import (
    Blocks,
    assert_deferred,
    differentiate,
    inputs,
    rand,
    same,
    weight,
)
from helpers_contexts import Context, autocast, default_dtype
from torch import Tensor

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
    """The mode is around the block, inside it, or around every other instance."""

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


def test_pending_inference_tensors_are_not_saved_for_backward() -> None:
    """Eager raises an error, whether or not the op that made the tensor has run."""

    def program(block: Blocks) -> Any:
        w, x, errors = weight(), rand(4, 4), []
        with block():
            for op in (torch.mm, torch.mul, F.linear, torch.bmm):
                with torch.inference_mode():
                    made = torch.cdist(x @ x, x) if op is torch.mul else x @ x
                if op is torch.bmm:
                    made, w = made[None], w[None]
                with pytest.raises(
                    RuntimeError, match="Inference tensors cannot be saved"
                ) as error:
                    op(made, w)
                errors.append(str(error.value)[:60])
        return errors

    same(program)


@pytest.mark.parametrize("decorated", ["no_grad", "enable_grad", "inference_mode"])
def test_context_grad_mode_as_decorator(decorated: str) -> None:
    """Calls a function that is decorated with a mode, in the block, sometimes under no_grad."""

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
    """The dtypes of results and gradients under autocast match eager mode."""

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
    """Tests other dtypes, regions without autocast, and autocast's cache of weights."""

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
    """Tests dtypes of results of Python numbers, also if the default changes in the block."""

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
    """An op runs in the context of its call, and not in the context of the flush."""

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
