"""Dynamic cells that are difficult to replay: each call gives the eager result."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch_autobatch as ab
from helpers_dynamic_cells import SIZES, WIDTH, Function
from torch import Tensor, nn

LAYER = nn.Linear(WIDTH, WIDTH)
START = torch.ones(1, WIDTH)


class Box:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Starts(nn.Module):
    def forward(self, start: Tensor, x: Tensor) -> Tensor:
        return LAYER(x) + start + START


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Pair(NamedTuple):
    h: Tensor
    n: int


@dataclasses.dataclass
class Doubled:
    h: Tensor
    n: int | None = 3

    def __post_init__(self) -> None:
        self.h = self.h * 2


@dataclasses.dataclass
class Node:
    h: Tensor
    parent: Node | None = None
    children: list[Node] = dataclasses.field(default_factory=list)


def facts(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Returns comparable facts: types, order, values, and which objects are identical."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (int, float, str, type(None))):
        return (type(value).__name__, str(value))
    if id(value) in seen:
        return ("known", str(seen[id(value)]))
    seen[id(value)] = len(seen)
    kind = type(value).__name__
    if isinstance(value, dict):
        return [kind, *((facts(k, seen), facts(v, seen)) for k, v in value.items())]
    if isinstance(value, (list, tuple, set, collections.deque)):
        return [kind, *(facts(item, seen) for item in value)]
    names = vars(value) if hasattr(value, "__dict__") else {n: getattr(value, n) for n in ("x",)}
    return [kind, *((name, facts(item, seen)) for name, item in names.items())]


def assert_same(ours: Any, eager: Any) -> None:
    if isinstance(eager, Tensor):
        torch.testing.assert_close(ours, eager)
    elif isinstance(eager, (list, tuple)):
        assert len(ours) == len(eager)
        for pair in zip(ours, eager, strict=True):
            assert_same(*pair)
    else:
        assert ours == eager


def check(function: Function, arguments: Callable[[int, int], tuple[Any, ...]]) -> None:
    """Checks several calls. `arguments` returns the arguments of the i-th call, with n rows."""
    outcomes = []
    cell = ab.cell(copy.deepcopy(function), dynamic=True)  # ab.cell() changes a module in place
    for of_call, enabled in ((cell, True), (function, False)):
        given = [arguments(i, n) for i, n in enumerate(SIZES)]
        with ab.batch(enabled=enabled):
            outcomes.append([(of_call(*args), args) for args in given])
    assert_same(*([facts(call) for call in outcome] for outcome in outcomes))


def rows(i: int, n: int) -> Tensor:
    return torch.arange(float(n * WIDTH)).view(n, WIDTH).sin() + i


def masks(x: Tensor) -> tuple[Tensor, Tensor]:
    mask = x > 0
    first = ~mask
    mask &= x < 1
    return LAYER(x) * first, LAYER(x) * ~mask


def counts(x: Tensor, step: Tensor) -> Tensor:
    step.add_(1)
    return LAYER(x) * step.item()


def conditions(x: Tensor, count: Tensor) -> Tensor:
    count, h = count.clone(), LAYER(x)
    if count:
        h = h.sin()
    count -= 1
    return h.cos() if count else h


def overlapping(x: Tensor, piece: Tensor) -> tuple[Tensor, Tensor]:
    before = piece.sin()
    x.add_(1)
    return LAYER(before), LAYER(piece.sin())


def best(x: Tensor) -> tuple[Tensor, Tensor]:
    values, places = torch.zeros(WIDTH), torch.zeros(WIDTH, dtype=torch.long)
    before = values.sin()
    torch.max(x, 0, out=(values, places))
    return LAYER(before), LAYER(values.sin())


def of_sort(x: Tensor) -> Tensor:
    return LAYER(x) if x.is_leaf else LAYER(x).sin()


def sorts(i: int, n: int) -> tuple[Tensor]:
    x = rows(i, n).requires_grad_()
    return (x if i < 4 else x * 1,)


def keeps_shapes(x: Tensor, box: Box) -> Tensor:
    box.shape, box.pair = x.shape, Pair(LAYER(x), x.shape[0])
    box.nested = ((x.shape[0], 2), (1, [x.shape[0]]))
    box.table[x.shape[0]] = x
    return LAYER(x)


def reorders(x: Tensor, box: Box) -> Tensor:
    first = box.table.pop("a")
    box.table["a"] = first
    box.z, box.y, box.w = x, LAYER(x), 1
    return LAYER(x)


def appends(x: Tensor, found: list[Tensor], table: dict[str, Tensor]) -> Tensor:
    found.append(LAYER(x))
    table["h"] = found[-1]
    return found[-1]


def stored_and_returned(x: Tensor, box: Box) -> list[Tensor]:
    box.x = [LAYER(x)]
    return box.x


def tree(x: Tensor) -> Node:
    root = Node(LAYER(x))
    root.children.append(Node(x, root))
    return root


def hashes(x: Tensor, box: Box, known: dict[int, int]) -> Tensor:
    box.x.append(LAYER(x))
    known.setdefault(x.shape[0], len(known))
    return box.x[-1]


def put(box: Box, name: str, value: Any) -> Tensor:
    setattr(box, name, value)
    return LAYER(value)


def emptied() -> Box:
    SAME.x = None
    return SAME


SAME = Box(x=None)

TRAPS: dict[str, tuple[Function, Callable[[int, int], tuple[Any, ...]]]] = {
    "a negative base": (lambda x: LAYER(x) * (-1) ** x.shape[0], lambda i, n: (rows(i, n),)),
    "masks": (masks, lambda i, n: (rows(i, n),)),
    "a counter": (counts, lambda i, n: (rows(i, n), torch.tensor(i))),
    "conditions": (conditions, lambda i, n: (rows(i, n), torch.tensor(2 if i < 3 else i % 3))),
    "overlapping": (overlapping, lambda i, n: ((x := rows(i, n + 1)), x[1:])),
    "several written": (best, lambda i, n: (rows(i, n),)),
    "a global": (
        lambda h, x: LAYER(x) + h + START,
        lambda i, n: (START if i < 2 else rows(i, 1), rows(i, n)),
    ),
    "a global of a module": (Starts(), lambda i, n: (START if i < 2 else rows(i, 1), rows(i, n))),
    "negative zero": (
        lambda x, s: LAYER(x) * torch.copysign(torch.ones(1), torch.full((1,), s)),
        lambda i, n: (rows(i, n), 0.0 if i < 4 else -0.0),
    ),
    "equal numbers": (
        lambda x, box: (LAYER(x), torch.full((x.shape[0],), box.p[0])),
        lambda i, n: (rows(i, n), Box(p=(2,) if i < 4 else (2.0,), x=START)),
    ),
    "sorts of tensors": (of_sort, sorts),
    "infinity": (
        lambda x, c: LAYER(x) if c.sum().item() < float("inf") else x,
        lambda i, n: (rows(i, n), torch.ones(n)),
    ),
    "shapes are kept": (keeps_shapes, lambda i, n: (rows(i, n), Box(table={}, x=START))),
    "order": (reorders, lambda i, n: (rows(i, n), Box(table={"a": START, "b": START * 2}))),
    "lists and dicts": (appends, lambda i, n: (rows(i, n), [START], {"a": START})),
    "empty lists": (appends, lambda i, n: (rows(i, n), [], {})),
    "an empty object": (lambda x, box: put(box, "x", x), lambda i, n: (rows(i, n), Box(x=None))),
    "the same empty one": (
        lambda x, box: put(box, "x", x),
        lambda i, n: (rows(i, n), emptied()),
    ),
    "a deque": (
        lambda x, box: box.x.append(LAYER(x)) or box.x[0] + 0,
        lambda i, n: (rows(i, n), Box(x=collections.deque([START]), y=START)),
    ),
    "slots": (lambda s: LAYER(s.x), lambda i, n: (Slots(rows(i, n)),)),
    "lists in a tuple": (
        lambda x, box: box.x[0].append(LAYER(x)) or box.x[0][-1],
        lambda i, n: (rows(i, n), Box(x=([START], [START]))),
    ),
    "stored and returned": (stored_and_returned, lambda i, n: (rows(i, n), Box(x=START))),
    "a dataclass": (lambda x: Doubled(LAYER(x), None), lambda i, n: (rows(i, n),)),
    "a tree": (tree, lambda i, n: (rows(i, n),)),
    "names like variables": (
        lambda x: {"a": "r2", "b": LAYER(x).relu_(), "c": "x0"},
        lambda i, n: (rows(i, n),),
    ),
    "a key that needs its number": (hashes, lambda i, n: (rows(i, n), Box(x=[START]), {})),
}


@pytest.mark.parametrize("name", TRAPS)
def test_traps(name: str) -> None:
    check(*TRAPS[name])


def test_long_chains_of_objects_are_refused_in_short_time() -> None:
    chain = Box(x=START, next=None)
    for _ in range(2000):
        chain = Box(x=START, next=chain)
    cell = ab.cell(lambda box, x: LAYER(x) + box.x, dynamic=True)
    with ab.batch():
        found = [cell(chain, rows(0, n)) for n in SIZES]
    torch.testing.assert_close(found, [LAYER(rows(0, n)) + START for n in SIZES])


def test_an_object_that_fibers_share() -> None:
    """A traced call waits for a value while other calls continue."""
    box = Box(n=0, x=START)

    def function(x: Tensor) -> Tensor:
        box.n += 1
        return LAYER(x) if LAYER(x).sum() > 0 else LAYER(x).sin()

    cell = ab.cell(lambda box, x: (function(x), box.n)[0], dynamic=True)
    with torch.no_grad():
        found = ab.map(lambda n: cell(box, rows(0, n)), SIZES)
        torch.testing.assert_close(found, [function(rows(0, n)) for n in SIZES])
    assert (type(box.n), box.n) == (int, 2 * len(SIZES))
