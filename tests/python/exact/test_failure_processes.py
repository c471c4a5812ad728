"""Row "Failure", second part: Ctrl-C, forks, threads, and pending tensors after their scope."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import Blocks, differentiate, inputs, is_pending, rand, same, weight
from helpers_threads import in_thread
from torch import Tensor
from torch_autobatch import _C


def works() -> None:
    """Asserts that the previous block has no effect on the next one."""
    w, xs = weight(), inputs((2, 3, 1))
    with ab.batch() as scope:
        results = [F.linear(x, w).tanh() for x in xs]
    assert scope.report().batches == 2
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, F.linear(x, w).tanh())


# --- Ctrl-C ---


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Makes SIGINT raise KeyboardInterrupt, regardless of how pytest was started."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_failure_ctrl_c_during_capture() -> None:
    """KeyboardInterrupt ends the block like any other exception."""
    w, xs = weight(), inputs()
    with pytest.raises(KeyboardInterrupt), ab.batch():  # noqa: PT012
        results = []
        for i, x in enumerate(xs):
            results.append(F.linear(x, w).tanh())
            if i == 2:
                signal.raise_signal(signal.SIGINT)
    assert len(results) == 3
    for x, result in zip(xs, results, strict=False):
        torch.testing.assert_close(result, F.linear(x, w).tanh())
    sum(r.sum() for r in results).backward()
    assert w.grad is not None
    works()


@contextlib.contextmanager
def kernel(function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces the CPU kernels of tanh with the Python function ``function``."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("tanh", lambda x: function(x), "CPU")
        library.impl("tanh.out", lambda x, *, out: out.copy_(function(x)), "CPU")
        yield


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.filterwarnings("ignore:.*overrid")
@pytest.mark.parametrize("grad", [False, True])
def test_failure_ctrl_c_during_flush(grad: bool) -> None:
    """Ctrl-C during a batch: no batch is retried, and values that are not computed are lost."""
    calls = []

    def interrupted(x: Tensor) -> Tensor:
        calls.append(x.shape)
        signal.raise_signal(signal.SIGINT)
        return x * 1

    w, xs = weight(), inputs()
    with kernel(interrupted), torch.set_grad_enabled(grad):
        with pytest.raises(KeyboardInterrupt), ab.batch():  # noqa: PT012
            before = [F.linear(x, w) for x in xs]
            lost = [h.tanh() for h in before]
        assert len(calls) == 1
        for t in lost:
            with pytest.raises(RuntimeError, match="never computed"):
                t.sum()
    for x, value in zip(xs, before, strict=True):
        torch.testing.assert_close(value, F.linear(x, w))
    works()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.filterwarnings("ignore:.*overrid")
def test_failure_ctrl_c_during_a_read() -> None:
    """The flush of a read is interrupted, and the end of the block does not run it again."""
    calls = []

    def interrupted(x: Tensor) -> Tensor:
        calls.append(x.shape)
        signal.raise_signal(signal.SIGINT)
        return x * 1

    w, xs = weight(), inputs()
    with kernel(interrupted), torch.no_grad(), pytest.raises(KeyboardInterrupt), ab.batch():  # noqa: PT012
        lost = F.linear(xs[0], w).tanh()
        lost.tolist()
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="never computed"):
        lost.tolist()
    works()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.filterwarnings("ignore:.*overrid")
def test_failure_ctrl_c_at_max_pending() -> None:
    """The flush at `max_pending` is interrupted. Its nodes do not run again, other nodes do."""
    calls: list[int] = []

    def interrupted(x: Tensor) -> Tensor:
        calls.append(len(x))
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return x * 1

    w, xs, results = weight(), inputs([2] * 40), []
    with kernel(interrupted), torch.no_grad():
        with pytest.raises(KeyboardInterrupt), ab.batch(max_pending=20):  # noqa: PT012
            for x in xs:
                results.append(F.linear(x, w).tanh())
        assert len(results) < len(xs)
        assert sum(calls) == len(results)
        for result in results[: calls[0]]:
            with pytest.raises(RuntimeError, match="never computed"):
                result.tolist()
    for result in results[calls[0] :]:
        assert result.shape == (2, 3)
        assert not is_pending(result)
    works()


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("kind", ["hook", "function"])
def test_failure_ctrl_c_during_backward(kind: str) -> None:
    """Python code that backward calls is interrupted. Other losses can be differentiated."""

    class Interrupted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            signal.raise_signal(signal.SIGINT)
            return g

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            losses = [F.linear(x, w).tanh().sum() for x in xs]
            bad = losses[1]
            if kind == "function":
                bad = Interrupted.apply(bad)
        if kind == "hook":
            bad.register_hook(lambda g: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            bad.backward()
        w.grad = None
        for i in (0, 2, 3):
            losses[i].backward()
        return losses, w

    same(program)


FOREVER = """
import torch, torch_autobatch as ab
w = torch.nn.Parameter(torch.ones(3, 3))
first = True
while True:
    with ab.batch():
        losses = []
        for i in range(50):
            h = torch.ones(i % 4 + 1, 3)
            for _ in range(10):
                h = torch.tanh(torch.nn.functional.linear(h, w))
            losses.append(h.sum())
    torch.stack(losses).sum().backward()
    if first:
        print("ready", flush=True)
        first = False
