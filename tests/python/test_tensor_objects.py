"""Objects of pending tensors that go within a block, whatever refers to them or hangs on them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _C


class Tracked(Tensor):
    """A subclass, whose objects go by the same function."""


def captured(layer: nn.Module) -> Tensor:
    y: Tensor = layer(torch.ones(1, 4)) * 2
    assert _C.is_pending(y)
    return y


def drop(y: Tensor) -> None:
    del y


def drop_with_weak_reference(y: Tensor) -> None:
    gone: list[Any] = []
    reference = weakref.ref(y, gone.append)
    del y
    assert reference() is None
    assert gone == [reference]


def drop_with_attribute(y: Tensor) -> None:
    class Finalized:
        pass

    gone: list[int] = []
    y.note = Finalized()  # type: ignore[attr-defined]
    weakref.finalize(y.note, gone.append, 1)  # type: ignore[attr-defined]
    del y
    assert gone == [1]


def drop_cycle(y: Tensor) -> None:
    gone: list[Any] = []
    y.itself = [y]  # type: ignore[attr-defined]
    reference = weakref.ref(y, gone.append)
    del y
    gc.collect()
    assert gone == [reference]


def drop_elsewhere(y: Tensor) -> None:
    held = [y]
    del y
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()


def drop_what_a_view_is_of(y: Tensor) -> Tensor:
    return y[0].view(2, 2)


@pytest.mark.parametrize(
    "way",
    [
        drop,
        drop_with_weak_reference,
        drop_with_attribute,
        drop_cycle,
        drop_elsewhere,
        drop_what_a_view_is_of,
    ],
)
def test_a_pending_tensor_goes(way: Callable[[Tensor], Tensor | None]) -> None:
    layer = nn.Linear(4, 4)
    expected = layer(torch.ones(1, 4)) * 2
    with ab.batch():
        kept = [way(captured(layer)) for _ in range(3)]
        y = captured(layer)
        real, sub = torch.ones(3), torch.ones(3).as_subclass(Tracked)
        del real, sub
    torch.testing.assert_close(y, expected)
    for tensor in kept:
        if tensor is not None:
            torch.testing.assert_close(tensor.reshape(-1), expected.reshape(-1))


def test_a_hook_keeps_what_it_needs() -> None:
    layer = nn.Linear(4, 4)
    seen: list[Tensor] = []
    with ab.batch():
        y = captured(layer)
        y.register_hook(seen.append)
        loss = y.sum()
        del y
    loss.backward()
    assert len(seen) == 1


def test_nothing_is_left_of_them() -> None:
    """Neither objects nor references to their class."""
    layer = nn.Linear(4, 4)
    with ab.batch():
        captured(layer)
        gc.collect()
        references = sys.getrefcount(Tensor)
        objects = len(gc.get_objects())
        for _ in range(1000):
            captured(layer)
        assert sys.getrefcount(Tensor) - references < 10
        assert len(gc.get_objects()) - objects < 100


def test_objects_go_as_before_after_the_block() -> None:
    with ab.batch():
        y = captured(nn.Linear(4, 4))
    reference = weakref.ref(y)
    del y
    assert reference() is None
    for kind in (Tensor, Tracked, nn.Parameter):
        z = torch.ones(2).as_subclass(kind)
        reference = weakref.ref(z)
        del z
        assert reference() is None
