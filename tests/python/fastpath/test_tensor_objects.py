"""Python objects of pending tensors that die within a block, with references and attributes."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _C


class Tracked(Tensor):
    """A subclass. The same function destroys its objects."""


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
    """Neither objects nor references to their class leak."""
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


def give_attribute(y: Tensor) -> None:
    y.note = "kept"  # type: ignore[attr-defined]


def give_gradient(y: Tensor) -> None:
    y.grad = torch.ones_like(y, requires_grad=False)


def give_names(y: Tensor) -> None:
    if hasattr(y, "rename_"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y.rename_("N", "C")


def give_finalizer(y: Tensor) -> None:
    weakref.finalize(y, int)


def give_nothing(y: Tensor) -> None:
    pass


GIVEN = [give_attribute, give_gradient, give_names, give_finalizer, give_nothing]


@pytest.mark.parametrize("give", GIVEN)
def test_what_was_done_to_an_object_does_not_stick(give: Callable[[Tensor], None]) -> None:
    """A new result has no state of an earlier object, whether or not the object is reused."""
    layer = nn.Linear(4, 4)
    with ab.batch():
        for _ in range(3):
            y = captured(layer)
            give(y)
            del y
            new = captured(layer)
            assert new.__dict__ == {}
            if hasattr(new, "names"):  # until PyTorch 2.13
                assert new.names == (None, None)
            assert weakref.getweakrefcount(new) == 0
            assert not new.retains_grad
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert new.grad is None
            new.note = give  # type: ignore[attr-defined]
            assert new.__dict__ == {"note": give}
            del new


def results_of_all_kinds(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    """Tests tensors of several sizes, strides, ranks and dtypes."""
    h = layer(x)
    return [
        h,
        h.t(),
        h.view(2, 1, 2, 1, 2).transpose(0, 4),
        h.unsqueeze(0).unsqueeze(0) * 2,
        h.expand(3, 2, 4),
        h.sum(),
        h.detach() * 2,
        h.double() + 1,
        (h > 0) * 2,
        *h.chunk(2, -1),
        h[0, 1],
    ]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_objects_used_again_are_what_the_next_result_is(mode: Callable[[], Any]) -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)

    def facts(t: Tensor) -> tuple[Any, ...]:
        return (
            t.shape,
            t.stride(),
            t.dtype,
            t.requires_grad,
            t.is_contiguous(),
            t.is_contiguous(memory_format=torch.channels_last) if t.dim() == 4 else None,
            t.numel(),
            t.is_inference(),
            t.device,
        )

    with mode():
        expected = results_of_all_kinds(layer, x)
        with ab.batch():
            for _ in range(3):  # from the second turn on, calls are cached and objects are reused
                kept = results_of_all_kinds(layer, x)
                assert [facts(t) for t in kept] == [facts(t) for t in expected]
                identities = [id(t) for t in kept]
                assert len(set(identities)) == len(kept)
                last = kept
                del kept
    for ours, eager in zip(last, expected, strict=True):
        torch.testing.assert_close(ours, eager)


def test_modes_may_change_between_two_uses_of_an_object() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with ab.batch():
        for _ in range(3):
            for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
                with mode():
                    y = layer(x) * 2
                    assert y.requires_grad == (mode is torch.enable_grad)
                    assert y.is_inference() == (mode is torch.inference_mode)
                    del y
        y = layer(x) * 2
    y.sum().backward()
    assert layer.weight.grad is not None


def test_a_finalizer_of_the_class_is_called_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, gone = nn.Linear(4, 4), []
    with ab.batch():
        captured(layer)
        monkeypatch.setattr(Tensor, "__del__", lambda self: gone.append(None), raising=False)
        for _ in range(20):
            y = captured(layer)
            before = len(gone)
            del y
            assert len(gone) == before + 1
        monkeypatch.undo()
        captured(layer)


def test_objects_that_wait_are_freed_with_the_caches() -> None:
    layer = nn.Linear(4, 4)
    for _ in range(2):
        with ab.batch():
            held = [captured(layer) for _ in range(100)]
            del held
        references = sys.getrefcount(Tensor)
        ab.empty_cache()
        assert sys.getrefcount(Tensor) == references
    with ab.batch():
        y = captured(layer)
    torch.testing.assert_close(y, layer(torch.ones(1, 4)) * 2)


def test_objects_go_and_come_on_several_threads() -> None:
    layer = nn.Linear(4, 4)
    expected = layer(torch.ones(1, 4)) * 2
    failures: list[str] = []

    def work(seed: int) -> None:
        for i in range(30):
            with ab.batch():
                held = [captured(layer) for _ in range(5 + (seed + i) % 7)]
                del held[:: 2 + i % 3]
            for y in held:
                if not torch.allclose(y, expected):
                    failures.append(f"{seed}, {i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


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
