"""Instances that fail, are ended early, or recurse deeply."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

import greenlet
import pytest
import torch
import torch_autobatch as ab
from mapping import agree, same
from torch import Tensor, nn
from torch_autobatch import _C

DOUBLE = torch.float64


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 3, dtype=DOUBLE)


def inputs(count: int = 6) -> list[tuple[int, Tensor]]:
    return [(i, torch.randn(2, 3, dtype=DOUBLE)) for i in range(count)]


class OddError(Exception):
    """An exception class of the tests."""


def test_an_error_names_its_instance(layer: nn.Linear) -> None:
    def inner(i: int, x: Tensor) -> float:
        value = layer(x).sum().item()
        if i == 3:
            raise OddError("three", value)
        return value

    with pytest.raises(OddError, match="three") as caught:
        ab.map(lambda pair: inner(*pair), inputs())
    assert caught.value.__notes__ == ["in instance 3 of ab.map"]
    lines = traceback.format_exception(caught.value)
    assert any('raise OddError("three", value)' in line for line in lines)
    assert any(line.strip().startswith("File") and "in inner" in line for line in lines)


def test_the_error_is_the_loops(layer: nn.Linear) -> None:
    """Instance 4 fails first, but a loop would raise the error of instance 1."""
    done: list[int] = []

    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        for _ in range(9 - i):
            x = layer(x).tanh()
            x.sum().item()
        if i in (1, 4):
            raise OddError(i)
        done.append(i)
        return x

    with pytest.raises(OddError) as caught:
        ab.map(function, inputs())
    assert caught.value.args == (1,)
    assert caught.value.__notes__ == ["in instance 1 of ab.map"]
    assert 0 in done


def test_others_are_ended_and_clean_up(layer: nn.Linear) -> None:
    """The ``finally`` blocks of the other instances run, and may read values."""
    ended: dict[int, Any] = {}

    def function(pair: tuple[int, Tensor]) -> None:
        i, x = pair
        h = layer(x)
        other = layer(x * 2)
        try:
            try:
                h.sum().item()
                if i == 2:
                    raise OddError
                layer(h).sum().item()
            except BaseException as error:
                ended[i] = [type(error)]
                raise
        finally:
            ended.setdefault(i, []).append(other.sum().item())

    xs = inputs()
    with pytest.raises(OddError):
        ab.map(function, xs)
    assert list(ended) == [2, 3, 4, 5, 0, 1] or sorted(ended) == [0, 1, 2, 3, 4, 5]
    assert ended[2][0] is OddError
    assert all(ended[i][0] is greenlet.GreenletExit for i in (3, 4, 5))
    for i, x in xs:
        same(ended[i][-1], layer(x * 2).sum().item())


def test_one_that_refuses_to_end(layer: nn.Linear) -> None:
    """The instance's reads are computed immediately, and its result is dropped."""
    seen: list[float] = []

    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        try:
            layer(x).sum().item()
            if i == 0:
                raise OddError
            layer(x).sum().item()
        except greenlet.GreenletExit:
            seen.extend(layer(x * k).sum().item() for k in range(3))
        return x

    with pytest.raises(OddError):
        ab.map(function, inputs(3))
    assert len(seen) == 6


def test_an_error_while_ending_is_reported_and_dropped(
    layer: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: dropped.append(u.exc_value))

    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        try:
            layer(x).sum().item()
            if i == 0:
                raise OddError
            layer(x).sum().item()
        finally:
            if i == 1:
                raise KeyError("while ending")

    with pytest.raises(OddError):
        ab.map(function, inputs(3))
    assert [type(error) for error in dropped] == [KeyError]


def test_return_exceptions(layer: nn.Linear) -> None:
    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        value = layer(x).sum()
        if value.item() > 0 and i % 2:
            raise OddError(i)
        if i == 4:
            return torch.zeros(2) @ torch.zeros(3)
        return layer(x).sum() + value

    xs = inputs(9)
    found = ab.map(function, xs, return_exceptions=True)
    expected = ab.map(function, xs, return_exceptions=True, enabled=False)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(b, Exception):
            assert type(a) is type(b)
            assert str(a).startswith(str(b)[:40])
            assert a.__notes__ == [f"in instance {i} of ab.map"]
            assert a.__traceback__ is not None
        else:
            same(a, b)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_ends_all(layer: nn.Linear, kind: type[BaseException]) -> None:
    ended: list[int] = []

    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        try:
            layer(x).sum().item()
            if i == 4:
                raise kind
            layer(x).sum().item()
            ended.append(-1)
        finally:
            ended.append(i)

    with pytest.raises(kind):
        ab.map(function, inputs(), return_exceptions=True)
    assert sorted(ended) == list(range(6))
    assert not torch._C._dispatch_tls_is_dispatch_key_included(_C.capture_key)


# --- errors that depend on values, and are raised at a read ---


def lookup(table: Tensor, i: int, x: Tensor) -> Any:
    """Instances 1 and 3 look up rows that do not exist."""
    index = torch.tensor([i if i not in (1, 3) else 100 + i])
    row = nn.functional.embedding(index, table)
    return row.sum() * x.sum()


def test_a_captured_op_fails_for_its_own_instances() -> None:
    """Each failing instance gets its own error at its read. The others continue."""
    table = torch.randn(9, 3, dtype=DOUBLE, requires_grad=True)

    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        try:
            return lookup(table, i, x).item()
        except IndexError:
            return lookup(table, 0, x).item(), "repaired"

    agree(function, inputs(), [table])


