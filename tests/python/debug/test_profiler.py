"""Ranges of a block in torch.profiler: flushes, their stages, and batched calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

PREFIX = "torch_autobatch::"


def step(model: nn.Linear, xs: list[Tensor]) -> None:
    with ab.batch():
        losses = [torch.tanh(model(x)).sum() for x in xs]
    torch.stack(losses).sum().backward()


def ranges(profiler: profile) -> list[str]:
    return [e.name for e in profiler.events() if e.name.startswith(PREFIX)]


def profiled() -> profile:
    return profile(activities=[ProfilerActivity.CPU])


def test_flush_stages_and_batches() -> None:
    model = nn.Linear(3, 4)
    xs = [torch.randn(n, 3) for n in (1, 2, 3, 2, 1)]
    with profiled() as profiler:
        step(model, xs)
    names = ranges(profiler)
    for stage in ("flush: the end of the block", "schedule", "execute", "materialize"):
        assert names.count(PREFIX + stage) == 1, names
    assert names.count(PREFIX + "aten::linear(Float[1, 3], Float[4, 3], Float[4]) x 5") == 1
    assert names.count(PREFIX + "aten::tanh(Float[1, 4]) x 5") == 1
    assert names.count(PREFIX + "backward") == 1
    assert names.count(PREFIX + "weight_gradients") == 1
    assert names.count(PREFIX + "aten::tanh(Float[1, 4]) x 5, backward") == 1


def test_ranges_nest_in_a_trace(tmp_path: Path) -> None:
    """Ranges nest: ops of PyTorch in a batch, the batch in a stage, the stage in a flush."""
    model = nn.Linear(3, 4)
    xs = [torch.randn(2, 3) for _ in range(4)]
    step(model, xs)
    with profiled() as profiler:
        step(model, xs)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]

    def one(start: str) -> tuple[float, float]:
        (event,) = [
            e
            for e in events
            if e["name"].startswith(PREFIX + start) and not e["name"].endswith("backward")
        ]
        return event["ts"], event["ts"] + event["dur"]

    flush, execute, linear = one("flush"), one("execute"), one("aten::linear")
    assert flush[0] <= execute[0] <= linear[0] <= linear[1] <= execute[1] <= flush[1]
    assert any(
        e["name"] == "aten::addmm" or e["name"] == "aten::linear" or e["name"] == "aten::mm_out"
        for e in events
        if linear[0] <= e["ts"] <= linear[1]
    )


def test_a_profiler_that_starts_or_stops_in_the_block() -> None:
    """A flush runs in the thread state from before the block, except for the profiler."""
    model = nn.Linear(3, 4)
    xs = [torch.randn(1, 3) for _ in range(3)]
    with ab.batch() as scope, torch.no_grad():
        first = [model(x) for x in xs]
        with profiled() as profiler:
            scope.flush()
        second = [model(x * 2) for x in xs]
    assert any(name.endswith("x 3") for name in ranges(profiler))
    assert all(y.isfinite().all() for y in first + second)

    profiler = profiled()
    profiler.start()
    with ab.batch():
        ys = [model(x) for x in xs]
        profiler.stop()
    assert not [name for name in ranges(profiler) if name.endswith("x 3")]
    assert all(torch.allclose(y, model(x)) for y, x in zip(ys, xs, strict=True))


def test_events_add_up_over_steps() -> None:
    model = nn.Linear(3, 4)
    xs = [torch.randn(1, 3) for _ in range(3)]
    with profiled() as profiler:
        for _ in range(3):
            step(model, xs)
    counts = {row.key: row.count for row in profiler.key_averages()}
    assert counts[PREFIX + "schedule"] == 3
    assert counts[PREFIX + "aten::linear(Float[1, 3], Float[4, 3], Float[4]) x 3"] == 3


@pytest.mark.needs("elementwise_fusion")
def test_a_cell_is_a_range_with_its_ops_in_it() -> None:
    model = nn.Linear(3, 3)

    @ab.cell
    def node(x: Tensor) -> Tensor:
        return torch.tanh(model(x)) * 2

    with profiled() as profiler:
        with ab.batch():
            losses = [node(node(torch.ones(1, 3) * i)).sum() for i in range(4)]
        torch.stack(losses).sum().backward()
    names = ranges(profiler)
    linear = "aten::linear(Float[1, 3], Float[3, 3], Float[3]) x 4"
    passed_over_at_once = "elementwise(aten::tanh, aten::mul.Tensor) x 4"
    for name in (linear, passed_over_at_once):
        assert names.count(PREFIX + name) == 2, names
        assert names.count(PREFIX + name + ", backward") == 2, names


def test_recorded_arguments_are_no_reads_of_a_cell() -> None:
    """The profiler reads the memory of pending tensors. Nothing is batched."""
    weight = torch.randn(3, 3)
    cell = ab.cell(lambda x: (x @ weight).tanh())
    xs = [torch.randn(1, 3) for _ in range(3)]
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True), ab.batch():
        results = [cell(x * 2) for x in xs]
    for result, x in zip(results, xs, strict=True):
        torch.testing.assert_close(result, (x * 2 @ weight).tanh())
    with ab.batch() as scope:
        results = [cell(x * 2) for x in xs]
    assert scope.report().batches <= 3


def test_recorded_arguments_of_a_training_step() -> None:
    """Flushes occur while the profiler writes a record, which a second record would corrupt."""
    torch.manual_seed(0)
    cell, out = nn.LSTMCell(4, 4), nn.Linear(4, 4)

    def losses() -> list[Tensor]:
        results = []
        for i in range(5):
            h, c = torch.full((1, 4), i / 5), torch.zeros(1, 4)
            for _ in range(3):
                h, c = cell(torch.cat([out(h)[:, :2].tanh(), h[:, 2:]], 1), (h, c))
            results.append((h * torch.sigmoid(c).chunk(2, 1)[0].sum()).sum())
        return results

    def gradient() -> Tensor:
        (grad,) = torch.autograd.grad(torch.stack(losses()).sum(), out.weight)
        return grad

    expected = gradient()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        with ab.batch():
            results = losses()
        (grad,) = torch.autograd.grad(torch.stack(results).sum(), out.weight)
    assert any(event.input_shapes for event in profiler.key_averages(group_by_input_shape=True))
    torch.testing.assert_close(grad, expected)


def test_recorded_arguments_of_what_fails() -> None:
    def block() -> None:
        with ab.batch():
            root = torch.linalg.cholesky(-torch.eye(3) * nn.Parameter(torch.ones(3, 3)))
            torch.exp(root + 1)

    with (
        profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler,
        pytest.raises(RuntimeError, match="not positive-definite"),
    ):
        block()
    assert profiler.key_averages()
