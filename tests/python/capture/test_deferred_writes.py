"""In-place ops in a block, and writes to memory that capture does not see."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_capture import (
    DOUBLE,
    Batch,
    assert_as_eager,
    inputs,
    rand,
    weight,
)
from torch import Tensor, nn

# --- in-place ops, and writes that capture does not see ---


def test_in_place_ops_inside() -> None:
    def program(batch: Batch) -> Any:
        w, xs, results = weight(), inputs(), []
        total = torch.zeros(3, dtype=DOUBLE)
        with batch():
            for x in xs:
                h = F.relu((w @ x) * 1, inplace=True)
                h += 1
                h = h.clone()
                h *= 2
                total += h
                results += [h, total.clone(), torch.zeros_like(h).copy_(h)]
        return results, total

    assert_as_eager(program)


def test_an_input_refilled_in_place() -> None:
    def program(batch: Batch) -> Any:
        w, x, alias, results = weight(), inputs(1)[0], None, []
        with batch():
            for i in range(3):
                x.fill_(i)
                results.append(w @ x)
                x.data.add_(1)
                results.append(w @ x)
                alias = x[1:]
                alias.zero_()
                results.append(w @ x)
        return results

    assert_as_eager(program)


def test_a_weight_changed_between_uses() -> None:
    def program(batch: Batch) -> Any:
        w, x, results = weight(), inputs(1)[0], []
        with batch():
            for _ in range(3):
                results.append(w @ x)
                with torch.no_grad():
                    w.add_(1)
                results.append(w[0] * 2)
        return results

    assert_as_eager(program)


@pytest.mark.parametrize("use", ["data", "weight", "right"])
@pytest.mark.parametrize("same_tensor", [True, False])
def test_a_numpy_buffer_refilled_for_each_instance(use: str, same_tensor: bool) -> None:
    def program(batch: Batch) -> Any:
        w, buffer = weight(), np.zeros((3, 3))
        shared = torch.from_numpy(buffer)
        results = []
        with batch():
            for i in range(3):
                buffer[:] = i + 1
                x = shared if same_tensor else torch.from_numpy(buffer)
                if use == "data":
                    results.append(F.linear(x, w))
                elif use == "weight":
                    results.append(F.linear(w.tanh(), x))
                else:
                    results.append(w.tanh() @ x)
        return results

    assert_as_eager(program)


@pytest.mark.parametrize("which", ["input", "weight"])
def test_data_replaced_between_uses(which: str) -> None:
    def program(batch: Batch) -> Any:
        w, x = weight(), inputs(1)[0]
        changed = x if which == "input" else w
        with batch():
            first = F.linear(x, w)
            changed.data = torch.full_like(changed, 5.0)
            second = F.linear(x, w)
        return first, second

    assert_as_eager(program)


def test_views_of_parameters_alias_them() -> None:
    def program(batch: Batch) -> Any:
        w = weight()
        with batch(), torch.no_grad():
            row = w[0]
            w[1].fill_(7)
            row.mul_(2)
        with batch():
            view = w[2]
            with torch.no_grad():
                w.add_(1)
        return row, w, view, view.data_ptr() - w.data_ptr()

    assert_as_eager(program)


# --- in-place ops on captured values ---


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "iadd": lambda t: t.__iadd__(1),
    "relu_": lambda t: t.relu_(),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
    "index_put": lambda t: t.index_put_((torch.tensor([0]),), torch.tensor(2.0, dtype=DOUBLE)),
    "out": lambda t: torch.add(t.detach(), 1, out=t.detach()),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 0.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_in_place_op_on_a_captured_value(linear: nn.Linear, name: str) -> None:
    write = WRITES[name]

    def run(enabled: bool) -> list[Tensor]:
        linear.zero_grad()
        torch.manual_seed(3)
        results = []
        with ab.batch(enabled=enabled):
            for n in (2, 3):
                h = linear(rand(n, 3))
                other = linear(rand(n, 3)).sum()
                before = h + 1
                sibling = h.detach()[0]
                write(h)
                results += [h, before, sibling, other, h * 2]
        torch.cat([r.reshape(-1) for r in results]).sum().backward()
        assert linear.weight.grad is not None
        return [*results, linear.weight.grad.clone()]

    for value, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(value, expected)


def test_a_write_through_a_view_reaches_all_views(linear: nn.Linear) -> None:
    x = rand(2, 3)
    with torch.no_grad(), ab.batch():
        h = linear(x)
        row = h[0]
        h[:, 1:] = 7.0
        h.view(-1)[:1].fill_(3)
        after = h * 2
    expected = linear(x).detach()
    expected[:, 1:] = 7.0
    expected[0, 0] = 3
    for value, other in ((h, expected), (row, expected[0]), (after, expected * 2)):
        torch.testing.assert_close(value, other)


def test_an_optimizer_step_in_the_block(linear: nn.Linear) -> None:
    x = rand(2, 3)

    def run(enabled: bool) -> list[Tensor]:
        model = copy.deepcopy(linear)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with ab.batch(enabled=enabled):
            for _ in range(3):
                optimizer.zero_grad()
                losses.append(model(x).square().sum())
                losses[-1].backward()
                optimizer.step()
            losses.append(model(x).sum())
        return [*losses, model.weight.detach()]

    for value, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(value, expected)


def test_autocast_gives_eagers_dtypes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2))
    xs = [torch.randn(2, 3) for _ in range(3)]

    def run(enabled: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        model.zero_grad()
        with ab.batch(enabled=enabled), torch.autocast("cpu", torch.bfloat16):
            hidden = [model[0](x) for x in xs]
            results = [model(x) for x in xs]
            losses = [F.cross_entropy(r, torch.zeros(2, dtype=torch.long)) for r in results]
            dtypes = [t.dtype for t in (hidden[0], results[0], losses[0])]
        assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
        torch.stack(losses).sum().backward()
        return [*hidden, *results, *losses], [p.grad for p in model.parameters()]

    expected, expected_grads = run(False)
    values, grads = run(True)
    for value, other in zip(values + grads, expected + expected_grads, strict=True):
        torch.testing.assert_close(value, other, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("sizes", "strides"), [((2, 3), (6, 5)), ((3, 2), (6, 1)), ((4, 3), (5, 4))]
)
def test_stripes_of_a_chart_stay_pending(sizes: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """The elements of the pieces interleave, but do not share memory."""
    w = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))
    found = []
    for enabled in (False, True):
        w.grad = None
        with ab.batch(enabled=enabled) as scope:
            chart = torch.tanh(w @ w)
            stripe = chart.as_strided(sizes, strides, 0)
            chart = chart + 0
            chart.as_strided(sizes, strides, 1).copy_(stripe * 2)
            loss = (chart * chart).sum()
        loss.backward()
        assert w.grad is not None
        found.append((loss.detach(), w.grad))
        if enabled:
            assert len(scope.report().flushes) == 1
    torch.testing.assert_close(found[0], found[1])
