"""If deferring is not worth its cost, ops run eagerly: batch(adaptive=True)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch._C import is_pending

BLOCKS = 8  # blocks without gain at one place before a block there is not deferred


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(4, 4)


def walk(model: nn.Module, x: Tensor, steps: int) -> tuple[Tensor, list[int]]:
    """A loop that reads at each step."""
    path = []
    for _ in range(steps):
        x = torch.tanh(model(x))
        path.append(int(x.argmax()))
        x = x + path[-1]
    return x, path


@pytest.mark.needs("direct_calls")
def test_a_loop_of_reads_pauses_the_block(model: nn.Linear) -> None:
    x = torch.randn(4)
    with torch.no_grad():
        expected = walk(model, x, 40)
        with ab.batch(adaptive=True) as scope:
            found = walk(model, x, 40)
            assert not is_pending(model(x))
    torch.testing.assert_close(found[0], expected[0])
    assert found[1] == expected[1]
    assert len(scope.report().flushes) < 20
    [pause] = scope.report().pauses
    assert "test_payoff.py" in pause.site
    assert "deferring paused" in str(scope.report())


def test_it_is_off_where_the_user_says_so(model: nn.Linear) -> None:
    with torch.no_grad(), ab.batch(adaptive=False) as scope:
        walk(model, torch.randn(4), 40)
        assert is_pending(model(torch.randn(4)))
    assert scope.report().pauses == []


@pytest.mark.needs("direct_calls")
def test_a_part_without_reads_is_captured_again(model: nn.Linear) -> None:
    x = torch.randn(4)
    with torch.no_grad(), ab.batch(adaptive=True) as scope:
        walk(model, x, 40)
        results = [torch.tanh(model(x + i)) for i in range(600)]
        assert is_pending(results[-1])
        last = results[-1]
    torch.testing.assert_close(last, torch.tanh(model(x + 599)))
    assert scope.report().launches_saved > 100


def test_reads_that_leave_much_to_be_batched_do_not_pause(model: nn.Linear) -> None:
    with torch.no_grad(), ab.batch(adaptive=True) as scope:
        kept = []
        for _ in range(30):
            x = torch.randn(4)
            model(x).sum().item()
            for _ in range(20):
                x = torch.tanh(model(x))
            kept.append(x)
        assert is_pending(kept[-1])
    assert scope.report().pauses == []


def test_reads_in_training_leave_backward_to_be_batched(model: nn.Linear) -> None:
    with ab.batch(adaptive=True) as scope:
        losses = [walk(model, torch.randn(4), 10)[0].sum() for _ in range(20)]
        scope.backward(losses)
    assert scope.report().pauses == []


def test_a_map_in_a_paused_block_batches(model: nn.Linear) -> None:
    xs = torch.randn(8, 4).unbind()
    with torch.no_grad():
        expected = [walk(model, x, 10)[1] for x in xs]
        with ab.batch(adaptive=True) as scope:
            walk(model, xs[0], 40)
            assert scope.report().pauses
            saved, batches = scope.report().launches_saved, scope.report().batches
            found = ab.map(lambda x: walk(model, x, 10)[1], xs)
            assert scope.report().batches - batches < 100
            assert scope.report().launches_saved - saved > 100
    assert found == expected


def of_one(model: nn.Module, instances: int, adaptive: bool = True) -> tuple[bool, ab.batch]:
    """Opens a block at this line. Returns whether its last op was deferred."""
    xs = torch.randn(instances, 4)
    with ab.batch(adaptive=adaptive) as scope:
        results = [torch.sigmoid(model(torch.tanh(model(x)))) for x in xs]
        pending = is_pending(results[-1])
    return pending, scope


@pytest.mark.needs("direct_calls")
@pytest.mark.usefixtures("no_trials")
def test_blocks_of_one_instance_are_not_deferred(model: nn.Linear) -> None:
    deferred = [of_one(model, 1)[0] for _ in range(BLOCKS + 3)]
    assert deferred == [True] * BLOCKS + [False] * 3
    assert of_one(model, 1)[1].report().pauses
    # A larger block is opened.
    pending, scope = of_one(model, 32)
    assert pending
    assert scope.report().launches_saved > 32
    assert of_one(model, 1)[0]  # deferring was worth its cost


@pytest.mark.usefixtures("no_trials")
def test_blocks_of_one_instance_are_tried_now_and_then(model: nn.Linear) -> None:
    def block() -> bool:
        with ab.batch(adaptive=True):
            result = model(torch.ones(4))
            return is_pending(result)

    deferred = [block() for _ in range(BLOCKS + 130)]
    assert 1 <= sum(deferred[BLOCKS:]) <= 3


@pytest.mark.needs("direct_calls")
@pytest.mark.parametrize("inside", [False, True])
def test_a_mode_entered_before_the_pause_leaves_no_trace(model: nn.Linear, inside: bool) -> None:
    """inference_mode restores the dispatch keys of the thread when it ends."""
    x = torch.randn(4)
    with ab.batch(adaptive=True):
        if not inside:
            with torch.no_grad():
                walk(model, x, 40)
        with torch.inference_mode():
            walk(model, x, 40)
            assert not is_pending(model(x))
        results = [model(x) for _ in range(600)]
        assert is_pending(results[-1])
        assert is_pending(results[-1] + 1)
    assert not is_pending(model(x))


def test_errors_of_a_paused_block_are_eagers(model: nn.Linear) -> None:
    for close in (lambda: model(torch.randn(5)), lambda: 1 / 0):

        def fails(close: Callable[[], object] = close) -> None:
            with torch.no_grad(), ab.batch(adaptive=True):
                walk(model, torch.randn(4), 40)
                close()

        with pytest.raises((RuntimeError, ZeroDivisionError)):
            fails()
        with ab.batch(adaptive=True):
            assert is_pending(model(torch.randn(4)))


def test_answers_do_not_depend_on_it(model: nn.Linear) -> None:
    """Tests blocks with many shapes, with gradients, deferred or not."""
    for instances, steps in itertools.product((1, 3), (1, 12)):
        outcomes = []
        for adaptive in (None, True, False):
            for _ in range(1 if adaptive is None else BLOCKS + 2):
                torch.manual_seed(instances * steps)
                model.zero_grad()
                with ab.batch(enabled=adaptive is not None, adaptive=adaptive) as scope:
                    results = [walk(model, torch.randn(4), steps) for _ in range(instances)]
                    scope.backward(sum(x.sum() for x, _ in results))
                gradient = model.weight.grad
                assert gradient is not None
                outcomes.append((gradient.clone(), [path for _, path in results]))
        for gradient, paths in outcomes:
            torch.testing.assert_close(gradient, outcomes[0][0])
            assert paths == outcomes[0][1]
