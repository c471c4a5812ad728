"""Row "Lasting": bounded caches, no leak over 10,000 scopes, and tensor lifetimes as in eager.

AUTOBATCH_LONG=1 runs a million shapes, and 10,000 scopes of every kind.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import DOUBLE, Blocks, inputs, is_pending, outcome, rand, weight
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

LONG = os.environ.get("AUTOBATCH_LONG") == "1"


class HeapUse(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


C = ctypes.CDLL(None)
needs_mallinfo = pytest.mark.skipif(not hasattr(C, "mallinfo2"), reason="needs glibc 2.33")


def in_use() -> int:
    """Returns the number of bytes that C, C++ and Python have allocated and not freed."""
    C.mallinfo2.restype = HeapUse
    use = C.mallinfo2()
    return use.uordblks + use.hblkhd


def allocated() -> int:
    """Does the same as `in_use`, but runs Python's collector first."""
    gc.collect()
    return in_use()


def resident() -> int:
    """Returns the resident bytes of this process, without memory that malloc keeps for reuse."""
    gc.collect()
    C.malloc_trim(0)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGESIZE")


# --- no leak ---

W = nn.Parameter(torch.ones(3, 3, dtype=DOUBLE) / 3)
TABLE = nn.Parameter(torch.ones(4, 3, dtype=DOUBLE))
XS = [torch.ones(n, 3, dtype=DOUBLE) for n in (1, 2, 3)]


def train() -> None:
    """Runs forward, and backward of the sum."""
    with ab.batch():
        losses = [F.linear(x, W).tanh().sum() for x in XS]
    torch.stack(losses).sum().backward()
    W.grad = None


def infer() -> None:
    with ab.batch(), torch.no_grad():
        results = [F.linear(x, W).tanh() for x in XS]
    assert len(results) == 3


def dropped() -> None:
    """Some results are dropped, and some losses are not differentiated."""
    with ab.batch():
        results = [F.linear(x, W).tanh() for x in XS]
        del results[0]


def partial() -> None:
    """Runs backward of one loss of three, with held values, hooks and retain_graph."""
    with ab.batch():
        hidden = [F.linear(x, W) for x in XS]
        losses = [h.tanh().sum() for h in hidden]
    hidden[1].register_hook(lambda g: g * 2)
    losses[1].backward(retain_graph=True)
    torch.autograd.grad(losses[2], hidden[2])
    W.grad = None


def generic() -> None:
    """Differentiates ops that functorch's rules and the loop run."""
    with ab.batch():
        results = [F.layer_norm(F.linear(x, W), (3,)).cumsum(0).flip(0) for x in XS]
        results += [(F.linear(x, W) ** 2).sort(-1)[0] for x in XS]
    sum(r.sum() for r in results).backward()
    W.grad = None


def reading() -> None:
    with ab.batch():
        for x in XS:
            h = F.linear(x, W)
            if h.sum().item() > 0:
                h = h.tanh()
            h.sum().backward()
    W.grad = None


def writing() -> None:
    with ab.batch():
        total = torch.zeros(3, dtype=DOUBLE)
        for x in XS:
            h = F.linear(x, W) * 1
            h[0] = 0
            total += h.sum(0)
        view = h[:, 1:]
    view.mul_(2)
    (total.sum() + h.sum()).backward()
    W.grad = None


def failing_at_capture() -> None:
    with ab.batch():
        for x in XS:
            h = F.linear(x, W)
            with contextlib.suppress(RuntimeError):
                h @ h


def failing_at_flush() -> None:
    with contextlib.suppress(IndexError), ab.batch():
        results = [F.embedding(torch.tensor([i]), TABLE).tanh() for i in (1, 9, 2)]
        assert len(results) == 3


def raising() -> None:
    with contextlib.suppress(KeyError), ab.batch():
        results = [F.linear(x, W) for x in XS]
        raise KeyError(len(results))


def nesting() -> None:
    with ab.batch() as outer:
        with ab.batch(verify=True) as inner:
            outer.backward(F.linear(XS[0], W).sum())
        inner.flush()
    assert outer.report().ops
    W.grad = None


def threading_() -> None:
    def work() -> None:
        with ab.batch():
            losses = [F.linear(x, W).sum() for x in XS]
        torch.autograd.grad(sum(losses), W)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def cyclic() -> None:
    """Puts results into a reference cycle, which the collector frees."""
    with ab.batch():
        h = F.linear(XS[0], W)
        h.me = [h]  # type: ignore[attr-defined]


def generator() -> None:
    """A block stays open because the generator of a context manager is freed."""

    @contextlib.contextmanager
    def instances() -> Any:
        with ab.batch():
            for x in XS:
                yield F.linear(x, W)

    instances().__enter__()