def test_errors_of_several_instances() -> None:
    table = torch.randn(9, 3, dtype=DOUBLE, requires_grad=True)
    xs = inputs()
    with pytest.raises(IndexError) as caught:
        ab.map(lambda pair: lookup(table, *pair).item(), xs)
    assert caught.value.__notes__ == ["in instance 1 of ab.map"]
    for read in (True, False):

        def function(pair: tuple[int, Tensor], read: bool = read) -> Any:
            result = lookup(table, *pair)
            return result.item() if read else {"result": [result]}

        found = ab.map(function, xs, return_exceptions=True)
        expected = ab.map(function, xs, return_exceptions=True, enabled=False)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert isinstance(a, IndexError) == isinstance(b, IndexError) == (i in (1, 3))
            if isinstance(a, IndexError):
                assert f"in instance {i} of ab.map" in a.__notes__
            else:
                same(a, b)


def test_an_error_nobody_read() -> None:
    """The error is raised at the end, and names the instance."""
    table = torch.randn(9, 3, dtype=DOUBLE, requires_grad=True)
    with pytest.raises(IndexError) as caught:
        ab.map(lambda pair: lookup(table, *pair), inputs())
    assert caught.value.__notes__ == ["in instance 1 of ab.map"]


def test_an_op_that_eager_refuses_at_once(layer: nn.Linear) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        ab.map(lambda pair: layer(pair[1][:, : 3 - (pair[0] == 2)]).sum().item(), inputs())
    assert caught.value.__notes__ == ["in instance 2 of ab.map"]


# --- instances from an iterator, made on demand ---


def test_an_iterator_that_fails(layer: nn.Linear) -> None:
    def make() -> Iterator[Any]:
        yield from inputs(3)
        raise OddError("no more")

    with pytest.raises(OddError, match="no more") as caught:
        ab.map(lambda pair: layer(pair[1]).sum().item(), make())
    assert not hasattr(caught.value, "__notes__")


def test_max_live(layer: nn.Linear) -> None:
    """At most `max_live` instances run, and no instance is created before it can start."""
    live: set[int] = set()
    most = 0
    made = 0

    def make() -> Iterator[Any]:
        nonlocal made
        for pair in inputs(20):
            made += 1
            yield pair

    def function(pair: tuple[int, Tensor]) -> Any:
        nonlocal most
        i, x = pair
        live.add(i)
        most = max(most, len(live))
        assert made <= i + 1
        for _ in range(i % 4):
            x = layer(x).tanh()
            x.sum().item()
        live.remove(i)
        return i, x

    results = ab.map(function, make(), max_live=3)
    assert [i for i, _ in results] == list(range(20))
    assert most <= 3
    made = 0
    agree(lambda pair: function(pair)[1], inputs(8), layer, max_live=2)


def test_arguments_are_checked(layer: nn.Linear) -> None:
    with pytest.raises(ValueError, match="max_live=0"):
        ab.map(layer, [], max_live=0)
    with pytest.raises(ValueError, match="policy='none'"):
        ab.map(layer, [], policy="none")
    with pytest.raises(TypeError, match="not iterable"):
        ab.map(layer, 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ab.map(3, [1])  # type: ignore[arg-type]


def test_recursion(layer: nn.Linear) -> None:
    """Recursion can be as deep as in a loop. Deeper recursion raises Python's error."""

    def down(x: Tensor, depth: int) -> Tensor:
        if depth == 0 or layer(x).sum().item() > 1e9:
            return x
        return down(x * 0.9, depth - 1)

    agree(lambda pair: down(pair[1], 150), inputs(3), layer)

    def forever(n: int) -> int:
        return forever(n + 1) + 1

    def function(pair: tuple[int, Tensor]) -> int:
        layer(pair[1]).sum().item()
        return forever(0) if pair[0] == 1 else down(pair[1], 20).sum().item() > 0

    with pytest.raises(RecursionError) as caught:
        ab.map(function, inputs(3))
    assert caught.value.__notes__ == ["in instance 1 of ab.map"]


def test_it_works_in_coroutines_and_threads(layer: nn.Linear) -> None:
    xs = inputs()

    def function(pair: tuple[int, Tensor]) -> Any:
        h = layer(pair[1])
        return layer(h).sum() if h.sum().item() > 0 else h.sum()

    expected = [function(x) for x in xs]

    async def main() -> Any:
        return ab.map(function, xs)

    same(asyncio.run(main()), expected)
    found: dict[int, Any] = {}

    def work(k: int) -> None:
        found[k] = [ab.map(function, xs) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in found.values():
        for result in results:
            same(result, expected)


def test_another_thread_reads_meanwhile(layer: nn.Linear) -> None:
    """A suspended fiber holds no lock."""
    xs = inputs()

    def function(pair: tuple[int, Tensor]) -> Any:
        h = layer(pair[1])
        seen: list[float] = []
        thread = threading.Thread(target=lambda: seen.append(h.sum().item()))
        if pair[0] % 2:
            thread.start()
            thread.join()
        value = layer(h).sum().item()
        return value, seen

    agree(function, xs, layer)


def test_dropped_pools_leave_nothing(layer: nn.Linear) -> None:
    """Tensors of ended instances are freed."""
    import gc
    import weakref

    alive: list[Any] = []

    def function(pair: tuple[int, Tensor]) -> Any:
        h = layer(pair[1])
        alive.append(weakref.ref(h))
        h.sum().item()
        if pair[0] == 3:
            raise OddError
        layer(h).sum().item()
        return None

    with pytest.raises(OddError):
        ab.map(function, inputs())
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6
