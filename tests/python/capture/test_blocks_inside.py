"""Blocks inside blocks, decorators, and options: no option is ignored silently."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(4, 3)


# --- batch(enabled=False) inside a block ---


def test_ops_run_at_once_inside_eager(linear: nn.Linear) -> None:
    x = torch.randn(4)
    with ab.batch() as scope:
        before = linear(x)
        with ab.eager():
            inside = linear(x)
            assert not ab.is_pending(inside)
            assert ab.is_pending(before)  # the inner block does not read it
        after = linear(x)
        assert ab.is_pending(after)
    torch.testing.assert_close(inside, before)
    assert scope.report().nodes == 2


def test_eager_reads_what_the_block_has_captured(linear: nn.Linear) -> None:
    x = torch.randn(4)
    expected = linear(x).tanh().sum()
    with ab.batch() as scope:
        captured = linear(x)
        with ab.batch(enabled=False):
            result = captured.tanh().sum()
            assert not ab.is_pending(result)
            assert not ab.is_pending(captured)
    torch.testing.assert_close(result, expected)
    result.backward()
    gradient = linear.weight.grad
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, linear.weight)[0])
    report = scope.report()
    assert report.flushes[0].reason.endswith("in batch(enabled=False)")
    assert report.findings == []  # the program requested it


def test_eager_writes_after_what_was_captured_has_read(linear: nn.Linear) -> None:
    x = torch.randn(4)
    with torch.no_grad():
        expected = linear(x), linear(2 * x)
        with ab.batch():
            first = linear(x)
            with ab.eager():
                x.mul_(2)
            second = linear(x)
    torch.testing.assert_close((first, second), expected)


def test_an_optimizer_steps_inside_eager() -> None:
    def train(block: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        with ab.batch(enabled=block):
            for _ in range(3):
                loss = model(torch.ones(4)).square().sum()
                with ab.eager():
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        return model.weight.detach()

    torch.testing.assert_close(train(True), train(False))


def test_running_statistics_inside_eager() -> None:
    norm, same = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    x = torch.randn(5, 3)
    expected = same(same(same(x)))
    with ab.batch():
        y = norm(x)
        with ab.eager():
            y = norm(y)
        y = norm(y)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(norm.running_mean, same.running_mean)
    assert norm.num_batches_tracked == same.num_batches_tracked == 3


def test_a_block_inside_eager_captures_again(linear: nn.Linear) -> None:
    with ab.batch(), ab.eager(), ab.batch():
        assert ab.is_pending(linear(torch.randn(4)))
    with ab.batch(enabled=False), ab.batch():
        assert ab.is_pending(linear(torch.randn(4)))
    assert not ab.is_pending(linear(torch.randn(4)))


def test_eager_ends_where_its_body_raises(linear: nn.Linear) -> None:
    with ab.batch():
        with pytest.raises(ValueError, match="mine"), ab.eager():
            raise ValueError("mine")
        assert ab.is_pending(linear(torch.randn(4)))


def test_eager_is_each_instances_own_in_a_map(linear: nn.Linear) -> None:
    pending = []

    def run(i: int) -> Tensor:
        h = linear(torch.full((4,), float(i)))
        if i % 2:
            with ab.eager():
                assert h.sum().isfinite()
                pending.append(ab.is_pending(linear(h.new_ones(4))))
        assert h.sum() < 1e9  # the instances take turns
        k = linear(torch.ones(4))
        if i == 0:
            pending.append(ab.is_pending(k))
        return h + k

    expected = [linear(torch.full((4,), float(i))) + linear(torch.ones(4)) for i in range(4)]
    torch.testing.assert_close(ab.map(run, range(4)), expected)
    assert sorted(pending) == [False, False, True]


def test_a_map_that_is_not_enabled_runs_at_once_inside_a_block(linear: nn.Linear) -> None:
    with ab.batch():
        results = ab.map(lambda i: linear(torch.ones(4)), range(3), enabled=False)
        assert not any(map(ab.is_pending, results))


def test_a_decorated_function_runs_at_once_inside_a_block(linear: nn.Linear) -> None:
    @ab.eager()
    def measure() -> bool:
        return ab.is_pending(linear(torch.ones(4)))

    with ab.batch():
        assert not measure()


def test_eager_decorates_without_parentheses(linear: nn.Linear) -> None:
    @ab.eager
    def measure() -> bool:
        """Mine."""
        return ab.is_pending(linear(torch.ones(4)))

    with ab.batch():
        assert not measure()
    assert (measure.__name__, measure.__doc__) == ("measure", "Mine.")


def test_another_thread_is_not_concerned(linear: nn.Linear) -> None:
    pending = []

    def work() -> None:
        with ab.batch():
            pending.append(ab.is_pending(linear(torch.ones(4))))

    with ab.batch(), ab.eager():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert pending == [True]


# --- other options of an inner block ---


@pytest.mark.parametrize(
    "options",
    [
        {"max_pending": 1},
        {"policy": "depth"},
        {"verify": True},
        {"granularity": "op"},
        {"check_cells": True},
        {"defer_checks": True},
        {"adaptive": False},
        {"profile": True},
    ],
)
def test_options_without_effect_are_named(options: dict[str, object]) -> None:
    [(name, value)] = options.items()
    with (
        ab.batch(adaptive=True),
        pytest.warns(RuntimeWarning, match=f"{name}={value!r}") as record,
        ab.batch(**options),  # type: ignore[arg-type]
    ):
        pass
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ab.batch(**options), ab.batch(**options):  # type: ignore[arg-type]
            pass
        with ab.batch(**options), ab.batch():  # type: ignore[arg-type]
            pass


def test_a_map_inside_a_block_warns_of_its_options_alone(linear: nn.Linear) -> None:
    with warnings.catch_warnings(), ab.batch():
        warnings.simplefilter("error")
        assert len(ab.map(lambda i: linear(torch.ones(4)), range(2))) == 2
    with ab.batch(), pytest.warns(RuntimeWarning, match="verify=True") as record:
        ab.map(lambda i: linear(torch.ones(4)), range(2), verify=True)
    assert record[0].filename == __file__


# --- as a decorator ---


def test_it_decorates_without_parentheses(linear: nn.Linear) -> None:
    pending = []

    @ab.batch
    def run(x: Tensor) -> Tensor:
        """Mine."""
        pending.append(ab.is_pending(result := linear(x)))
        return result

    x = torch.ones(4)
    torch.testing.assert_close(run(x), linear(x))
    assert pending == [True]
    assert (run.__name__, run.__doc__) == ("run", "Mine.")

    class Model:
        @ab.batch
        def score(self, x: Tensor) -> Tensor:
            return linear(x).sum()

    torch.testing.assert_close(Model().score(x), linear(x).sum())


def test_with_needs_parentheses() -> None:
    with pytest.raises(TypeError, match=r"`with batch\(\):`"), ab.batch:
        pass


def test_a_generator_is_batched_between_its_yields(linear: nn.Linear) -> None:
    @ab.batch()
    def results(n: int) -> Iterator[Tensor]:
        for i in range(n):
            y = linear(torch.full((4,), float(i)))
            assert ab.is_pending(y)
            yield y

    found = []
    for y in results(3):
        assert not ab.is_pending(y)
        assert not ab.is_pending(linear(torch.ones(4)))  # no block is open here
        found.append(y)
    torch.testing.assert_close(found, [linear(torch.full((4,), float(i))) for i in range(3)])


def test_the_signature_and_the_options_are_shown() -> None:
    assert list(inspect.signature(ab.batch).parameters)[:3] == ["policy", "enabled", "max_pending"]
    assert repr(ab.batch("depth", max_pending=5)) == "batch(policy='depth', max_pending=5)"
    assert repr(ab.eager()) == "batch(enabled=False)"
    assert repr(ab.batch()) == "batch()"


def test_import_of_all_shadows_no_builtin() -> None:
    import builtins

    assert not set(ab.__all__) & set(dir(builtins))
    assert all(hasattr(ab, name) for name in ab.__all__)