def custom() -> None:
    """Tests a custom Function, and a hook that holds its own tensor."""
    with ab.batch():
        h = F.linear(XS[0], W)
        itself = weakref.ref(h)
        h.register_hook(lambda g: g if itself() is not None else None)
        loss = h.tanh().sum()
    loss.backward()
    W.grad = None


PROGRAMS = [
    train, infer, dropped, partial, generic, reading, writing, failing_at_capture, raising,
    failing_at_flush, nesting, threading_, cyclic, generator, custom,
]  # fmt: skip


@needs_mallinfo
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__.rstrip("_"))
def test_lasting_no_allocation_is_left(program: Callable[[], None]) -> None:
    """A scope leaves less than one allocated byte behind, on average."""
    scopes, grown = 5_000 if LONG else 200, []
    for _ in range(100):
        program()
    for _ in range(6):  # tables and malloc's caches fill up at first; a leak occurs in every round
        before = allocated()
        for _ in range(scopes):
            program()
        grown.append(allocated() - before)
        if grown[-1] < max(4096, scopes):
            return
    pytest.fail(f"bytes left after {scopes} scopes each: {grown}")


@needs_mallinfo
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_lasting_10000_scopes_do_not_leak() -> None:
    """Allocations, resident memory and Python objects do not grow over 10,000 training steps."""
    for _ in range(500):
        train()
    before, memory, objects = allocated(), resident(), len(gc.get_objects())
    for _ in range(10_000):
        train()
    assert allocated() - before < 16_384
    assert resident() - memory < 2 * 2**20
    assert len(gc.get_objects()) - objects < 100


# --- bounded caches ---


def shape(i: int) -> list[int]:
    """Returns a different small shape for each i below 4 ** 9."""
    return [1 + (i >> 2 * k & 3) for k in range(9)]


def peak(part: Callable[[int], None], start: int, count: int) -> int:
    """Returns the peak of the allocated bytes while the part runs for these numbers."""
    most = 0
    for i in range(start, start + count, 500):
        part(i)
        most = max(most, in_use())
    return most


@needs_mallinfo
@pytest.mark.parametrize("what", ["shapes", "constants", "shapes_in_one_scope"])
def test_lasting_caches_are_bounded(what: str) -> None:
    """If no shape or constant occurs twice, later ones do not need more memory."""
    outer = ab.batch() if what == "shapes_in_one_scope" else contextlib.nullcontext()

    def part(first: int) -> None:
        with ab.batch() as scope, torch.no_grad():
            h = (XS[0] @ W)[0, 0]
            wide = h.expand(4**9) * 1
            for i in range(first, first + 500):
                sizes = shape(i)
                piece = wide[: math.prod(sizes)].view(sizes)
                last = h + i if what == "constants" else piece * 2
            assert is_pending(last)
            scope.flush()
        assert scope.report().ops > 500

    peaks: list[int] = []

    def work() -> None:  # on a new thread, whose caches are empty
        with outer:
            for lot in range(9 if LONG else 2):
                peaks.append(peak(part, lot * 120_000 % 2**17, 120_000))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert max(peaks[1:]) - peaks[0] < 2**20


@needs_mallinfo
def test_lasting_caches_of_threads_that_ended_are_freed() -> None:
    """The caches of a thread are freed when the thread ends."""

    def part(i: int) -> None:
        def work() -> None:
            with ab.batch(), torch.no_grad():
                wide = (XS[0] @ W)[0, 0].expand(4**9) * 1
                for k in range(100):
                    sizes = shape(100 * i + k)
                    wide[: math.prod(sizes)].view(sizes) * 2

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    for i in range(50):
        part(i)
    before = allocated()
    for i in range(50, 250):
        part(i)
    assert allocated() - before < 200_000


@needs_mallinfo
def test_lasting_report_is_bounded_over_flushes() -> None:
    """A block stays open for thousands of flushes."""
    with ab.batch(max_pending=2) as scope:
        for _ in range(300):
            F.linear(XS[0], W).tolist()
        before = allocated()
        for _ in range(3000):
            F.linear(XS[0], W).tolist()
        grown = allocated() - before
    assert len(scope.report().flushes) > 0
    assert grown < 3000 * 16


# --- tensors die at the same time as in eager ---

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, w: x + w[0],
    "mul": lambda x, w: x * w[0],
    "linear": lambda x, w: F.linear(x, w),
    "tanh": lambda x, w: (x * w[0]).tanh(),
    "exp": lambda x, w: (x + w[0]).exp(),
    "softmax": lambda x, w: (x + w[0]).softmax(-1),
    "cat": lambda x, w: torch.cat([x, w]),
    "view": lambda x, w: (x + w[0]).t()[0],
    "functorch": lambda x, w: (x + w[0]).cumsum(0),
    "layer_norm": lambda x, w: F.layer_norm(x, (3,), w[0]),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, torch.zeros(len(x), dtype=torch.long)),
}