"""


@pytest.mark.parametrize("attempt", range(3))
def test_failure_ctrl_c_from_outside(attempt: int) -> None:
    """A training loop stops with KeyboardInterrupt, whenever the signal arrives."""
    process = subprocess.Popen(
        [sys.executable, "-c", FOREVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, text = process.communicate(timeout=60)
    finally:
        process.kill()
    assert text.rstrip().endswith("KeyboardInterrupt"), text[-800:]
    assert process.returncode in (-signal.SIGINT, 1, 130)


# --- forks ---


def in_child(body: Callable[[], None]) -> int:
    """Runs ``body`` in a forked process. Returns the exit status, 0 if no error was raised."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(30)  # ends the child if it hangs
            torch.set_num_threads(1)  # fork() does not copy OpenMP's threads
            body()
            status = 0
        except BaseException as error:
            os.write(2, f"in the child: {error!r}\n".encode())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("act", ["read", "continue", "backward", "drop", "block"])
def test_failure_fork_with_a_pending_graph(act: str) -> None:
    """The child computes its own copy, which does not affect the parent's block."""
    w, xs = weight(), inputs()
    expected = [F.linear(x, w).tanh().sum() for x in xs]
    gradient = torch.autograd.grad(sum(expected), w)[0]

    def child() -> None:
        if act == "read":
            torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
        elif act == "continue":
            torch.testing.assert_close(losses[0] * 2, expected[0] * 2)
            scope.flush()
        elif act == "backward":
            sum(losses).backward()
            torch.testing.assert_close(w.grad, gradient)
        elif act == "block":
            with ab.batch():
                inner = F.linear(xs[1], w).tanh().sum() + losses[1]
            torch.testing.assert_close(inner, expected[1] * 2)
        else:
            losses.clear()
            gc.collect()

    with ab.batch() as scope:
        losses = [F.linear(x, w).tanh().sum() for x in xs]
        assert in_child(child) == 0
        assert len(losses) == 4
        assert is_pending(losses[0])
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected))
    sum(losses).backward()
    torch.testing.assert_close(w.grad, gradient)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_failure_fork_before_any_block() -> None:
    """Workers that a process forks after it has used blocks can use blocks too."""
    works()
    assert in_child(works) == 0
    works()


# --- threads ---


