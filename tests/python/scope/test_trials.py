"""Blocks and maps that run eagerly after timing trials (tests/cpp/scope tests the rules).

The model sleeps longer if its ops are deferred, so that eager mode is faster on any machine.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _identity

SIZES = (3, 9, 5, 7, 2, 8, 4, 6)
MOST_BLOCKS = 100

Run = Callable[[nn.Module, list[Tensor]], Tensor]


@pytest.fixture(autouse=True)
def adaptive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch_autobatch._scope"], "ADAPTIVE", True)


@pytest.fixture
def xs() -> list[Tensor]:
    return [torch.randn(n, 16) for n in SIZES]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(x)).tanh()
        # The sleep must be this long, because other processes can delay a block by some
        # milliseconds.
        time.sleep(0.005 if ab.is_pending(h) else 0.001)
        return h.square().mean()


def run_block(model: nn.Module, xs: list[Tensor]) -> Tensor:
    with ab.batch():
        return torch.stack([model(x) for x in xs])


def run_map(model: nn.Module, xs: list[Tensor]) -> Tensor:
    return torch.stack(ab.map(model, xs))


def run_map_in_block(model: nn.Module, xs: list[Tensor]) -> Tensor:
    with ab.batch():
        return torch.stack(ab.map(model, xs))


def ran_eagerly() -> bool:
    """Returns whether the block or map that ended last ran eagerly."""
    report = ab.last_report()
    measured = any(pause.measured for pause in report.pauses)
    assert measured == (report.nodes == 0)
    return measured


def settle(run: Callable[[], object]) -> None:
    """Runs until blocks run eagerly. (During the trials, eager and deferred blocks alternate.)"""
    in_a_row = 0
    for _ in range(MOST_BLOCKS):
        run()
        in_a_row = in_a_row + 1 if ran_eagerly() else 0
        if in_a_row == 3:
            return
    pytest.fail("blocks did not run eagerly")


def step(run: Run, model: Model, xs: list[Tensor]) -> tuple[Tensor, ...]:
    """Returns the losses, the gradient of the weight (if any), and the buffers after the step."""
    losses = run(model, xs)
    assert not ab.is_pending(losses)
    grads = torch.autograd.grad(losses.sum(), model.layer.weight) if losses.requires_grad else ()
    return (losses.detach(), *grads, *(buffer.clone() for buffer in model.buffers()))


@pytest.mark.parametrize("run", [run_block, run_map, run_map_in_block])
@pytest.mark.parametrize("trains", [False, True], ids=["inference", "training"])
def test_answers_are_eagers_whichever_way_blocks_run(
    run: Run, trains: bool, xs: list[Tensor]
) -> None:
    model, eager = Model(), Model()
    eager.load_state_dict(model.state_dict())
    ways = set()
    with torch.set_grad_enabled(trains):
        for _ in range(MOST_BLOCKS):
            got = step(run, model, xs)
            ways.add(ran_eagerly())
            expected = step(lambda m, of: torch.stack([m(x) for x in of]), eager, xs)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            if len(ways) == 2:
                break
    assert ways == {False, True}
    assert not ab.is_pending(model.layer(xs[0]))


def test_timing_takes_precedence_over_counts_of_launches(xs: list[Tensor]) -> None:
    """A block that saves no launches stays deferred, if timing shows that eager mode is slower."""
    layer = nn.Linear(16, 16)

    def run() -> None:
        with ab.batch():
            for x in xs:
                h = layer(x)
                time.sleep(0.001 if ab.is_pending(h) else 0.005)
                h.sum().item()

    for _ in range(30):
        run()
    for _ in range(10):
        run()
        assert ab.last_report().nodes > 0
        assert not ab.last_report().pauses


def test_nodes_that_a_pass_has_removed_count_as_time_of_eager_mode() -> None:
    """All examples compute the same product. The block computes it once."""
    weight = torch.randn(128, 128)

    def run() -> Tensor:
        with ab.batch():
            return torch.stack([(weight @ scale * weight).sum() for _ in range(400)])

    with torch.no_grad():
        scale = nn.Parameter(torch.randn(128, 128))
        for _ in range(8):
            run()
            assert not ran_eagerly()


def test_a_map_that_runs_eagerly_raises_what_a_loop_raises(xs: list[Tensor]) -> None:
    model = Model()

    def fails(x: Tensor) -> Tensor:
        if x.shape[0] == broken:
            raise KeyError("four")
        return model(x)

    def run(**options: bool) -> list[Tensor | BaseException]:
        return ab.map(fails, xs, **options)

    broken = 0
    with torch.no_grad():
        settle(run)
        broken = 4
        with pytest.raises(KeyError, match="four") as raised:
            run()
        assert ran_eagerly()
        assert "in instance 6" in "".join(raised.value.__notes__)
        results = run(return_exceptions=True)
    assert [isinstance(result, KeyError) for result in results] == [n == 4 for n in SIZES]


@pytest.mark.parametrize("run", [run_block, run_map])
def test_nothing_is_timed_under_deterministic_algorithms(run: Run, xs: list[Tensor]) -> None:
    model = Model()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(MOST_BLOCKS):
            run(model, xs)
            assert not ran_eagerly()
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_timed_where_all_is_to_be_deferred(xs: list[Tensor]) -> None:
    model = Model()
    for _ in range(MOST_BLOCKS):
        with ab.batch(adaptive=False):
            torch.stack(ab.map(model, xs))
        assert not ran_eagerly()


def test_another_model_at_the_same_line_is_deferred(xs: list[Tensor]) -> None:
    model = Model()
    with torch.no_grad():
        settle(lambda: run_block(model, xs))
        run_block(Model(), xs)
        assert not ran_eagerly()


def test_a_report_says_that_eager_was_faster(xs: list[Tensor]) -> None:
    model = Model()
    settle(lambda: run_block(model, xs))
    first = str(ab.last_report()).splitlines()[0]
    assert first.startswith("All ops ran eagerly: blocks at ")
    assert "batching was slower" in first


def test_models_at_one_line_are_told_apart() -> None:
    def at_one_line(model: nn.Module) -> int:
        return _identity.of_frame(sys._getframe())

    one, other = Model(), Model()
    assert at_one_line(one) == at_one_line(one)
    assert at_one_line(one) != at_one_line(other)
    assert _identity.of_function(one.forward) != _identity.of_function(other.forward)
    assert _identity.of_function(lambda x: one(x)) != _identity.of_function(lambda x: other(x))


def test_an_object_that_cannot_be_looked_at_is_no_error() -> None:
    proxy = weakref.proxy(Model())  # a proxy of an object that no longer exists
    assert _identity.of_frame(sys._getframe()) == 0
    del proxy


def test_data_does_not_tell_models_apart() -> None:
    def at_one_line(model: nn.Module, data: object) -> int:
        return _identity.of_frame(sys._getframe())

    model = Model()
    assert at_one_line(model, [torch.randn(3)]) == at_one_line(model, (1, "two", {3: None}))


def test_a_map_without_code_of_the_program_around_it(xs: list[Tensor]) -> None:
    """With ``python -m`` of an installed package, there is no line whose times can be stored."""
    model, found = Model(), []
    thread = threading.Thread(target=ab.map, args=(lambda x: found.append(model(x)), xs))
    thread.start()
    thread.join()
    assert len(found) == len(xs)