def assert_none_outlives_eagers(program: Callable[[Blocks], list[tuple[str, bool]]]) -> None:
    """Asserts that no object is alive at a recorded point if eager mode has freed it there."""
    expected, _ = outcome(program, False)
    result, _ = outcome(program, True)
    if isinstance(expected, Exception) or isinstance(result, Exception):
        raise result if isinstance(result, Exception) else expected
    assert [point for point, _ in result] == [point for point, _ in expected]
    pairs = zip(result, expected, strict=True)
    assert not [point for (point, alive), (_, eager) in pairs if alive and not eager]


@pytest.mark.parametrize("name", OPS)
def test_lasting_inputs_die_when_eagers_do(name: str) -> None:
    """Tests objects after the block and each backward, and memory after all backwards."""

    def program(block: Blocks) -> list[tuple[str, bool]]:
        w, noted = weight(), []
        xs = inputs((2, 2, 2))
        objects = [weakref.ref(x) for x in xs]
        memory = [StorageWeakRef(x.untyped_storage()) for x in xs]

        def note(when: str, *, freed: bool = False) -> None:
            gc.collect()
            for i in range(3):
                noted.append((f"object {i} {when}", objects[i]() is not None))
                if freed:
                    noted.append((f"memory {i} {when}", not memory[i].expired()))

        with block():
            losses = [OPS[name](x, w).sum() for x in xs]
        note("while the inputs are held")
        xs.clear()
        note("after the block")
        losses[1].backward()
        note("after backward of the second")
        losses[0].backward()
        losses[2].backward()
        note("after backward of all", freed=True)
        losses.clear()
        note("without the losses", freed=True)
        return noted

    assert_none_outlives_eagers(program)


def test_lasting_results_die_when_eagers_do() -> None:
    """Tests held values, their views and their memory while the losses are alive."""

    def program(block: Blocks) -> list[tuple[str, bool]]:
        w, noted = weight(), []
        with block():
            hidden = [F.linear(x, w) * 2 for x in inputs((2, 2, 2))]
            views = [h[0] for h in hidden]
            losses = [(h + 1).sum() for h in hidden]
        things = {"hidden": hidden, "views": views, "losses": losses}
        objects = {k: [weakref.ref(t) for t in v] for k, v in things.items()}
        memory = {k: [StorageWeakRef(t.untyped_storage()) for t in v] for k, v in things.items()}

        def note(when: str) -> None:
            gc.collect()
            for k in things:
                noted.extend((f"{k} {when}", r() is not None) for r in objects[k])
                noted.extend((f"memory of {k} {when}", not m.expired()) for m in memory[k])

        note("at first")
        hidden.clear()
        note("without hidden")
        views.clear()
        note("without views")
        losses[0].backward()
        del losses[0]
        note("after backward of the first")
        losses.clear()
        note("without losses")
        return noted

    assert_none_outlives_eagers(program)


def test_lasting_models_die_when_eagers_do() -> None:
    """A model, its hooks and closures are freed with its results. Caches hold no weights."""

    def program(block: Blocks) -> list[tuple[str, bool]]:
        noted = []

        class Witness:
            pass

        def run() -> list[Any]:
            model, witness = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double(), Witness()
            for p in model.parameters():
                p.register_hook(lambda g, witness=witness: g)
            with block():
                losses = [model(x).sum() for x in inputs()]
                losses[0].register_hook(lambda g, witness=witness: g)
            losses[1].backward()
            return [weakref.ref(t) for t in (model, model[0].weight, witness, losses[2])]

        for _ in range(3):
            references = run()
            gc.collect()
            noted += [(f"{i}", r() is not None) for i, r in enumerate(references)]
        return noted

    assert_none_outlives_eagers(program)


def test_lasting_scopes_hold_no_tensors() -> None:
    """Tests the scope object and its report after the block."""

    def program(block: Blocks) -> list[tuple[str, bool]]:
        kept, w = [], weight()
        x = rand(2, 3)
        with block() as scope:
            loss = F.linear(x, w).sum()
        kept.append((scope, scope.report()))
        references = [weakref.ref(t) for t in (x, w, loss)]
        del x, w, loss
        gc.collect()
        assert len(kept) == 1
        return [(f"{i}", r() is not None) for i, r in enumerate(references)]

    assert_none_outlives_eagers(program)


def test_lasting_of_an_error_holds_no_tensors() -> None:
    """Tests an exception that is kept without its traceback."""

    def program(block: Blocks) -> list[tuple[str, bool]]:
        table, errors = weight(4, 3), []
        try:
            with block():
                h = F.embedding(torch.tensor([1]), table)
                bad = F.embedding(torch.tensor([9]), table)
        except IndexError as error:
            errors.append(error.with_traceback(None))
        bad = None
        references = [weakref.ref(t) for t in (h, table)]
        del h, table, bad
        gc.collect()
        assert len(errors) == 1
        return [(f"{i}", r() is not None) for i, r in enumerate(references)]

    assert_none_outlives_eagers(program)
