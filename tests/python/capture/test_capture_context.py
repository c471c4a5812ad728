"""The context of an op: autocast, grad modes, dtypes, modules, subclasses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_capture import (
    DOUBLE,
    Batch,
    assert_as_eager,
    inputs,
    weight,
)
from torch import Tensor, nn

# --- the context of an op ---


def test_autocast_inside_and_around() -> None:
    def program(batch: Batch) -> Any:
        model, xs = nn.Linear(3, 3), [x.float() for x in inputs()]
        with torch.autocast("cpu", dtype=torch.bfloat16), batch():
            around = [model(x).tanh() for x in xs]
        with batch():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside = [model(x).tanh() for x in xs]
                inside += [F.softmax(model(x), -1) for x in xs]
                inside += [F.cross_entropy(model(x), torch.tensor(1)) for x in xs]
            outside = [model(x).tanh() for x in xs]
        return around, inside, outside

    assert_as_eager(program, tolerance=1e-2)


def test_grad_mode_belongs_to_the_op() -> None:
    def program(batch: Batch) -> Any:
        w, xs = weight(), inputs()
        with batch():
            with torch.no_grad():
                frozen = [w @ x for x in xs]
            trained = [w @ x for x in xs]
            with torch.no_grad():
                products = [f * t for f, t in zip(frozen, trained, strict=True)]
        flags = [t.requires_grad for t in frozen + trained + products]
        sum(t.sum() for t in trained).backward()
        return frozen, trained, products, flags, w.grad

    assert_as_eager(program)


@pytest.mark.parametrize("around", [True, False])
def test_inference_mode(around: bool) -> None:
    def program(batch: Batch) -> Any:
        w, xs = weight(), inputs()
        if around:
            with torch.inference_mode(), batch():
                results = [(w @ x).tanh() for x in xs]
        else:
            with batch(), torch.inference_mode():
                results = [(w @ x).tanh() for x in xs]
        flags = [r.is_inference() for r in results]
        with batch(), pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            (w * results[0]).sum().backward()
        return results, flags, [r.requires_grad for r in results]

    assert_as_eager(program)


def test_default_dtype() -> None:
    def program(batch: Batch) -> Any:
        w, xs, results = weight(), inputs(), []
        for dtype in (torch.float32, DOUBLE):
            torch.set_default_dtype(dtype)
            try:
                with batch():
                    for x in xs:
                        i = (w @ x).argmax()
                        results += [i / 2, i * 1.5, i.sqrt(), (w @ x) + 1, torch.ones(2) * w[0, 0]]
            finally:
                torch.set_default_dtype(torch.float32)
        return results, [r.dtype for r in results]

    assert_as_eager(program)


@pytest.mark.parametrize("no_grad", [True, False])
def test_a_frozen_model_batches_as_a_trained_one(no_grad: bool) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4))
    instances = [torch.tensor([i % 5]) for i in range(6)]

    def batches() -> int:
        with ab.batch() as scope, torch.set_grad_enabled(not no_grad):
            results = [model(x) for x in instances]
        torch.testing.assert_close(results[2], model(instances[2]))
        return scope.report().batches

    model.requires_grad_(False)
    frozen = batches()
    model.requires_grad_(True)
    assert frozen == batches() == 4


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: torch.einsum("bd,de->be", x, w),
        lambda x, w: torch.einsum("...d,de->...e", x, w),
        lambda x, w: torch.tensordot(x, w, 1),
        lambda x, w: torch.inner(x, w),
        lambda x, w: x @ w,
    ],
)
def test_products_of_ordinary_tensors(product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A model may begin with a product of ordinary tensors, one of which is a parameter."""
    w = nn.Parameter(torch.randn(4, 4))
    xs = [torch.randn(3, 4) for _ in range(5)]
    with torch.no_grad(), ab.batch() as scope:
        found = [product(x, w).tanh() for x in xs]
    torch.testing.assert_close(found, [product(x, w).tanh().detach() for x in xs])
    report = scope.report()
    assert report.nodes >= 2 * len(xs)
    assert report.launches <= 4


def test_batch_norm_updates_its_statistics() -> None:
    def program(batch: Batch) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True)).double()
        with batch():
            losses = [model(torch.randn(4, 3, dtype=DOUBLE)).sum() for _ in range(3)]
        sum(losses).backward()
        return losses, [p.grad for p in model.parameters()], list(model.buffers())

    assert_as_eager(program)


def test_subclasses_and_dispatch_modes() -> None:
    class Sub(Tensor):
        pass

    def program(batch: Batch) -> Any:
        w, x = weight(), inputs(1)[0].as_subclass(Sub)
        with batch():
            y = w @ x
            z = (y * 2).sum()
        return type(y).__name__, type(z).__name__, z.as_subclass(Tensor)

    assert_as_eager(program)
