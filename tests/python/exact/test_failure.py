"""Row "Failure", first part: errors of ops at capture and at the flush, and lack of memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import Blocks, differentiate, inputs, is_pending, line, rand, same, weight
from torch import Tensor, nn

# --- errors at capture ---

CAPTURE_ERRORS: dict[str, Callable[[Tensor], Any]] = {
    "matmul": lambda h: h @ rand(7, 5),
    "linear": lambda h: F.linear(h, weight(2, 5)),
    "mm_of_a_vector": lambda h: torch.mm(h, rand(3)),
    "addmm": lambda h: torch.addmm(rand(9), h, rand(3, 3)),
    "bmm": lambda h: torch.bmm(h, h),
    "add": lambda h: h + rand(7),
    "cat": lambda h: torch.cat([h, rand(1, 5)]),
    "cat_of_nothing": lambda h: torch.cat([]),
    "stack": lambda h: torch.stack([h, h[0]]),
    "view": lambda h: h.view(7, 7),
    "reshape": lambda h: h.reshape(7, -1),
    "select": lambda h: h[99],
    "narrow": lambda h: h.narrow(1, 2, 5),
    "dim": lambda h: h.sum(4),
    "softmax_dim": lambda h: h.softmax(3),
    "transpose": lambda h: h.transpose(0, 5),
    "expand": lambda h: h.expand(5, 7, 9),
    "split": lambda h: h.split([1, 9]),
    "squeeze": lambda h: h.squeeze(9),
    "conv": lambda h: F.conv1d(h, rand(2, 4, 3)),
    "layer_norm": lambda h: F.layer_norm(h, (9,)),
    "lstm_cell": lambda h: nn.LSTMCell(9, 3).double()(h),
    "gru_cell": lambda h: nn.GRUCell(3, 3).double()(h, rand(77, 3)),
    "cross_entropy": lambda h: F.cross_entropy(h, torch.zeros(99, dtype=torch.long)),
    "embedding": lambda h: F.embedding(h, weight()),
    "index": lambda h: h[torch.tensor([0]), torch.tensor([0]), torch.tensor([0])],
    "index_range": lambda h: h[torch.tensor([99])],  # known indices are checked
    "mask": lambda h: h[torch.ones(17, 2, dtype=torch.bool)],
    "dtypes": lambda h: h @ rand(3, 3).float(),
    "bitwise": lambda h: h & 1,
    "in_place_shape": lambda h: h.add_(rand(9, 9, 3)),
    "setitem": lambda h: h.__setitem__(0, rand(9)),
    "type_error": lambda h: torch.add(h),  # type: ignore[call-overload]
    "keyword_error": lambda h: h.sum(dimension=1),  # type: ignore[call-overload]
    "attribute_error": lambda h: h.no_such_method(),  # type: ignore[attr-defined]
    "einsum": lambda h: torch.einsum("ij,jk->ik", h, rand(9, 9)),
    "norm": lambda h: h.norm(dim=7),
    "topk": lambda h: h.topk(99),
    "requires_grad": lambda h: h.long().requires_grad_(),
}

# Raised by PyTorch's Python binding before an op is called.
UNNAMED = {"type_error", "keyword_error", "attribute_error", "requires_grad"}
UNNAMED |= {"setitem", "select", "index", "cat_of_nothing"}


@pytest.mark.parametrize("name", CAPTURE_ERRORS)
def test_failure_at_capture(name: str) -> None:
    """The error is raised at the call, as in eager mode. The block continues."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []
        with block():
            for x in xs:
                h = F.linear(x, w) * 2
                try:
                    CAPTURE_ERRORS[name](h)
                    results.append("no error")
                except Exception as error:
                    results.append(error)
                results.append(h + 1)
        differentiate(results)
        return results, w

    same(program)


@pytest.mark.parametrize("name", [n for n in CAPTURE_ERRORS if n not in UNNAMED])
def test_failure_at_capture_names_op_shapes_and_line(name: str) -> None:
    """The line is in the message, and it is the last frame of user code in the traceback."""
    w = weight()
    with ab.batch():
        h = F.linear(rand(2, 3), w) * 2
        with pytest.raises(Exception) as raised:  # noqa: PT011
            CAPTURE_ERRORS[name](h)
    frames = traceback.extract_tb(raised.value.__traceback__)
    ours = [f.lineno for f in frames if f.filename == __file__]
    assert ours[-1] == CAPTURE_ERRORS[name].__code__.co_firstlineno
    message = str(raised.value)
    assert "aten::" in message
    assert "[2, 3]" in message, message


