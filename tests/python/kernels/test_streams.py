"""Stream and event calls order launches, so they flush in a block. Uses fakes of torch.cuda's."""

from __future__ import annotations

import pytest
import torch
import torch_autobatch as ab
from torch import nn
from torch_autobatch import _C, _streams


class StandIns:
    """Records what was pending when functions of torch.cuda were called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watched: torch.Tensor | None = None
        self.pending: list[bool] = []

        def note(*_: object) -> None:
            assert self.watched is not None
            self.pending.append(_C.is_pending(self.watched))

        monkeypatch.setattr(torch.cuda, "set_stream", note)
        monkeypatch.setattr(torch.cuda.Event, "record", note)
        for name in ("__enter__", "__exit__"):
            monkeypatch.setattr(torch.cuda.Stream, name, note, raising=False)
        monkeypatch.setattr(torch.accelerator, "set_stream", note)
        _streams.watch()

    def call_each(self) -> None:
        torch.cuda.set_stream(None)  # type: ignore[arg-type]
        torch.cuda.Event.record(None)  # type: ignore[arg-type]
        torch.cuda.Stream.__enter__(None)  # type: ignore[arg-type]
        torch.cuda.Stream.__exit__(None, None, None, None)  # type: ignore[arg-type]
        torch.accelerator.set_stream(None)  # type: ignore[arg-type]


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(monkeypatch)


def test_what_was_captured_is_launched_before(stand_ins: StandIns) -> None:
    linear = nn.Linear(3, 3)
    x = torch.randn(1, 3)
    expected = linear(x).tanh()
    reasons = []
    for k, reason in enumerate(["stream", "event"]):
        with ab.batch() as scope:
            stand_ins.watched = y = linear(x).tanh()
            assert _C.is_pending(y)
            torch.cuda.Event.record(None) if k else torch.cuda.set_stream(None)  # type: ignore[arg-type]
            z = y * 2
            assert _C.is_pending(z)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(z, expected * 2)
        reasons += [f.reason for f in scope.report().flushes if reason in f.reason]
    assert stand_ins.pending == [False, False]
    assert reasons == ["the current stream changes", "an event is recorded"]


def test_each_of_them_flushes(stand_ins: StandIns) -> None:
    linear = nn.Linear(3, 3)
    with ab.batch() as scope:
        stand_ins.watched = linear(torch.randn(1, 3))
        stand_ins.call_each()
        stand_ins.watched = linear(torch.randn(1, 3))
        stand_ins.call_each()
    assert stand_ins.pending == [False] * 10
    assert len(scope.report().flushes) == 2  # no flush if no op is pending


def test_outside_of_blocks_nothing_is_different(stand_ins: StandIns) -> None:
    stand_ins.watched = torch.ones(1)
    stand_ins.call_each()
    assert stand_ins.pending == [False] * 5
