"""Blocks and maps that may run eagerly, by the clock (the rules are tested in tests/cpp/scope).

Which blocks do is up to the machine. What they compute, and what is left behind, is not.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

SIZES = (3, 9, 5, 7, 2, 8, 4, 6)


@pytest.fixture(autouse=True)
def adaptive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch_autobatch._scope"], "ADAPTIVE", True)


class Model(nn.Module):
    """A lot of Python for few ops, and matrices that need a call each: a place to be eager at."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            sum(range(3000))
            x = torch.linalg.qr(self.layer(x)).Q.contiguous() + x[:, : min(x.shape)].sum()
            x = nn.functional.pad(x, (0, 16 - x.shape[1]))
        return x.square().mean()


def run_block(model: nn.Module, xs: list[Tensor]) -> Tensor:
    with ab.batch():
        return torch.stack([model(x) for x in xs])


def run_map(model: nn.Module, xs: list[Tensor]) -> Tensor:
    return torch.stack(ab.map(model, xs))


def run_map_in_block(model: nn.Module, xs: list[Tensor]) -> Tensor:
    with ab.batch():
        return torch.stack(ab.map(model, xs))


@pytest.mark.parametrize("run", [run_block, run_map, run_map_in_block])
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_answers_are_eagers_whichever_way_blocks_run(run, trains: bool) -> None:  # type: ignore[no-untyped-def]
    model = Model()
    xs = [torch.randn(n, 16) for n in SIZES]
    with torch.set_grad_enabled(trains):
        expected = torch.stack([model(x) for x in xs])
        for _ in range(12):
            got = run(model, xs)
            assert not ab.is_pending(got)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            if trains:
                want = torch.autograd.grad(expected.sum(), model.layer.weight, retain_graph=True)
                have = torch.autograd.grad(got.sum(), model.layer.weight)
                torch.testing.assert_close(have, want, rtol=1e-3, atol=1e-4)
            assert not torch_is_captured(model)


def torch_is_captured(model: Model) -> bool:
    """Whether an op outside of all blocks is deferred."""
    return ab.is_pending(model.layer(torch.randn(1, 16)))


def test_a_map_that_runs_eagerly_raises_what_a_loop_raises() -> None:
    def fails(x: Tensor) -> Tensor:
        sum(range(3000))
        if x.shape[0] == 4:
            raise KeyError("four")
        return x.exp().sum()

    for _ in range(12):
        with pytest.raises(KeyError, match="four") as raised:
            ab.map(fails, [torch.randn(n, 16) for n in SIZES])
        assert "in instance 6" in "".join(raised.value.__notes__)
        results = ab.map(fails, [torch.randn(n, 16) for n in SIZES], return_exceptions=True)
        assert [isinstance(r, KeyError) for r in results] == [n == 4 for n in SIZES]


def test_nothing_is_timed_under_deterministic_algorithms() -> None:
    model = Model()
    xs = [torch.randn(n, 16) for n in SIZES]
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(8):
            run_block(model, xs)
            report = ab.last_report()
            assert report is not None
            assert not any(pause.measured for pause in report.pauses)
    finally:
        torch.use_deterministic_algorithms(False)


def test_models_at_one_line_are_told_apart() -> None:
    from torch_autobatch import _identity

    def at_one_line(model: nn.Module) -> int:
        return _identity.of_frame(sys._getframe())

    one, other = Model(), Model()
    assert at_one_line(one) == at_one_line(one)
    assert at_one_line(one) != at_one_line(other)
    assert _identity.of_function(one.forward) != _identity.of_function(other.forward)
    assert _identity.of_function(lambda x: one(x)) != _identity.of_function(lambda x: other(x))


def test_data_does_not_tell_models_apart() -> None:
    from torch_autobatch import _identity

    def at_one_line(model: nn.Module, data: object) -> int:
        return _identity.of_frame(sys._getframe())

    model = Model()
    assert at_one_line(model, [torch.randn(3)]) == at_one_line(model, (1, "two", {3: None}))
