"""Blocks with several streams and on two devices: the device detects unordered accesses."""

from __future__ import annotations

import time

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _C

from tests.device import sim


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(6, 6, device="sim")


def rows() -> list[Tensor]:
    return [torch.randn(n, 6, device="sim") for n in (1, 3, 2, 1)]


def run(model: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    return [model(model(x).tanh()).sum() for x in xs]


def test_a_block_on_another_stream(model: nn.Linear) -> None:
    """The block launches everything on the current stream, including backward."""
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    xs = rows()
    expected = torch.stack(run(model, xs))
    side.wait_stream(main)
    with side:
        with ab.batch():
            losses = torch.stack(run(model, xs))
        losses.sum().backward()
    main.wait_stream(side)
    torch.testing.assert_close(losses, expected)
    assert model.weight.grad is not None
    assert model.weight.grad.isfinite().all()


def test_a_result_read_on_a_stream_that_does_not_wait_is_found(model: nn.Linear) -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    xs = rows()
    side.wait_stream(main)
    with side, ab.batch():
        losses = run(model, xs)
    with pytest.raises(RuntimeError, match="a race on device memory"):
        losses[0] + 1


@pytest.mark.parametrize("how", ["with", "wait_stream", "record", "set_stream"])
def test_what_is_pending_is_launched_before_streams_are_ordered(model: nn.Linear, how: str) -> None:
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    xs = rows()
    expected = run(model, xs)
    event = torch.Event("sim")
    with ab.batch():
        losses = run(model, xs)
        assert _C.is_pending(losses[0])
        if how == "record":
            event.record(main)
            side.wait_event(event)
        elif how != "with":
            side.wait_stream(main)
        else:
            event.record(main)
        with side:
            assert not _C.is_pending(losses[0])
            if how == "with":
                side.wait_event(event)
            doubled = [loss * 2 for loss in losses]
        main.wait_stream(side)
    for value, other in zip(doubled, expected, strict=True):
        torch.testing.assert_close(value, other * 2)


def test_memory_of_a_block_is_not_given_away_too_early(model: nn.Linear) -> None:
    """Blocks alternate between two streams, and freed memory is reused early."""
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    for _ in range(4):
        xs = rows()
        side.wait_stream(main)
        with side, ab.batch():
            losses = run(model, xs)
        for x in xs:
            x.record_stream(side)
        main.wait_stream(side)
        for loss in losses:
            loss.record_stream(main)
        torch.stack(losses).sum().backward()
        del xs, losses


def test_two_devices() -> None:
    first, second = nn.Linear(4, 4, device="sim:0"), nn.Linear(4, 4, device="sim:1")

    def encode(x: Tensor) -> Tensor:
        return second(first(x).relu().to("sim:1")).sum()

    xs = [torch.randn(n, 4, device="sim:0") for n in (1, 2, 3)]
    found = []
    for enabled in (False, True):
        first.zero_grad()
        second.zero_grad()
        with ab.batch(enabled=enabled):
            losses = [encode(x) for x in xs]
        torch.stack(losses).sum().backward()
        grads = [p.grad for p in (*first.parameters(), *second.parameters())]
        found.append([t.cpu() for t in (torch.stack(losses).detach(), *grads) if t is not None])
    torch.testing.assert_close(found[1], found[0])


def test_memory_goes_with_its_tensors(model: nn.Linear) -> None:
    """After its tensors are deleted, every block leaves the same number of bytes in use."""
    xs = rows()
    left = []
    for _ in range(3):
        with ab.batch(adaptive=False):
            losses = run(model, xs)
        torch.stack(losses).sum().backward()
        model.zero_grad()
        del losses
        torch.accelerator.synchronize()
        left.append(settled_bytes())
    assert left[0] == left[1] == left[2]


def settled_bytes() -> int:
    """Returns the bytes of live tensors. Waits until autograd's thread for the device has dropped
    the tensors of its last node. This happens after backward has returned."""
    found, same = sim.allocated_bytes(), 0
    while same < 20:
        time.sleep(0.005)
        now = sim.allocated_bytes()
        found, same = now, same + 1 if now == found else 0
    return found
