"""Functions that store a size in a memo table, a cache or an object store an ordinary number."""

from __future__ import annotations

import collections
import decimal
import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_dynamic_cells import Counted, alone, compare, rows
from torch import Tensor


class Places:
    """Places where a function may store values that it has computed for a size."""

    kind: Any = None

    def __init__(self) -> None:
        self.table: dict[Any, Any] = {}
        self.ordered: collections.OrderedDict[Any, Any] = collections.OrderedDict()
        self.last: Any = (0, 0)
        self.items: list[Any] = [0, 0]
        self.recent: collections.deque[Any] = collections.deque(maxlen=2)
        self.seen: set[Any] = set()


class Slots:
    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last: Any = (0, 0)


class OneSlot:
    __slots__ = "last"

    def __init__(self) -> None:
        self.last: Any = (0, 0)


class PrivateSlot:
    __slots__ = ("__last",)

    def __init__(self) -> None:
        self.__last: Any = (0, 0)

    @property
    def last(self) -> Any:
        return self.__last

    @last.setter
    def last(self, value: Any) -> None:
        self.__last = value


GLOBAL: dict[Any, Any] = {}


def memo(table: Any) -> Callable[[Any], Any]:
    def square(n: Any) -> Any:
        if n not in table:
            table[n] = n * n
        return table[n]

    return square


def last(place: Any) -> Callable[[Any], Any]:
    def square(n: Any) -> Any:
        if place.last[0] != n:
            place.last = (n, n * n)
        return place.last[1]

    return square


def last_of_class(n: Any) -> Any:
    if Places.kind is None or Places.kind[0] != n:
        Places.kind = (n, n * n)
    return Places.kind[1]


def in_list(places: Places) -> Callable[[Any], Any]:
    def square(n: Any) -> Any:
        if places.items[0] != n:
            places.items[:] = [n, n * n]
        return places.items[1]

    return square


def in_closure() -> Callable[[Any], Any]:
    of, result = 0, 0

    def square(n: Any) -> Any:
        nonlocal of, result
        if of != n:
            of, result = n, n * n
        return result

    return square


def in_deque(places: Places) -> Callable[[Any], Any]:
    def square(n: Any) -> Any:
        places.recent.append(((n,), n * n))
        places.seen.add(n)
        return places.recent[-1][1]

    return square


def squares() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    places = Places()
    yield "global", memo(GLOBAL)
    yield "attribute", memo(places.table)
    yield "ordered", memo(places.ordered)
    yield "last", last(Places())
    yield "slots", last(Slots())
    yield "one slot", last(OneSlot())
    yield "private slot", last(PrivateSlot())
    yield "class", last_of_class
    yield "list", in_list(places)
    yield "closure", in_closure()
    yield "deque and set", in_deque(places)
    yield "cache", functools.lru_cache(None)(lambda n: n * n)
    yield "bounded cache", functools.lru_cache(4)(lambda n: n * n)
    cached = functools.lru_cache(None)(lambda n, width: n * n * width)
    yield "cache of two", lambda n: cached(n, 1)
    shapes = functools.lru_cache(16)(lambda shape: (shape, shape[0] * shape[0]))
    yield "cache of shapes", lambda n: shapes((n, 2))[1]


SQUARES = dict(squares())


@pytest.mark.parametrize("name", SQUARES)
def test_what_is_kept_is_ordinary(name: str) -> None:
    square, xs = SQUARES[name], rows()
    GLOBAL.clear()
    cell = ab.cell(lambda x: x.exp() * square(x.shape[0]), dynamic=True)
    for _ in range(3):
        with ab.batch():
            found = [cell(x) for x in xs]
        torch.testing.assert_close(found, [x.exp() * len(x) ** 2 for x in xs])
    for x in xs:
        assert type(square(len(x))) is int
        assert torch.ones(square(len(x))).numel() == len(x) ** 2
    assert all(type(key) is int and type(value) is int for key, value in GLOBAL.items())


@pytest.mark.parametrize("name", SQUARES)
def test_what_one_call_keeps_is_ordinary(name: str) -> None:
    GLOBAL.clear()
    Places.kind = None
    square, x = dict(squares())[name], rows()[0]
    with ab.batch():
        ab.cell(lambda x: x.exp() * square(x.shape[0]), dynamic=True)(x)
    assert type(square(len(x))) is int


