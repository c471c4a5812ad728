"""The simulated device computes what the CPU does, counts launches, and detects planted faults."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.device import sim

ROOT = Path(__file__).resolve().parents[2]


def other_stream() -> torch.Stream:
    return torch.Stream("sim:0")


def after(stream: torch.Stream, waiting: torch.Stream) -> None:
    """Orders later launches on `waiting` after the launches that are on `stream` now."""
    event = torch.Event("sim")
    event.record(stream)
    waiting.wait_event(event)


# ---- results


def test_values_gradients_and_random_numbers_are_the_cpus() -> None:
    found = []
    for device in ("cpu", "sim"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.3))
        model.to(device)
        x = torch.randn(2, 3, 9).to(device).requires_grad_()
        torch.manual_seed(2)  # each device has its own generator
        y = model(x).sort(-1).values.cumsum(1)
        y.square().sum().backward()
        assert x.grad is not None
        found.append([t.cpu() for t in (y, x.grad, *(p.grad for p in model.parameters()))])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_the_gates_kernels_are_the_cells(kind: type[nn.Module]) -> None:
    cell = kind(3, 4).double()  # type: ignore[call-arg]
    x = torch.randn(5, 3, dtype=torch.double)
    found = []
    for device in ("cpu", "sim"):
        cell.to(device).zero_grad()
        state = None
        for _ in range(3):
            state = cell(x.to(device), state)
        h = state[0] if isinstance(state, tuple) else state
        h.square().sum().backward()
        found.append([h.detach().cpu(), *(p.grad.cpu().clone() for p in cell.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_views_in_place_and_out_share_memory() -> None:
    x = torch.arange(12.0, device="sim").view(3, 4)
    x.t()[1].mul_(10)
    x.unfold(1, 2, 2)[0, 1].zero_()
    out = torch.empty(0, device="sim")
    torch.add(x[:, 1], 1, out=out)
    assert x.tolist() == [[0, 10, 0, 0], [4, 50, 6, 7], [8, 90, 10, 11]]
    assert out.tolist() == [11, 51, 91]


def test_tensors_of_two_places_do_not_meet() -> None:
    x = torch.ones(3, device="sim")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3, device="sim:1")
    assert (x.to("sim:1") + 1).tolist() == [2, 2, 2]


# ---- counts


def test_launches_copies_and_synchronisations_are_counted() -> None:
    x = torch.ones(3, device="sim")
    with sim.counting() as counts:
        y = (x + 1).mul_(2)
        y[1:].view(2, 1)
    assert counts == {"launches": 2, "to_device": 0, "to_host": 0, "synchronisations": 0}
    with sim.counting() as counts:
        y.sum().item()
        y.cpu()
        y[y > 0]
    assert (counts["to_host"], counts["synchronisations"]) == (3, 3)
    with sim.counting() as counts:
        torch.ones(3).pin_memory().to("sim", non_blocking=True)
    assert (counts["to_device"], counts["synchronisations"]) == (1, 0)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: torch.tensor([1.0], device="sim"),
        lambda x: torch.accelerator.synchronize(),
    ],
)
def test_a_synchronisation_is_an_error_where_it_is_forbidden(wait: object) -> None:
    x = torch.ones(3, device="sim")
    with sim.no_synchronisation():
        x.add(1)
        with pytest.raises(RuntimeError, match="a synchronisation where none is allowed"):
            wait(x)  # type: ignore[operator]
    wait(x)  # type: ignore[operator]


# ---- planted faults


def test_a_read_by_the_host_is_a_fault_with_a_stack() -> None:
    program = """
        import ctypes, torch
        from tests.device import sim
        x = torch.ones(3, device="sim").add(1)
        ctypes.string_at(x.data_ptr(), 4)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode < 0
    assert "the host touched memory of the device; the last op here was aten::add" in done.stderr
    assert "simulated_device" in done.stderr  # the stack


def test_memory_that_nobody_wrote_is_nan() -> None:
    assert torch.empty(5, device="sim").isnan().all()


def used_on_another_stream(*, record: bool) -> None:
    """Frees memory that another stream reads, and allocates another tensor of the same size."""
    main, side = torch.accelerator.current_stream(), other_stream()
    x = torch.ones(1000, device="sim")
    after(main, side)
    torch.accelerator.set_stream(side)
    try:
        x.sum()
    finally:
        torch.accelerator.set_stream(main)
    if record:
        x.record_stream(side)
    del x
    torch.zeros(1000, device="sim")  # reuses the memory if it is free
    torch.accelerator.synchronize()


def test_a_missing_record_stream_is_found() -> None:
    used_on_another_stream(record=True)
    with pytest.raises(RuntimeError, match=r"a race on device memory.*record_stream"):
        used_on_another_stream(record=False)
    with (
        sim.planted(sim.Fault.FORGET_RECORD_STREAM),
        pytest.raises(RuntimeError, match=r"a race on device memory.*record_stream"),
    ):
        used_on_another_stream(record=True)


def mixed_up(*, wait: bool) -> None:
    main, side = torch.accelerator.current_stream(), other_stream()
    x = torch.zeros(10, device="sim")
    after(main, side)
    torch.accelerator.set_stream(side)
    x.add_(1)
    torch.accelerator.set_stream(main)
    if wait:
        after(side, main)
    x.mul_(2)


def test_a_missing_wait_between_streams_is_found() -> None:
    mixed_up(wait=True)
    with pytest.raises(RuntimeError, match=r"nothing orders aten::mul .* after aten::add"):
        mixed_up(wait=False)
    with (
        sim.planted(sim.Fault.FORGET_EVENTS),
        pytest.raises(RuntimeError, match="a race on device memory"),
    ):
        mixed_up(wait=True)


def test_a_copy_to_the_host_comes_late() -> None:
    x = torch.full((3,), 7.0, device="sim")
    host = torch.zeros(3).pin_memory()
    host.copy_(x, non_blocking=True)
    assert host.isnan().all()  # the host has not waited yet
    torch.accelerator.synchronize()
    assert host.tolist() == [7, 7, 7]


def test_pinned_memory_that_is_written_to_too_early_is_found() -> None:
    host = torch.zeros(3).pin_memory()
    x = host.to("sim", non_blocking=True)
    torch.accelerator.synchronize()
    host.fill_(1)
    x.copy_(host, non_blocking=True)
    host.fill_(2)
    with pytest.raises(RuntimeError, match="pinned memory was written to before"):
        torch.accelerator.synchronize()
