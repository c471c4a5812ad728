"""Checks the arguments that users pass. The errors say what to do."""

import inspect
import operator
from collections.abc import Callable, Collection, Mapping
from functools import cached_property, partial
from types import AsyncGeneratorType, CoroutineType
from typing import Any

import torch


def check_choice(call: str, name: str, value: object, choices: Collection[str]) -> None:
    """Checks that a value is one of the strings ``choices``.

    Raises:
        TypeError: if the value is not a string.
        ValueError: if the value is a string that is not in ``choices``.
    """
    expected = ", ".join(repr(choice) for choice in choices)
    if not isinstance(value, str):
        raise TypeError(f"{call}({name}={value!r}): expected one of {expected}")
    if value not in choices:
        raise ValueError(f"{call}({name}={value!r}): expected one of {expected}")


def check_truths(call: str, values: Mapping[str, object], *, or_none: Collection[str] = ()) -> None:
    """Checks that each value equals True or False. Values named in ``or_none`` may be None.

    Raises:
        TypeError: if a value does not equal True or False and must not be None.
    """
    for name, value in values.items():
        if value is True or value is False or (value is None and name in or_none):
            continue
        if isinstance(value, str) or value not in (True, False):
            expected = "True, False or None" if name in or_none else "True or False"
            raise TypeError(f"{call}({name}={value!r}): expected {expected}")


def check_count(call: str, name: str, value: object) -> None:
    """Checks a limit: an integer of at least 1, or None.

    Raises:
        TypeError: if the value is neither an integer nor None.
        ValueError: if the value is less than 1.
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
    """Checks the function that a block decorates. ``call``: the name of the decorator.

    Raises:
        TypeError: if ``function`` is not a function, or is an async function.
    """
    if isinstance(function, _DESCRIPTORS):
        kind = type(function).__name__
        raise TypeError(
            f"{call}() decorates functions, but got a {kind}: write @{call} below @{kind}, next "
            "to the function"
        )
    if not callable(function):
        raise TypeError(f"{call}() decorates functions, but got {function!r}")
    if isinstance(function, torch.nn.Module):
        raise TypeError(
            f"{call}() decorates functions, but got a {type(function).__name__}: call the module "
            "inside `with batch():`, or decorate the function that calls it"
        )
    if isinstance(function, type):
        raise TypeError(
            f"{call}() decorates functions, but got the class {function.__qualname__!r}: decorate "
            "the method to be batched"
        )
    if is_async(function):
        raise TypeError(
            f"{call}() can't decorate the async function {name_of(function)!r}: the block "
            "would stay open across its awaits, and capture ops of other tasks. Put "
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
    """Whether a function, the function of a ``partial``, or an object's ``__call__`` is async."""
    while isinstance(function, partial):
        function = function.func
    return any(
        inspect.iscoroutinefunction(f) or inspect.isasyncgenfunction(f)
        for f in (function, getattr(type(function), "__call__", None))  # noqa: B004
    )


def check_results(call: str, function: Callable[..., Any], *results: object) -> None:
    """Checks the results of a function, which may be async although ``is_async`` is false.

    Raises:
        TypeError: if a result is a coroutine or an async generator, so that its code has not run.
    """
    late = [result for result in results if isinstance(result, CoroutineType | AsyncGeneratorType)]
    if not late:
        return
    for result in late:
        if isinstance(result, CoroutineType):
            result.close()
    raise TypeError(
        f"{call}() can't run {name_of(function)!r}: the function returned a "
        f"{type(late[0]).__name__}, whose code would run after the end of the block. Await outside "
        "the block, and put the code that does not await into the block."
    )
