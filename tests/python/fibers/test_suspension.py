"""A block is not open while its code is suspended at an await or a yield."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

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


async def awaits_in_a_handler() -> None:
    with ab.batch():
        kept = [linear(torch.ones(4)) for _ in range(2)]
        try:
            kept[2].sum()
        except IndexError:
            await pause()


async def awaits_in_a_comprehension() -> None:
    with ab.batch():
        _ = [await pause() for _ in range(2)]  # type: ignore[func-returns-value]


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


class MyBlock:
    """A context manager that opens a block in its `__enter__`."""

    def __enter__(self) -> None:
        self.block = ab.batch()
        self.block.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.block.__exit__(*error)

    async def __aenter__(self) -> None:
        await pause()
        self.__enter__()

    async def __aexit__(self, *error: Any) -> None:
        self.__exit__(*error)


def open_in(stack: contextlib.ExitStack) -> None:
    stack.enter_context(ab.batch())


async def awaits_in_a_manager() -> None:
    with my_block():
        await pause()


async def awaits_in_a_class_that_is_one() -> None:
    with MyBlock():
        await pause()


async def awaits_in_an_async_one() -> None:
    async with MyBlock():
        await pause()


async def awaits_in_a_stack() -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(ab.batch())
        await pause()


async def awaits_in_an_async_stack() -> None:
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(MyBlock())
        await pause()


async def awaits_in_a_stack_that_a_function_fills() -> None:
    with contextlib.ExitStack() as stack:
        open_in(stack)
        await pause()


async def awaits_after_it_is_entered_by_hand() -> None:
    block = ab.batch()
    block.__enter__()
    try:
        await pause()
    finally:
        block.__exit__(None, None, None)


@pytest.mark.parametrize(
    "function",
    [
        awaits_in_the_block,
        awaits_in_a_nested_statement,
        awaits_in_a_handler,
        awaits_in_a_comprehension,
        iterates_in_the_block,
        awaits_in_a_manager,
        awaits_in_a_class_that_is_one,
        awaits_in_an_async_one,
        awaits_in_a_stack,
        awaits_in_an_async_stack,
        awaits_in_a_stack_that_a_function_fills,
        awaits_after_it_is_entered_by_hand,
    ],
)
def test_an_await_in_a_block_is_an_error(function: object) -> None:
    with pytest.raises(RuntimeError, match="Await before the block or after it") as error:
        asyncio.run(function())  # type: ignore[operator]
    assert "test_suspension.py:" in str(error.value)
    assert not ab.is_pending(linear(torch.ones(4)))  # no block is open


def yields_after_it_is_left_by_hand() -> Iterator[Tensor]:
    block = ab.batch()
    block.__enter__()
    result = linear(torch.ones(4))
    block.__exit__(None, None, None)
    yield result


def test_a_block_that_is_left_by_hand_is_not_open_at_the_yield() -> None:
    [result] = yields_after_it_is_left_by_hand()
    assert not ab.is_pending(result)


def fill_and_close() -> Tensor:
    with contextlib.ExitStack() as stack:
        open_in(stack)
        return linear(torch.ones(4))


async def awaits_around_a_stack() -> Tensor:
    await pause()
    with contextlib.ExitStack() as stack:
        stack.enter_context(ab.batch())
        y = linear(torch.ones(4))
    fill_and_close()
    await pause()
    return y


async def awaits_around_a_class() -> Tensor:
    async with MyBlock():
        y = linear(torch.ones(4))
    with MyBlock():
        linear(torch.ones(4))
    await pause()
    return y


async def awaits_around_handlers_of_the_body() -> Tensor:
    """From Python 3.12 on, a comprehension has a handler, which comes after all other code."""
    with ab.batch():
        ys = [linear(torch.ones(4)) for _ in range(2)]
        try:
            ys[2].sum()
        except IndexError:
            ys.append(ys[0])
    await pause()
    return ys[2]


async def awaits_in_a_handler_around() -> Tensor:
    y = torch.ones(0)
    try:
        with ab.batch():
            y, _ = [linear(torch.ones(4)) for _ in range(2)]
            raise KeyError
    except KeyError:
        await pause()
    finally:
        await pause()
    return y


@pytest.mark.parametrize(
    "function",
    [
        awaits_around_a_stack,
        awaits_around_a_class,
        awaits_around_handlers_of_the_body,
        awaits_in_a_handler_around,
    ],
)
def test_awaits_around_it_are_none(
    function: Callable[[], Coroutine[Any, Any, Tensor]],
) -> None:
    torch.testing.assert_close(asyncio.run(function()), linear(torch.ones(4)))


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

    with pytest.raises(RuntimeError, match="yield them after the block, or decorate"):
        next(results())
    assert not ab.is_pending(linear(torch.ones(4)))


def test_a_yield_in_a_stack_is_an_error() -> None:
    def results() -> Iterator[Tensor]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(ab.batch())
            yield linear(torch.ones(4))

    with pytest.raises(RuntimeError, match="across a yield"):
        next(results())
    assert not ab.is_pending(linear(torch.ones(4)))


def test_a_yield_in_eager_code_is_none() -> None:
    def results() -> Iterator[Tensor]:
        with ab.eager():
            yield linear(torch.ones(4))
        with ab.batch(enabled=False):
            yield linear(torch.ones(4))

    assert [ab.is_pending(y) for y in results()] == [False, False]


def test_a_yield_in_eager_code_of_an_open_block_is_an_error() -> None:
    """The block's own ops would run eagerly until the generator resumes."""

    def results() -> Iterator[Tensor]:
        with ab.eager():
            yield linear(torch.ones(4))

    with pytest.raises(RuntimeError, match="across a yield"), ab.batch():
        next(results())


@pytest.fixture
def block_of_a_fixture() -> Iterator[ab.batch]:
    with ab.batch() as block:
        yield block


def test_a_fixture_may_hold_a_block(block_of_a_fixture: ab.batch) -> None:
    assert ab.is_pending(linear(torch.ones(4)))
    assert block_of_a_fixture.report().ops == 2


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
