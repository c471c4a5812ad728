"""A block is not open where its code is suspended, at an await or a yield."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

linear = nn.Linear(4, 3)


async def pause() -> None:
    await asyncio.sleep(0)


async def awaits_in_the_block() -> None:
    with ab.batch():
        linear(torch.ones(4))
        await pause()


async def awaits_in_a_nested_statement() -> None:
    with ab.batch():
        for _ in range(2):
            try:
                await pause()
            finally:
                linear(torch.ones(4))


async def iterates_in_the_block() -> None:
    with ab.batch():
        async for _ in ticks():
            pass


async def ticks() -> AsyncIterator[int]:
    yield 0


@contextlib.contextmanager
def my_block() -> Iterator[None]:
    with ab.batch():
        yield


async def awaits_in_a_manager() -> None:
    with my_block():
        await pause()


@pytest.mark.parametrize(
    "function",
    [
        awaits_in_the_block,
        awaits_in_a_nested_statement,
        iterates_in_the_block,
        awaits_in_a_manager,
    ],
)
def test_an_await_in_a_block_is_an_error(function: object) -> None:
    with pytest.raises(RuntimeError, match="Await before the block or after it") as error:
        asyncio.run(function())  # type: ignore[operator]
    assert "test_suspension.py:" in str(error.value)
    assert not ab.is_pending(linear(torch.ones(4)))  # nothing is open


def test_awaits_around_a_block_are_none() -> None:
    async def run() -> Tensor:
        await pause()
        with ab.batch():
            y = linear(torch.ones(4))
            assert ab.is_pending(y)
        await pause()
        with contextlib.suppress(ValueError), ab.batch():
            pass
        await pause()
        return y

    torch.testing.assert_close(asyncio.run(run()), linear(torch.ones(4)))


def test_tasks_with_blocks_do_not_meet() -> None:
    async def other() -> bool:
        await pause()
        return ab.is_pending(linear(torch.ones(4)))

    async def trainer() -> int:
        x = torch.ones(4)
        await pause()
        with ab.batch() as scope:
            kept = [linear(x) for _ in range(3)]
        await pause()
        assert len(kept) == 3
        return scope.report().ops

    async def both() -> tuple[bool, int]:
        return await asyncio.gather(other(), trainer())

    assert tuple(asyncio.run(both())) == (False, 3)


def test_a_yield_in_a_block_is_an_error() -> None:
    def results() -> Iterator[Tensor]:
        with ab.batch():
            for _ in range(3):
                yield linear(torch.ones(4))

    with pytest.raises(RuntimeError, match="yield them after it, or decorate"):
        next(results())
    assert not ab.is_pending(linear(torch.ones(4)))


def test_a_yield_behind_a_block_is_none() -> None:
    def results() -> Iterator[Tensor]:
        for _ in range(3):
            with ab.batch():
                y = linear(torch.ones(4))
            yield y

    for y in results():
        torch.testing.assert_close(y, linear(torch.ones(4)))


def test_a_context_manager_may_open_a_block() -> None:
    with my_block():
        assert ab.is_pending(linear(torch.ones(4)))
    assert not ab.is_pending(linear(torch.ones(4)))


def test_async_functions_are_not_decorated() -> None:
    with pytest.raises(TypeError, match="async function 'test_async_functions_are_not_decorated"):

        @ab.batch()
        async def run() -> None: ...

    with pytest.raises(TypeError, match="around the part that does not await"):

        @ab.batch
        async def stream() -> AsyncIterator[int]:
            yield 0