def test_a_table_of_a_size_that_never_differs() -> None:
    """The first call fills the table, and later calls only read it."""
    table: dict[Any, Any] = {}
    square, xs = memo(table), rows()
    runs, why = compare(lambda x: x.exp() * square(x.shape[1]), alone(xs))
    assert runs <= 4
    assert why == ""


def test_the_report_says_that_a_size_is_kept() -> None:
    square, xs = last(Places()), rows()
    _, why = compare(lambda x: x.exp() * square(x.shape[0]), alone(xs) * 2)
    assert "it stores a size in a dict or an object" in why


def of_generator(n: Any) -> float:
    return float(torch.rand((), generator=torch.Generator().manual_seed(n)))


def of_exact_type(n: Any) -> Any:
    if type(n) is not int:
        raise ValueError("n must be an int")
    return n


NEEDS_INTS: dict[str, Callable[[Any], Any]] = {
    "json": lambda n: json.loads(json.dumps(n)),
    "decimal": lambda n: float(decimal.Decimal(n)),
    "generator": of_generator,
    "exact type": of_exact_type,
}


@pytest.mark.parametrize("name", NEEDS_INTS)
def test_code_that_needs_an_ordinary_int(name: str) -> None:
    function = NEEDS_INTS[name]
    _, why = compare(lambda x: x.exp() * function(x.shape[0]), alone(rows()))
    assert "if a size is a traced number instead of an int" in why


def test_changes_before_such_an_error_are_undone() -> None:
    places = Places()

    def function(x: Tensor, places: Places) -> Tensor:
        places.items.append(x.exp())
        return x * of_exact_type(x.shape[0]) + torch.rand(x.shape, dtype=x.dtype)

    cell, x = ab.cell(function, dynamic=True), rows()[0]
    torch.manual_seed(3)
    with ab.batch():
        found = cell(x, places)
    torch.manual_seed(3)
    torch.testing.assert_close(found, x * len(x) + torch.rand(x.shape, dtype=x.dtype))
    assert len(places.items) == 3


class Interruption(BaseException):
    """An exception like that of a cancelled fiber."""


def test_an_interruption_leaves_arguments_ordinary() -> None:
    def interrupted(x: Tensor, table: dict[str, Any]) -> Tensor:
        table["rows"], table["count"] = x.shape[0], table["count"] * 2
        raise Interruption

    table: dict[str, Any] = {"count": 3, "x": torch.ones(2)}
    with ab.batch(), pytest.raises(Interruption):
        ab.cell(interrupted, dynamic=True)(rows()[0], table)
    assert (type(table["rows"]), type(table["count"])) == (int, int)


def test_is_integer() -> None:
    """local-attention checks in this way whether a length is a multiple."""
    runs, why = compare(
        lambda x: x.exp() if (x.shape[0] / 2).is_integer() else x.sin(), alone(rows()) * 2
    )
    assert runs <= 4
    assert why == ""


def test_a_program_for_each_size() -> None:
    """The second call with a size is traced too, and the third is replayed."""
    xs = rows()[:3]
    counted = Counted(lambda x: sum(x[i].exp() for i in range(x.shape[0])))
    cell = ab.cell(counted, dynamic=True)
    for _ in range(4):
        with ab.batch():
            found = [cell(x) for x in xs]
        torch.testing.assert_close(found, [x.exp().sum(0) for x in xs])
    assert counted.runs == 6


READS: dict[str, Callable[[Tensor], Any]] = {
    "int": lambda ids: int(ids.max()) + 1,
    "float": lambda ids: float(ids.max()) + 1,
    "index": lambda ids: (3, 5)[ids.max()],
    "range": lambda ids: sum(range(ids.max())),
    "tolist": lambda ids: sum(ids.clamp(max=0).unique().tolist()),
}


@pytest.mark.parametrize("name", READS)
def test_numbers_of_data_are_read(name: str) -> None:
    """Graph libraries count the graphs of a minibatch like this: ``int(batch.max()) + 1``."""
    calls = [(x, torch.zeros(len(x), dtype=torch.long)) for x in rows()]
    read = READS[name]
    runs, why = compare(lambda x, ids: x.exp() * read(ids), calls)
    assert runs == 2
    assert why == ""


def test_the_report_names_arguments_that_cannot_be_compared() -> None:
    _, why = compare(lambda xs: xs[0].exp(), [(collections.deque([x]),) for x in rows()])
    assert "an argument has a type that cannot be compared between calls" in why
