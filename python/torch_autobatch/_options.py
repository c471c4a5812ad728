"""Checks of the arguments that users give, with errors that say what to do."""

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from types import AsyncGeneratorType, CoroutineType
from typing import Any

import torch


def check_choice(call: str, name: str, value: object, choices: Collection[str]) -> None:
    """Of a string.

    Raises:
        TypeError: if it is none.
        ValueError: if it is none of the choices.
    """
    expected = ", ".join(repr(choice) for choice in choices)
    if not isinstance(value, str):
        raise TypeError(f"{call}({name}={value!r}): expected one of {expected}")
    if value not in choices:
        raise ValueError(f"{call}({name}={value!r}): expected one of {expected}")


def check_truths(call: str, values: Mapping[str, object], *, or_none: Collection[str] = ()) -> None:
    """Of True, False and what equals one of them; those named in ``or_none`` may be None.

    Raises:
        TypeError: if one is something else.
    """
    for name, value in values.items():
        if value is True or value is False or (value is None and name in or_none):
            continue
        if isinstance(value, str) or value not in (True, False):
            also = " or None" if name in or_none else ""
            raise TypeError(f"{call}({name}={value!r}): expected True, False{also}")


def check_count(call: str, name: str, value: object) -> None:
    """Of a whole number that limits something.

    Raises:
        TypeError: if it is no whole number and not None.
        ValueError: if it is less than 1.
    """
    if value is None:
        return
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"{call}({name}={value!r}): expected a whole number of at least 1, or None"
        ) from None
    if count < 1:
        raise ValueError(f"{call}({name}={value!r}): expected at least 1, or None")


def check_decorated(call: str, function: Callable[..., Any]) -> None:
    """Of what a block is to decorate; ``call`` is how the block is opened.

    Raises:
        TypeError: if it is no function, or an async one.
    """
    if isinstance(function, _DESCRIPTORS):
        kind = type(function).__name__
        raise TypeError(
            f"{call}() decorates functions, and got a {kind}: write @{call} below @{kind}, next "
            "to the function"
        )
    if not callable(function):
        raise TypeError(f"{call}() decorates functions, and got {function!r}")
    if isinstance(function, torch.nn.Module):
        raise TypeError(
            f"{call}() decorates functions, and got a {type(function).__name__}: call the module "
            "inside `with batch():`, or decorate the function that does"
        )
    if isinstance(function, type):
        raise TypeError(
            f"{call}() decorates functions, and got the class {function.__qualname__!r}: decorate "
            "the method that is to be batched"
        )
    if is_async(function):
        raise TypeError(
            f"{call}() can't decorate the async function {name_of(function)!r}: the block "
            "would be open across its awaits, and capture other tasks' ops. Put "
            f"`with {call}():` around the part that does not await."
        )


_DESCRIPTORS = (classmethod, staticmethod, property, cached_property)


def is_descriptor(value: object) -> bool:
    return isinstance(value, _DESCRIPTORS)


def name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__)


def is_async(function: Callable[..., Any]) -> bool:
    """Also what a ``partial`` wraps, and an object whose ``__call__`` is async."""
    while isinstance(function, partial):
        function = function.func
    return any(
        inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f)
        for f in (function, getattr(type(function), "__call__", None))  # noqa: B004
    )


def check_results(call: str, function: Callable[..., Any], *results: object) -> None:
    """Of what calls of a function returned, which may be async without its being seen.

    Raises:
        TypeError: if nothing has run yet of what it called: it is a coroutine.
    """
    late = [result for result in results if isinstance(result, CoroutineType | AsyncGeneratorType)]
    if not late:
        return
    for result in late:
        if isinstance(result, CoroutineType):
            result.close()
    raise TypeError(
        f"{call}() can't run {name_of(function)!r}: what it returned is a "
        f"{type(late[0]).__name__}, whose code would run after the block has ended. Await outside "
        "the block, and put the part that does not await into it."
    )
