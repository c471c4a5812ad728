"""Requests get eager's results, share batches, and do not change the state of the program."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from serving import TreeNet, Walker, assert_same, expected, tree
from torch import Tensor, nn


def test_one_request() -> None:
    model = TreeNet().eval()
    with ab.Engine(model) as engine:
        result = engine.submit(((1, 2), 3)).result(10)
    assert not ab.is_pending(result)
    assert_same(result, expected(model, ((1, 2), 3)))


def test_trees_share_batches() -> None:
    model, rng = TreeNet().eval(), random.Random(1)
    trees = [tree(rng, rng.randint(1, 20)) for _ in range(100)]
    with ab.Engine(model) as engine:
        engine.between(lambda: None).result(10)
        results = engine.map(trees)
        stats = engine.stats()
    for one, result in zip(trees, results, strict=True):
        assert_same(result, expected(model, one))
    assert stats["finished"] == 100
    assert stats["batch_width"]["aten::linear"] > 4


def test_code_that_reads_values_shares_batches() -> None:
    model, rng = Walker().eval(), random.Random(2)
    inputs = [(rng.randrange(11), rng.randint(1, 20)) for _ in range(60)]
    with ab.Engine(model) as engine:
        futures = [engine.submit(*args) for args in inputs]
        results = [future.result(30) for future in futures]
        stats = engine.stats()
    for args, result in zip(inputs, results, strict=True):
        assert_same(result, expected(model, *args))
    assert stats["batch_width"]["aten::gru_cell"] > 4


def test_a_request_joins_what_is_under_way() -> None:
    """The short request arrives in the middle of the long one, and finishes earlier."""
    model = Walker().eval()
    half_way, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def run(name: str, most: int) -> Any:
        result = []
        for i, symbol in enumerate(model.steps(3, most)):
            result.append(symbol)
            if name == "long" and i == 20:
                half_way.set()
                assert go_on.wait(10)  # the short request must be queued at the next turn
        order.append(name)
        return result

    with ab.Engine(run) as engine:
        long = engine.submit("long", 200)
        assert half_way.wait(10)
        short = engine.submit("short", 5)
        go_on.set()
        assert short.result(10) == list(model.steps(3, 5))
        assert long.result(30) == list(model.steps(3, 200))
        stats = engine.stats()
    assert order == ["short", "long"]
    # 205 calls; the calls of the short request ran in batches of the long one.
    assert stats["batch_width"]["aten::gru_cell"] > 204 / 201


def test_straight_line_requests_join_too() -> None:
    """A tree without reads arrives while a deep tree is pending, and finishes first."""
    model = TreeNet().eval()
    chain: Any = 1
    for _ in range(150):
        chain = (chain, 2)
    small = ((1, 2), (3, 4))
    is_submitted = threading.Event()
    order: list[str] = []

    def run(tree: Any) -> Tensor:
        result = model(tree)
        assert is_submitted.wait(10)  # the small request must be queued at the next turn
        return result

    with ab.Engine(run, slice_time=1e-5) as engine:
        first, second = engine.submit(chain), engine.submit(small)
        first.add_done_callback(lambda _: order.append("chain"))
        second.add_done_callback(lambda _: order.append("small"))
        is_submitted.set()
        assert_same(second.result(10), expected(model, small))
        assert_same(first.result(30), expected(model, chain))
    assert order == ["small", "chain"]


def test_await_and_gather() -> None:
    model, rng = TreeNet().eval(), random.Random(3)
    trees = [tree(rng, 8) for _ in range(20)]

    async def main(engine: ab.Engine[Tensor]) -> list[Tensor]:
        return await asyncio.gather(*(engine(one) for one in trees))

    with ab.Engine(model) as engine:
        for one, result in zip(trees, asyncio.run(main(engine)), strict=True):
            assert_same(result, expected(model, one))


def test_many_threads_submit() -> None:
    model = Walker().eval()
    wrong: list[Any] = []

    def work(engine: ab.Engine[Any], first: int) -> None:
        for most in range(1, 12):
            result = engine.submit(first, most).result(30)
            wanted = expected(model, first, most)
            if result[0] != wanted[0]:
                wrong.append((first, most))

    with ab.Engine(model) as engine:
        threads = [threading.Thread(target=work, args=(engine, i % 11)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.stats()["finished"] == 16 * 11
    assert not wrong


def test_stream() -> None:
    model = Walker().eval()
    with ab.Engine(model.steps) as engine:
        streams = [engine.stream(first, 30) for first in range(5)]
        for first, stream in enumerate(streams):
            assert list(stream) == list(model.steps(first, 30))
        assert engine.submit(2, 7).result(10) == list(model.steps(2, 7))


def test_stream_of_tensors() -> None:
    layer = nn.Linear(4, 4).eval()

    def states(x: Tensor, steps: int) -> Iterator[Tensor]:
        for _ in range(steps):
            x = layer(x).tanh()
            yield x

    x = torch.randn(4)
    with ab.Engine(states) as engine:
        found = list(engine.stream(x, 10))
    assert not any(ab.is_pending(item) for item in found)
    assert_same(found, expected(lambda: list(states(x, 10))))


def test_stream_in_a_coroutine() -> None:
    model = Walker().eval()

    async def main(engine: ab.Engine[Any]) -> list[int]:
        return [symbol async for symbol in engine.stream(4, 25)]

    with ab.Engine(model.steps) as engine:
        assert asyncio.run(main(engine)) == list(model.steps(4, 25))


def test_a_slow_reader_holds_up_its_own_request_alone() -> None:
    produced: list[int] = []

    def count(most: int) -> Iterator[int]:
        for i in range(most):
            produced.append(i)
            yield i

    with ab.Engine(count) as engine:
        slow = engine.stream(100, buffer=4)
        assert list(engine.stream(3)) == [0, 1, 2]  # other requests go on
        assert len(produced) <= 4 + 3
        assert list(slow) == list(range(100))


def test_decorator() -> None:
    @ab.serve(max_live=8)
    def double(x: Tensor) -> Tensor:
        """Twice as much."""
        return 2 * x

    assert double.__doc__ == "Twice as much."
    assert_same(double.submit(torch.ones(3)).result(10), 2 * torch.ones(3))
    double.shutdown()


def test_results_record_nothing_unless_asked() -> None:
    layer = nn.Linear(3, 3).eval()
    x = torch.randn(3)
    with ab.Engine(layer) as engine:
        assert engine.submit(x).result(10).is_inference()
    with ab.Engine(layer, grad=True) as engine:
        result = engine.submit(x).result(10)
    result.sum().backward()
    assert layer.weight.grad is not None
    assert_same(layer.weight.grad, x.expand(3, 3))


def test_cells_batch_across_requests() -> None:
    layer = nn.Linear(8, 8).eval()

    @ab.cell
    def node(a: Tensor, b: Tensor) -> Tensor:
        return layer(a + b).tanh() * a

    def reduce(values: list[Tensor]) -> Tensor:
        while len(values) > 1:
            values = [node(values[0], values[1]), *values[2:]]
        return values[0]

    inputs = [[torch.randn(8) for _ in range(n)] for n in range(1, 25)]
    with ab.Engine(reduce) as engine:
        results = engine.map(inputs)
    for values, result in zip(inputs, results, strict=True):
        assert_same(result, expected(reduce, values))


def test_other_threads_capture_nothing() -> None:
    with ab.Engine(TreeNet().eval()) as engine:
        engine.submit((1, 2)).result(10)
        assert not ab.is_pending(nn.Linear(2, 2)(torch.ones(2)))


def test_callbacks_run_eagerly() -> None:
    layer = nn.Linear(2, 2).eval()
    pending: list[bool] = []
    done = threading.Event()
    with ab.Engine(layer) as engine:
        future = engine.submit(torch.ones(2))
        future.add_done_callback(
            lambda f: (pending.append(ab.is_pending(layer(f.result()))), done.set())
        )
        assert done.wait(10)
    assert pending == [False]


def test_training_mode_is_warned_of() -> None:
    model = TreeNet()
    with pytest.warns(UserWarning, match="TreeNet is in training mode"):
        ab.Engine(lambda x: model(x)).shutdown()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_live": 0}, "max_live=0"),
        ({"max_queue": 0}, "max_queue=0"),
        ({"max_delay": -1}, "max_delay=-1"),
        ({"slice_time": 0}, "slice_time=0"),
        ({"watchdog": 0}, "watchdog=0"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ab.Engine(lambda x: x, **settings)


def test_async_function() -> None:
    async def serve(x: Any) -> Any:
        return x

    with pytest.raises(TypeError, match="async"):
        ab.Engine(serve)


def test_stream_of_a_plain_function() -> None:
    with (
        ab.Engine(lambda x: x) as engine,
        pytest.raises(TypeError, match="not a generator function"),
    ):
        engine.stream(1)