@pytest.mark.parametrize("name", ["matmul", "view", "select", "dtypes", "conv"])
def test_failure_at_capture_that_leaves_the_block(name: str) -> None:
    """Values captured before the error are computed, the scope closes, and the next block works."""
    w, x = weight(), rand(2, 3)
    with pytest.raises(Exception), ab.batch() as scope:  # noqa: B017, PT011, PT012
        before = F.linear(x, w).tanh()
        CAPTURE_ERRORS[name](before)
    assert not is_pending(before)
    torch.testing.assert_close(before, F.linear(x, w).tanh())
    before.sum().backward()
    assert w.grad is not None
    assert not is_pending(F.linear(x, w))
    assert scope.report().nodes == 2
    works()


def works() -> None:
    """Asserts that the previous block has no effect on the next one."""
    w, xs = weight(), inputs((2, 3, 1))
    with ab.batch() as scope:
        results = [F.linear(x, w).tanh() for x in xs]
    assert scope.report().batches == 2
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, F.linear(x, w).tanh())


# --- errors at the flush ---


def index(i: int) -> Tensor:
    return torch.tensor([i])


# By name: the op that fails, and a function that is valid for index 0 and invalid for 9.
FLUSH_ERRORS: dict[str, tuple[str, Callable[[Tensor, int], Tensor]]] = {
    "embedding": ("aten::embedding", lambda h, i: F.embedding(index(i), h)),
    "index_select": ("aten::index_select", lambda h, i: h.index_select(0, index(i))),
    "gather": ("aten::gather", lambda h, i: h.gather(0, torch.full((1, 3), i))),
    "nll_loss": ("aten::nll_loss", lambda h, i: F.nll_loss(h[:1], index(i))),
    "cross_entropy": ("aten::cross_entropy_loss", lambda h, i: F.cross_entropy(h[:1], index(i))),
    "scatter": ("aten::scatter", lambda h, i: h.scatter(0, torch.full((1, 3), i), 1.0)),
    "index_add": ("aten::index_add", lambda h, i: h.index_add(0, index(i), h[:1])),
    "take": ("aten::take", lambda h, i: h.take(index(i * 100))),
    "cholesky": ("aten::linalg_cholesky", lambda h, i: torch.linalg.cholesky(
        torch.eye(3).double() * (1 - i) + 0 * h.t() @ h)),
    "inverse": ("aten::linalg_inv", lambda h, i: torch.linalg.inv(
        torch.eye(3).double() * (i == 0) + 0 * h.t() @ h)),
    "integer_division": ("aten::floor_divide", lambda h, i: h.long() // (h.long() * 0 + 9 - i)),
    "multinomial": ("aten::multinomial", lambda h, i: (h.detach() * 0 + 1 - i).multinomial(1)),
    "bernoulli": ("aten::bernoulli", lambda h, i: (h.detach() * 0 + i).bernoulli()),
}  # fmt: skip


@pytest.mark.parametrize("name", FLUSH_ERRORS)
def test_failure_at_flush_has_eagers_type(name: str) -> None:
    """The type is the same, whether the error is raised at capture or at the end of the block."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs((2, 2, 2, 2))
        with block():
            return [
                FLUSH_ERRORS[name][1](F.linear(x, w), 9 if i == 2 else 0) for i, x in enumerate(xs)
            ]

    same(program, raises=Exception)


@pytest.mark.parametrize("name", FLUSH_ERRORS)
def test_failure_at_flush_names_op_shapes_and_line(name: str) -> None:
    """The message names the line where the op of the failing instance was captured."""
    op, call = FLUSH_ERRORS[name]
    w, xs = weight(), inputs((2, 2, 2))
    with pytest.raises(Exception) as raised, ab.batch():  # noqa: PT011, PT012
        good = call(F.linear(xs[0], w), 0)
        bad = (lambda h: call(h, 9))(F.linear(xs[1], w))
        where = line() - 1
        more = call(F.linear(xs[2], w), 0)
        assert good.shape == bad.shape == more.shape
    message = str(raised.value)
    first = traceback.extract_tb(raised.value.__traceback__)
    assert op in message, message
    assert "Double[" in message or "Long[" in message, message
    frames = [f"{f.filename}:{f.lineno}" for f in first]
    lines = {where, call.__code__.co_firstlineno, call.__code__.co_firstlineno + 1}
    assert any(f"{__file__}:{n}" in text for n in lines for text in [message, *frames]), message


@pytest.mark.parametrize("name", FLUSH_ERRORS)
def test_failure_at_flush_leaves_usable_values(name: str) -> None:
    """Earlier values and gradients are right. Each use of a lost value gives the reason."""
    call = FLUSH_ERRORS[name][1]
    w, xs = weight(), inputs((2, 2, 2))
    with contextlib.suppress(Exception), ab.batch() as scope:
        before = [F.linear(x, w).tanh() for x in xs]
        good = call(F.linear(xs[0], w), 0)
        bad = call(F.linear(xs[1], w), 9)
        after = bad * 2
    for x, value in zip(xs, before, strict=True):
        torch.testing.assert_close(value, F.linear(x, w).tanh())
    before[0].sum().backward()
    assert w.grad is not None
    if name not in ("multinomial", "bernoulli"):
        torch.testing.assert_close(good, call(F.linear(xs[0], w), 0))
    reads: list[Callable[[Tensor], Any]] = [
        lambda t: t.tolist(),
        lambda t: t + 1,
        lambda t: t.view(-1)[0],
        repr,
        lambda t: t.sum().backward(),
        lambda t: t.zero_(),
        lambda t: torch.stack([t, t]),
    ]
    if "bad" in locals():  # otherwise the error was raised at capture
        for lost in (bad, after):
            for read in reads:
                with pytest.raises(RuntimeError, match="never computed"):
                    read(lost)
            with pytest.raises(RuntimeError, match=FLUSH_ERRORS[name][0]), ab.batch():
                lost * 2
    assert scope.report().ops > 0
    works()


def test_failure_at_flush_of_a_read_in_each_instance() -> None:
    """A loop that catches the error of one instance gets the values of all others."""

    def program(block: Blocks) -> Any:
        table, results = weight(4, 3), []
        with block():
            for i in (1, 9, 2, 8, 0):
                try:
                    h = F.embedding(index(i), table)
                    results.append((h * 2).sum().item())
                except IndexError:
                    results.append("bad")
        return results

    same(program)


def test_failure_at_flush_keeps_what_was_pending_before_it() -> None:
    """Held values of earlier instances are not lost when a later instance fails."""

    def program(block: Blocks) -> Any:
        table, held = weight(4, 3), []
        with block():
            for i in (1, 9, 2):
                try:
                    loss = (F.embedding(index(i), table) * 2).sum()
                    if i == 9:
                        loss.item()
                    held.append(loss)
                except IndexError:
                    held.append("bad")
        differentiate(held)
        return held, table

    same(program)


def test_failure_in_a_batch_spares_its_siblings_that_came_before() -> None:
    """The members of the batch before the failing one have the values of eager mode."""

    def program(block: Blocks) -> Any:
        table, held = weight(4, 3), []
        with contextlib.suppress(IndexError), block():
            for i in (1, 2, 9):
                held.append(F.embedding(index(i), table) * 2)
        differentiate(held[:2])
        return held[:2], table

    same(program)


def test_failure_of_the_first_of_two_is_the_one_that_is_named() -> None:
    """The first failure is raised, because eager stops at it."""
    table = weight(4, 3)
    with pytest.raises(IndexError) as raised, ab.batch():  # noqa: PT012
        first = F.embedding(index(9), table)
        where = line() - 1
        second = F.embedding(index(8), table)
        assert first.shape == second.shape
    assert f"{__file__}:{where}" in str(raised.value)


def test_failure_in_a_nested_block_is_raised_by_the_outer_one() -> None:
    """An error of the inner block's code reaches the user unchanged. The outer block continues."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []
        with block():
            for x in xs:
                try:
                    with block():
                        results.append(F.linear(x, w) * 2)
                        raise LookupError("mine")
                except LookupError:
                    results.append(results[-1] + 1)
        differentiate(results)
        return results, w

    same(program)


# --- errors in backward ---


@pytest.mark.parametrize("where", ["held", "parameter", "node"])
def test_failure_in_backward(where: str) -> None:
    """A hook raises an exception, which reaches the user. Other losses can be differentiated."""

    def program(block: Blocks) -> Any:
        w, u, xs = weight(), weight(), inputs()

        def fail(*_: Any) -> None:
            raise LookupError("in a hook")

        with block():
            hidden = [F.linear(x, w).tanh() for x in xs]
            losses = [F.linear(h, u).sum() for h in hidden]
        handle: Any = None
        if where == "held":
            handle = hidden[1].register_hook(fail)
        elif where == "node":
            handle = losses[1].grad_fn.register_prehook(fail)  # type: ignore[union-attr]
        else:
            handle = w.register_hook(fail)
        with pytest.raises(LookupError, match="in a hook"):
            losses[1].backward()
        handle.remove()
        w.grad = u.grad = None
        losses[0].backward()
        losses[2].backward()
        return losses, w, u

    same(program)


# --- errors and exceptions that come from Python kernels ---


class MineError(ValueError):
    """An exception class of the user."""


@contextlib.contextmanager
def kernel(function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces the CPU kernels of tanh with the Python function ``function``."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("tanh", lambda x: function(x), "CPU")
        library.impl("tanh.out", lambda x, *, out: out.copy_(function(x)), "CPU")
        yield


def tanh(x: Tensor) -> Tensor:
    return 2 * torch.sigmoid(2 * x) - 1


@pytest.mark.filterwarnings("ignore:.*overriding")
def test_failure_of_a_python_kernel_is_its_own_exception() -> None:
    """Type and text of the exception do not change when it passes through C++, or in a flush."""

    def fail(x: Tensor) -> Tensor:
        raise MineError("from the kernel")

    w, x = weight(), rand(2, 3)
    with kernel(fail), torch.no_grad():
        with pytest.raises(MineError, match="from the kernel"), ab.batch():  # noqa: PT012
            before = F.linear(x, w)
            lost = torch.tanh(before)
        with pytest.raises(RuntimeError, match="from the kernel"):
            lost.sum()
    torch.testing.assert_close(before, F.linear(x, w))
    works()


# --- out of memory ---


@contextlib.contextmanager
def memory_for(entries: int) -> Iterator[list[int]]:
    """Makes tanh run out of memory above this size. Yields the sizes of successful calls."""
    sizes: list[int] = []

    def limited(x: Tensor) -> Tensor:
        if x.numel() > entries:
            raise torch.OutOfMemoryError(f"no memory for {x.numel()} entries")
        sizes.append(x.numel())
        return tanh(x)

    with kernel(limited):
        yield sizes


@pytest.mark.filterwarnings("ignore:.*overriding")
@pytest.mark.parametrize("grad", [False, True])
def test_failure_out_of_memory_tries_smaller_batches(grad: bool) -> None:
    """Four instances fit into memory, eight do not. Halves run, with the results of eager mode."""
    w, xs = weight(), inputs([2] * 8)
    with memory_for(24) as sizes, torch.set_grad_enabled(grad):
        with ab.batch():
            results = [torch.tanh(F.linear(x, w)) * 2 for x in xs]
        if grad:
            sum(r.sum() for r in results).backward()
        ours = list(sizes)
    assert sum(ours) == 48
    assert max(ours) > 6
    gradient, w.grad = w.grad, None
    expected = [torch.tanh(F.linear(x, w)) * 2 for x in xs]
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other)
    if grad:
        sum(r.sum() for r in expected).backward()
        torch.testing.assert_close(gradient, w.grad)


@pytest.mark.filterwarnings("ignore:.*overriding")
def test_failure_out_of_memory_gives_up_with_eagers_error() -> None:
    """No instance fits. The allocator's error is raised, with op, shapes and line."""
    w, xs = weight(), inputs([2] * 4)
    with memory_for(5), pytest.raises(torch.OutOfMemoryError, match="for 6") as raised:  # noqa: PT012, SIM117
        with ab.batch():
            before = [F.linear(x, w) for x in xs]
            results = [torch.tanh(h) for h in before]
            where = line() - 1
            assert len(results) == 4
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "aten::tanh" in text
    assert f"{__file__}:{where}" in text
    torch.testing.assert_close(before[0], F.linear(xs[0], w))
    works()


LIMITED = """
import resource, torch, torch_autobatch as ab

def program(enabled, instances):
    torch.manual_seed(0)
    xs = [torch.rand(600, 1000) for _ in range(2)]  # 2.4 MB each
    with torch.no_grad(), ab.batch(enabled=enabled):
        w = torch.nn.Parameter(torch.ones(1000))
        return [((xs[i % 2] * w * (1 + i)).exp().tanh()).mean() for i in range(instances)]

program(True, 2)
expected = program(False, 40)
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + 40 * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
assert torch.allclose(torch.stack(program(False, 40)), torch.stack(expected))
print("eager fits", flush=True)
assert torch.allclose(torch.stack(program(True, 40)), torch.stack(expected))
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_failure_out_of_memory_of_the_process() -> None:
    """If single instances fit into the address space in eager mode, the block fits too."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    assert done.stdout.split("\n")[:2] == ["eager fits", "done"], done.stderr[-800:]
