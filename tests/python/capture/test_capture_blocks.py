"""Blocks: nesting, options, threads, transforms around and in them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_capture import (
    Batch,
    assert_as_eager,
    inputs,
    is_pending,
    line,
    rand,
    weight,
    works,
)
from helpers_threads import in_thread
from torch import Tensor, nn

# --- transforms, tracing, compiling, inside and outside ---


def test_transforms_inside_and_outside() -> None:
    model = nn.Linear(3, 3).double()

    @torch.jit.script
    def scripted(x: Tensor, w: Tensor) -> Tensor:
        y = torch.tanh(torch.mv(w, x))
        if bool(y.sum() > 0):
            y = y * 2
        return y

    def transforms(w: Tensor, x: Tensor, h: Tensor) -> list[Any]:
        return [
            torch.vmap(lambda a: a * 2 + h)(x),
            torch.vmap(model)(torch.stack([x, h])),
            torch.func.grad(lambda a: (a * h).sum())(x),
            torch.func.grad(lambda q: (q @ h).sum())(w),
            torch.func.jvp(model, (x,), (h,)),
            torch.func.jacrev(model)(h),
            torch.func.vjp(model, h)[0],
            torch.func.functional_call(model, {"weight": w, "bias": h}, (x,)),
            torch.autograd.functional.jacobian(lambda a: (w @ a).tanh(), x),
            torch.jit.trace(model, (x,))(h),
            scripted(h, w),
        ]

    def program(batch: Batch) -> Any:
        w, xs, results = weight(), inputs(3), []
        with batch():
            for x in xs:
                results += transforms(w, x, (w @ x).tanh())
        results += transforms(w, xs[0], xs[1])
        return results

    assert_as_eager(program)


def test_compiled_functions_inside_and_outside() -> None:
    def program(batch: Batch) -> Any:
        w, xs = weight(), inputs(3)
        compiled = torch.compile(lambda x: (w @ x).tanh().sum(), backend="eager")
        with batch():
            results = [compiled(w @ x) for x in xs]
        results.append(compiled(xs[0]))
        sum(results).backward()
        return results, w.grad

    assert_as_eager(program)


@pytest.mark.parametrize("grad", [True, False])
def test_functions_compiled_for_any_size(grad: bool) -> None:
    """The compiler traces ordinary tensors with symbolic sizes in the block."""

    def program(batch: Batch) -> Any:
        torch._dynamo.reset()
        w = weight()
        compiled = torch.compile(lambda x: (x.sin() * 2).sum(0), backend="eager", dynamic=True)
        scaled = torch.compile(lambda x: (x * w[0, 0]).sum(0), backend="eager", dynamic=True)
        with torch.set_grad_enabled(grad), batch():
            return [f(torch.ones(n, 3)) for n in (2, 3, 5) for f in (compiled, scaled)]

    assert_as_eager(program)


# --- blocks ---


def test_nested_blocks_join_the_outer_one() -> None:
    w, xs = weight(), inputs()
    with ab.batch() as outer:
        first = w @ xs[0]
        with ab.batch():
            second = w @ xs[1]
        third = w @ xs[2]
    report = outer.report()
    assert (report.batches, report.nodes, len(report.flushes)) == (1, 3, 1)
    for h, x in zip((first, second, third), xs, strict=False):
        torch.testing.assert_close(h, w @ x)


def test_an_exception_leaves_eager_as_it_was() -> None:
    w, x = weight(), inputs(1)[0]

    def fail() -> None:
        with ab.batch():
            held.append(w @ x)
            with ab.batch():
                held.append(held[0] * 2)
                raise KeyError("mine")

    held: list[Tensor] = []
    with pytest.raises(KeyError, match="mine"):
        fail()
    torch.testing.assert_close(held[1], (w @ x) * 2)
    assert type((w @ x).grad_fn).__name__ == "MvBackward0"


def test_decorator_and_generator() -> None:
    w, xs = weight(), inputs()

    @ab.batch(policy="depth")
    def run(values: list[Tensor]) -> list[Tensor]:
        """Doc."""
        return [w @ x for x in values]

    @ab.batch
    def generate() -> Any:
        for x in xs:
            yield w @ x

    assert (run.__name__, run.__doc__) == ("run", "Doc.")
    for results in (run(xs), list(generate())):
        for result, x in zip(results, xs, strict=True):
            torch.testing.assert_close(result, w @ x)


def test_flush_makes_values_real() -> None:
    w, x = weight(), inputs(1)[0]
    with ab.batch() as scope:
        h = w @ x
        scope.flush()
        value = h.tolist()
        assert len(scope.report().flushes) == 1
    assert value == pytest.approx((w @ x).tolist())


def test_disabled_is_eager() -> None:
    w, x = weight(), inputs(1)[0]
    with ab.batch(enabled=False) as scope:
        h = w @ x
        assert type(h.grad_fn).__name__ == "MvBackward0"
        scope.flush()
    assert scope.report().ops == 0


def test_max_pending_bounds_the_graph() -> None:
    w, xs = weight(), inputs(10)
    with ab.batch(max_pending=4) as scope:
        results = [(w @ x).tanh() for x in xs]
    assert max(f.nodes for f in scope.report().flushes) <= 4
    assert scope.report().batches == 10  # each batch has two nodes
    for result, x in zip(results, xs, strict=True):
        torch.testing.assert_close(result, (w @ x).tanh())


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="'agenda'"):
        ab.batch(policy="best")
    with pytest.raises(ValueError, match="max_pending=0"):
        ab.batch(max_pending=0)


def test_the_policies_that_type_checkers_list_exist() -> None:
    from torch_autobatch._scope import Policy

    assert set(get_args(Policy)) == set(ab.policy_names())


@pytest.mark.parametrize("policy", ab.policy_names())
def test_policies_give_eagers_values(policy: str) -> None:
    w, xs = weight(), inputs()
    with ab.batch(policy=policy):
        results = [(w @ (w @ x).tanh()).sum() for x in xs]
    for result, x in zip(results, xs, strict=True):
        torch.testing.assert_close(result, (w @ (w @ x).tanh()).sum())


def test_threads_each_with_a_block() -> None:
    w, xs = weight(), inputs()
    results: list[Any] = [None] * 4

    def work(i: int) -> None:
        for _ in range(20):
            with ab.batch():
                losses = [(w @ x * i).tanh().sum() for x in xs]
        results[i] = torch.stack(losses)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        expected = torch.stack([(w @ x * i).tanh().sum() for x in xs])
        torch.testing.assert_close(result, expected)
    torch.stack(results).sum().backward()
    assert w.grad is not None


def test_a_thread_without_a_block_reads_a_pending_value() -> None:
    w, x, seen = weight(), inputs(1)[0], []
    with ab.batch():
        h = w @ x
        thread = threading.Thread(target=lambda: seen.append((h * 2).sum().item()))
        thread.start()
        thread.join()
    assert seen == pytest.approx([((w @ x) * 2).sum().item()])


# --- more of blocks ---


@pytest.mark.parametrize("depth", [2, 3])
def test_nested_blocks_join(linear: nn.Linear, depth: int) -> None:
    def nested(level: int, x: Tensor) -> Tensor:
        if level == 0:
            return linear(x)
        with ab.batch():
            result = nested(level - 1, x)
        assert is_pending(result)
        return result

    xs = [rand(n, 3) for n in (1, 4)]
    with ab.batch() as scope:
        results = [nested(depth, x) for x in xs]
        assert all(is_pending(r) for r in results)
    assert scope.report().batches == 1
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, linear(x))


@pytest.mark.parametrize("most", [1, 3, 100])
def test_max_pending_of(linear: nn.Linear, most: int) -> None:
    xs = [rand(n, 3) for n in (1, 2, 3, 4, 5)]
    with ab.batch(max_pending=most) as scope:
        results = [linear(x).tanh() for x in xs]
    flushes = scope.report().flushes
    assert all(f.nodes <= most for f in flushes)
    assert sum(f.nodes for f in flushes) == 10
    assert all(f.reason == "max_pending reached" for f in flushes[:-1])
    for x, result in zip(xs, results, strict=True):
        torch.testing.assert_close(result, linear(x).tanh())


# --- verify ---


def test_verify_passes_on_good_code(linear: nn.Linear) -> None:
    cell = nn.LSTMCell(3, 4).double()
    with ab.batch(verify=True):
        results = []
        for n in (1, 4, 2):
            h, c = cell(rand(n, 3))
            joined = torch.cat([h, c], 1)
            a, b = joined.chunk(2, 1)
            results.append((a * b + linear(rand(n, 3))).softmax(-1).log().sum())
            results.append(F.layer_norm(joined, (8,)).cumsum(1).sum())
            results.append(F.dropout(joined, 0.5).sum())
    torch.stack(results).sum().backward()
    assert cell.weight_ih.grad is not None


def test_verify_sees_a_weight_that_changes_behind_it(linear: nn.Linear) -> None:
    address = linear.weight.data_ptr()
    with pytest.raises(RuntimeError) as raised, ab.batch(verify=True):  # noqa: PT012
        where = line() + 1
        result = linear(rand(2, 3))
        ctypes.memset(address, 0, linear.weight.nbytes)
        assert result.shape == (2, 4)
    message = str(raised.value)
    assert "verify: aten::linear" in message
    assert f"captured at {__file__}:{where}" in message
    assert "shape [2, 4]" in message
    assert "native rule ran the op in a batch of 1" in message
    with ab.batch(verify=True):
        works_again = linear(rand(2, 3))
    assert works_again.shape == (2, 4)


# --- other threads ---


def test_a_block_belongs_to_its_thread(linear: nn.Linear) -> None:
    x = rand(2, 3)
    with ab.batch():
        h = linear(x)
        elsewhere = in_thread(lambda: linear(x))
        assert not is_pending(elsewhere)
        assert is_pending(h)
    torch.testing.assert_close(h, elsewhere)


def test_a_block_that_cannot_be_closed_here_closes_later(linear: nn.Linear) -> None:
    block = ab.batch()
    block.__enter__()
    h = linear(rand(2, 3))

    def close() -> None:
        with pytest.raises(RuntimeError, match="thread"):
            block.__exit__(None, None, None)

    in_thread(close)
    assert is_pending(h)
    block.__exit__(None, None, None)
    assert not is_pending(h)


@pytest.mark.filterwarnings("error:.*has no effect")
def test_a_warning_that_is_an_error_leaves_no_block_open(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        h = linear(rand(2, 3))
        with pytest.raises(RuntimeWarning, match="no effect"), ab.batch(policy="depth"):
            pass
        assert is_pending(h)
    assert not is_pending(h)
    assert not scope._open


def test_another_thread_reads_a_pending_tensor(linear: nn.Linear) -> None:
    x = rand(2, 3)
    with ab.batch():
        h = linear(x)
        result = in_thread(lambda: h * 2)
        again = h + 1
    torch.testing.assert_close(result, linear(x) * 2)
    torch.testing.assert_close(again, linear(x) + 1)


# --- blocks inside a transform ---


BLOCK_INSIDE: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "compile": lambda f, x: torch.compile(f, backend="eager")(x),
}


@pytest.mark.parametrize("name", BLOCK_INSIDE)
def test_block_in_a_transform(linear: nn.Linear, name: str) -> None:
    def body(x: Tensor, enabled: bool) -> Tensor:
        with ab.batch(enabled=enabled):
            return linear(x).tanh() * 2

    transform, x = BLOCK_INSIDE[name], rand(2, 3)
    result = transform(lambda y: body(y, True), x)
    torch.testing.assert_close(result, transform(lambda y: linear(y).tanh() * 2, x))
    works(linear)


def test_a_custom_function_that_writes_sees_real_tensors(linear: nn.Linear) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert not is_pending(x)
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    x = rand(2, 3)
    with ab.batch():
        result = Double.apply(linear(x)).sum()
    result.backward()
    torch.testing.assert_close(linear.weight.grad, 2 * x.sum(0).expand(4, 3))


def test_verify_expects_the_precision_of_the_least_exact_values() -> None:
    """A float64 result of float32 values is no more exact than the float32 values."""
    torch.manual_seed(0)
    w = torch.randn(64, 64, requires_grad=True)
    with ab.batch(verify=True):
        results = [(torch.randn(3 + i, 64) @ w).logsumexp(-1).double().sum() * 3 for i in range(8)]
    assert all(result.dtype == torch.float64 for result in results)
