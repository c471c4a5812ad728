"""Replaces traced numbers that a call has stored in a cache, an object or a global variable.

After the trace, Python code could use a stored traced number, but PyTorch's C++ code would reject
it. So the stored numbers are converted to ordinary numbers. The trace produces no program, because
a program would not read or write the cache.
"""

from __future__ import annotations

import copyreg
import functools
import gc
import types
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch_autobatch._cell_objects import plain_item
from torch_autobatch._cell_sizes import is_traced

_MOST_LEVELS = 8  # maximum depth of nested tuples
_CACHE = type(functools.lru_cache(int))


def replace_kept(numbers: Sequence[weakref.ref[Any]]) -> bool:
    """Converts the numbers that are still alive, in all objects that refer to these numbers.

    Returns whether any number was still alive.
    """
    if all(number() is None for number in numbers):
        return False
    # Frees numbers that only reference cycles keep alive. The call made the numbers and the cycles,
    # so both are young.
    gc.collect(1)
    kept = [number() for number in numbers if number() is not None]
    if kept:
        _replace_in_owners(kept)
    return bool(kept)


def _replace_in_owners(kept: list[Any]) -> None:
    level, seen = kept, {id(kept)}
    for _ in range(_MOST_LEVELS):
        owners = [owner for owner in gc.get_referrers(*level) if id(owner) not in seen]
        seen.update(map(id, owners), (id(level), id(owners)))
        tables = [owner for owner in owners if isinstance(owner, dict)]
        behind = gc.get_referrers(*tables) if tables else []
        for owner in (*owners, *behind):
            if isinstance(owner, _CACHE):
                owner.cache_clear()
            elif isinstance(owner, type):
                _replace_in_class(owner)
        for owner in owners:
            _replace_in(owner)
        level = [owner for owner in owners if _is_part(owner)]
        if not level:
            break


def _is_part(owner: Any) -> bool:
    """Whether the owner is immutable, so that objects which refer to it must replace it."""
    return isinstance(owner, tuple) or type(owner).__name__ == "_lru_list_elem"


def _replace_in_class(owner: type) -> None:
    for name, value in list(vars(owner).items()):
        if (ordinary := plain_item(value)) is not value:
            setattr(owner, name, ordinary)


def _has_traced(values: Iterable[Any]) -> bool:
    return any(plain_item(value) is not value for value in values)


def _replace_in(owner: Any) -> None:
    if isinstance(owner, dict):
        _replace_in_table(owner)
    elif isinstance(owner, list):
        owner[:] = map(plain_item, owner)
    elif isinstance(owner, (set, deque)):
        items = [plain_item(item) for item in owner]
        owner.clear()
        owner.update(items) if isinstance(owner, set) else owner.extend(items)
    elif isinstance(owner, types.CellType):
        owner.cell_contents = plain_item(owner.cell_contents)
    elif not isinstance(owner, (tuple, type, types.FrameType)) and not is_traced(owner):
        _replace_in_object(owner)


def _replace_in_table(table: dict[Any, Any]) -> None:
    if _has_traced(table):
        items = {plain_item(key): plain_item(value) for key, value in table.items()}
        table.clear()
        table.update(items)
        return
    for key, value in list(table.items()):
        if (ordinary := plain_item(value)) is not value:
            dict.__setitem__(table, key, ordinary)


def _replace_in_object(owner: Any) -> None:
    """Replaces numbers in attributes, also in attributes that are not in ``__dict__``."""
    names: list[str] = copyreg._slotnames(type(owner))  # type: ignore[attr-defined]
    for name in (*getattr(owner, "__dict__", ()), *names):
        value = getattr(owner, name, None)
        if (ordinary := plain_item(value)) is not value:
            object.__setattr__(owner, name, ordinary)