def test_failure_two_threads_each_with_a_scope() -> None:
    """Two threads take turns, op by op, with the same weights."""
    w, xs, turns = weight(), inputs([2] * 6), threading.Barrier(2, timeout=30)
    results: dict[int, Any] = {}

    def work(which: int) -> None:
        with ab.batch() as scope:
            hidden = []
            for x in xs:
                hidden.append(F.linear(x * which, w))
                turns.wait()
                hidden[-1] = hidden[-1].tanh()
                turns.wait()
        results[which] = (hidden, scope.report().batches)

    threads = [threading.Thread(target=work, args=(i,)) for i in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in (1, 2):
        hidden, batches = results[which]
        assert batches == 2
        for x, h in zip(xs, hidden, strict=True):
            torch.testing.assert_close(h, F.linear(x * which, w).tanh())
    sum(h.sum() for which in (1, 2) for h in results[which][0]).backward()
    assert w.grad is not None


HANDED: dict[str, Callable[[Tensor], Any]] = {
    "read": lambda h: h.tolist(),
    "use": lambda h: h * 2 + 1,
    "in_place": lambda h: h.mul_(3) * 1,
    "view": lambda h: h[0] * 2,
    "detach": lambda h: h.detach() + 1,
    "grad_fn": lambda h: h.grad_fn is not None,
    "backward": lambda h: h.sum().backward(retain_graph=True),
    "deepcopy": lambda h: copy.deepcopy(h.detach()),
}


@pytest.mark.parametrize("own_block", [False, True])
@pytest.mark.parametrize("name", HANDED)
def test_failure_pending_tensor_handed_to_another_thread(name: str, own_block: bool) -> None:
    """The other thread uses the tensor, with or without its own block. The owner continues."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []

        def elsewhere(h: Tensor) -> Any:
            with block() if own_block else contextlib.nullcontext():
                mine = F.linear(xs[0], w)
                got = HANDED[name](h)
                return got, mine + 1

        with block() as scope:
            for x in xs:
                h = F.linear(x, w) * 2
                results.append((in_thread(lambda h=h: elsewhere(h)), h, h + 1))
            del scope
        differentiate(results)
        return results, w

    same(program)


def test_failure_pending_tensor_dies_on_another_thread() -> None:
    """A pending tensor may be freed on any thread, because Python's collector runs there."""
    w, xs = weight(), inputs()
    with ab.batch() as scope:
        kept = [F.linear(x, w) for x in xs]
        dropped = [h.tanh() for h in kept]
        in_thread(dropped.clear)
    assert scope.report().nodes == 4
    for x, h in zip(xs, kept, strict=True):
        torch.testing.assert_close(h, F.linear(x, w))


def test_failure_threads_share_a_pending_tensor() -> None:
    """Several threads read the same pending values at the same time, while the owner captures."""
    w, xs = weight(), inputs([2] * 8)
    expected = [F.linear(x, w).tanh().sum().item() for x in xs]

    def once() -> None:
        found: list[list[float]] = []
        with ab.batch():
            values = [F.linear(x, w).tanh().sum() for x in xs]
            readers = [
                threading.Thread(target=lambda: found.append([v.item() for v in values]))
                for _ in range(4)
            ]
            for reader in readers:
                reader.start()
            more = [v + 1 for v in values]
            for reader in readers:
                reader.join()
        assert [m.item() - 1 for m in more] == pytest.approx(expected)
        assert len(found) == 4
        for read in found:
            assert read == pytest.approx(expected)

    for _ in range(20):
        once()


# --- pending tensors that outlive their scope or operands ---


def test_failure_pending_tensor_outlives_its_scope() -> None:
    """A context manager that keeps a block open is dropped, and the values are still computed."""

    @contextlib.contextmanager
    def opened() -> Iterator[list[Tensor]]:
        with ab.batch():
            yield [F.linear(x, w).tanh() for x in xs[:2]]

    w, xs = weight(), inputs()
    manager = opened()
    first, second = manager.__enter__()
    assert is_pending(first)
    del manager
    gc.collect()
    torch.testing.assert_close(first, F.linear(xs[0], w).tanh())
    (first.sum() + second.sum()).backward()
    assert w.grad is not None
    works()


def test_failure_pending_tensor_outlives_its_thread() -> None:
    """A thread opens a block, and ends without closing it."""
    w, x = weight(), rand(2, 3)
    opened: list[Any] = []

    def work() -> Tensor:
        opened.append(ab.batch())
        opened[0].__enter__()
        return F.linear(x, w).tanh()

    h = in_thread(work)
    torch.testing.assert_close(h * 2, F.linear(x, w).tanh() * 2)
    h.sum().backward()
    assert w.grad is not None
    assert _C.any_block_open()
    opened.clear()
    gc.collect()
    assert not _C.any_block_open()
    torch.testing.assert_close(h, F.linear(x, w).tanh())
    works()


def test_failure_pending_tensor_outlives_its_graph() -> None:
    """One of many results is kept after all other objects of the block were freed."""
    w, xs = weight(), inputs()
    with ab.batch():
        results = [F.linear(x, w).tanh() for x in xs]
        others = [weakref.ref(r) for r in results[1:]]
        view = results[0][0]
    del results
    gc.collect()
    assert all(other() is None for other in others)
    torch.testing.assert_close(view, F.linear(xs[0], w).tanh()[0])
    view.sum().backward()
    assert w.grad is not None


def test_failure_blocks_closed_in_the_wrong_order() -> None:
    """The outer block is closed first. This raises an error or works, and later ops run eagerly."""
    w, x = weight(), rand(2, 3)
    outer, inner = ab.batch(), ab.batch()
    outer.__enter__()
    inner.__enter__()
    h = F.linear(x, w)
    for scope in (outer, inner):
        with contextlib.suppress(RuntimeError):
            scope.__exit__(None, None, None)
    torch.testing.assert_close(h, F.linear(x, w))
    assert not is_pending(F.linear(x, w))
    works()


EXIT = """
import torch, torch_autobatch as ab
w = torch.nn.Parameter(torch.ones(3, 3))
scope = ab.batch()
scope.__enter__()
kept = [torch.nn.functional.linear(torch.ones(2, 3), w).tanh() for _ in range(4)]
print("leaving", flush=True)
"""


def test_failure_process_ends_inside_a_block() -> None:
    """The interpreter ends while globals hold pending tensors, and does not crash."""
    done = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr[-800:]
