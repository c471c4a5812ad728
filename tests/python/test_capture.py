"""What becomes of each kind of call inside a block: deferred, run now, or flushed first."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

DOUBLE = torch.float64
Batch = Callable[[], ab.batch]


def flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in flat(item)]
    return [value]


def assert_as_eager(program: Callable[[Batch], Any], tolerance: float = 1e-9) -> None:
    """The program returns the same with batching and without."""
    outcomes = []
    for enabled in (False, True):
        torch.manual_seed(0)
        outcomes.append(flat(program(lambda enabled=enabled: ab.batch(enabled=enabled))))
    expected, results = outcomes
    assert len(results) == len(expected)
    for i, (result, other) in enumerate(zip(results, expected, strict=True)):
        if isinstance(other, Tensor):
            assert type(result) is type(other)
            torch.testing.assert_close(
                result.detach(), other.detach(), rtol=tolerance, atol=tolerance, check_stride=True
            )
        else:
            assert result == other, f"result {i}"


def weight(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(sizes or (3, 3), dtype=DOUBLE))


def inputs(count: int = 4) -> list[Tensor]:
    return [torch.randn(3, dtype=DOUBLE) for _ in range(count)]


# --- metadata at capture ---

LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "tanh": torch.tanh,
    "tanh_transposed": lambda x: x.transpose(0, 2).tanh(),
    "tanh_sliced": lambda x: x[:, ::2].tanh(),
    "tanh_expanded": lambda x: x[:1].expand(4, -1, -1).tanh(),
    "add": lambda x: x + x.transpose(1, 2),
    "broadcast": lambda x: x[0] + x[:, :1],
    "matmul": lambda x: (x @ x, x[0] @ x[1], x @ x[0, 0]),
    "linear": lambda x: F.linear(x.transpose(1, 2), x[0]),
    "cat": lambda x: torch.cat([x, x.transpose(1, 2)], 2),
    "cat_channels_last": lambda x: torch.cat(
        [x.view(1, 2, 3, 3).to(memory_format=torch.channels_last)] * 2
    ),
    "stack": lambda x: torch.stack([x.transpose(1, 2)] * 2, 1),
    "clone": lambda x: (x.clone(), x.transpose(0, 1).clone()),
    "clone_channels_last": lambda x: x.view(1, 2, 3, 3).clone(memory_format=torch.channels_last),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "softmax": lambda x: (x.softmax(0), x.transpose(0, 1).softmax(-1)),
    "sum": lambda x: (x.sum(), x.sum(1), x.sum((0, 2), keepdim=True), x.transpose(0, 1).mean(0)),
    "views": lambda x: (x[1], x[..., 1:], x.view(-1), x.t() if x.dim() < 3 else x.mT, x[:, None]),
    "expand": lambda x: x[:1].expand(5, 3, 3),
    "split": lambda x: (*x.split(1, 2), *x.unbind(1), *x.chunk(2, 1)),
    "generic": lambda x: (x.erf(), x.cumsum(0), x.flip(0), x.topk(1), x > 0, x.argmax(), x.long()),
    "types": lambda x: (x.float(), x.half() * 2, x.sum(dtype=torch.float32), x.argmax(0) / 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_metadata_is_exact_at_capture(name: str) -> None:
    x = torch.randn(2, 3, 3, dtype=DOUBLE, requires_grad=True)

    def metadata(value: Any) -> list[Any]:
        return [
            (t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_contiguous(), t.dim())
            for t in flat(tuple(value) if isinstance(value, tuple) else value)
        ]

    expected = LAYOUTS[name](x * 2)
    with ab.batch():
        results = LAYOUTS[name](x * 2)
        pending = metadata(results)
    assert pending == metadata(expected)
    assert metadata(results) == pending
    for result, other in zip(flat(results), flat(expected), strict=True):
        torch.testing.assert_close(result, other)


def test_a_new_length_has_its_own_shape() -> None:
    w = weight()
    with ab.batch():
        shapes = [F.linear(torch.ones(n, 3, dtype=DOUBLE), w).tanh().shape for n in (1, 4, 2)]
    assert shapes == [(1, 3), (4, 3), (2, 3)]


def test_shape_errors_are_raised_at_the_users_line() -> None:
    w, x = weight(), torch.ones(2, 4, dtype=DOUBLE)
    with ab.batch():
        before = w.tanh()
        with pytest.raises(RuntimeError) as raised:
            F.linear(x, w)
        after = before * 2
    assert "F.linear(x, w)" in str(raised.traceback[0].statement)
    for part in ("aten::linear", "[2, 4]", "[3, 3]"):
        assert part in str(raised.value)
    torch.testing.assert_close(after, w.tanh() * 2)
    with ab.batch():
        fine = F.linear(x[:, :3], w)
    torch.testing.assert_close(fine, F.linear(x[:, :3], w))


def test_errors_of_the_data_name_the_op_and_the_line() -> None:
    w = weight()

    def program() -> list[Tensor]:
        with ab.batch():
            return [F.embedding(torch.tensor([i]), w) for i in (0, 9)]

    with pytest.raises(IndexError, match="aten::embedding") as raised:
        program()
    assert "test_capture.py" in str(raised.value)
    with ab.batch():
        fine = w * 2
    torch.testing.assert_close(fine, w * 2)


# --- every reference becomes real ---


def test_every_reference_becomes_real() -> None:
    w, x = weight(), inputs(1)[0]

    class Node:
        value: Tensor

    node = Node()
    with ab.batch():
        h = w @ x
        in_list, in_dict, in_tuple = [h], {"h": h}, (h, [h[0]])
        node.value = h
        closure = lambda: h  # noqa: E731
        alias = h.detach()
    expected = (w @ x).detach()
    for t in (h, in_list[0], in_dict["h"], in_tuple[0], node.value, closure(), alias):
        assert t.tolist() == pytest.approx(expected.tolist(), rel=1e-9)
        assert t.data_ptr() == h.data_ptr()
    assert in_tuple[1][0].item() == pytest.approx(expected[0].item())
    assert h.grad_fn is not None
    assert in_list[0] is h


def torch_saved(t: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(t, file)
    return torch.load(io.BytesIO(file.getvalue()))


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "float": lambda t: float(t[0]),
    "int": lambda t: int(t.argmax()),
    "bool": lambda t: bool(t[0] > 0),
    "format": lambda t: f"{t.sum():.3f}",
    "str": lambda t: str(t.detach()),
    "numpy": lambda t: t.detach().numpy().tolist(),
    "array": lambda t: np.asarray(t.detach()).tolist(),
    "deepcopy": lambda t: copy.deepcopy(t.detach()),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach())),
    "save": lambda t: torch_saved(t.detach()),
    "save_with_history": torch_saved,
    "data_ptr": lambda t: t.data_ptr() != 0,
    "storage": lambda t: t.untyped_storage().nbytes(),
    "data": lambda t: t.data,
    "iterate": list,
    "contains": lambda t: t[0].detach() in t.detach(),
    "unpack": lambda t: [a + b for a, b in [(t[0], t[1])]],
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "equal": lambda t: (torch.equal(t, t), torch.allclose(t, t + 1)),
    "tensor": lambda t: torch.tensor([t[0].item(), float(t[1])]),
    "as_tensor": torch.as_tensor,
    "unique": lambda t: (t > 0).unique(),
    "grad_fn": lambda t: (t.grad_fn is not None, t.is_leaf, t.grad is None),
    "len": lambda t: (len(t), t.ndim, t.nelement(), t.element_size(), t.type(), t.layout),
}


@pytest.mark.parametrize("name", READS)
def test_reads_inside_the_block(name: str) -> None:
    def program(batch: Batch) -> Any:
        w, xs = weight(), inputs(3)
        with batch():
            return [READS[name]((w @ x).tanh()) for x in xs]

    assert_as_eager(program)


@pytest.mark.parametrize("read", [lambda t: t.numpy(), copy.deepcopy], ids=["numpy", "deepcopy"])
def test_reads_that_eager_refuses(read: Callable[[Tensor], Any]) -> None:
    w = weight()
    with pytest.raises(RuntimeError) as expected:
        read(w.tanh())
    with ab.batch(), pytest.raises(RuntimeError) as raised:
        read(w.tanh())
    assert str(raised.value)[:40] == str(expected.value)[:40]


def test_a_dead_value_is_not_computed() -> None:
    w = weight()
    with ab.batch() as scope:
        kept = w.tanh()
        w.sin().cos()
    assert scope.report().nodes == 1
    assert scope.report().ops == 3
    torch.testing.assert_close(kept, w.tanh())


# --- in-place ops, and memory that changes behind the tracer ---


def test_in_place_ops_inside() -> None:
    def program(batch: Batch) -> Any:
        w, xs, results = weight(), inputs(), []
        total = torch.zeros(3, dtype=DOUBLE)
        with batch():
            for x in xs:
                h = F.relu((w @ x) * 1, inplace=True)
                h += 1
                h = h.clone()
                h *= 2
                total += h
                results += [h, total.clone(), torch.zeros_like(h).copy_(h)]
        return results, total

    assert_as_eager(program)


def test_an_input_refilled_in_place() -> None:
    def program(batch: Batch) -> Any:
        w, x, alias, results = weight(), inputs(1)[0], None, []
        with batch():
            for i in range(3):
                x.fill_(i)
                results.append(w @ x)
                x.data.add_(1)
                results.append(w @ x)
                alias = x[1:]
                alias.zero_()
                results.append(w @ x)
        return results

    assert_as_eager(program)


def test_a_weight_changed_between_uses() -> None:
    def program(batch: Batch) -> Any:
        w, x, results = weight(), inputs(1)[0], []
        with batch():
            for _ in range(3):
                results.append(w @ x)
                with torch.no_grad():
                    w.add_(1)
                results.append(w[0] * 2)
        return results

    assert_as_eager(program)


@pytest.mark.parametrize("use", ["data", "weight", "right"])
@pytest.mark.parametrize("same_tensor", [True, False])
def test_a_numpy_buffer_refilled_for_each_instance(use: str, same_tensor: bool) -> None:
    def program(batch: Batch) -> Any:
        w, buffer = weight(), np.zeros((3, 3))
        shared = torch.from_numpy(buffer)
        results = []
        with batch():
            for i in range(3):
                buffer[:] = i + 1
                x = shared if same_tensor else torch.from_numpy(buffer)
                if use == "data":
                    results.append(F.linear(x, w))
                elif use == "weight":
                    results.append(F.linear(w.tanh(), x))
                else:
                    results.append(w.tanh() @ x)
        return results

    assert_as_eager(program)


@pytest.mark.parametrize("which", ["input", "weight"])
def test_data_replaced_between_uses(which: str) -> None:
    def program(batch: Batch) -> Any:
        w, x = weight(), inputs(1)[0]
        changed = x if which == "input" else w
        with batch():
            first = F.linear(x, w)
            changed.data = torch.full_like(changed, 5.0)
            second = F.linear(x, w)
        return first, second

    assert_as_eager(program)


def test_views_of_parameters_alias_them() -> None:
    def program(batch: Batch) -> Any:
        w = weight()
        with batch(), torch.no_grad():
            row = w[0]
            w[1].fill_(7)
            row.mul_(2)
        with batch():
            view = w[2]
            with torch.no_grad():
                w.add_(1)
        return row, w, view, view.data_ptr() - w.data_ptr()

    assert_as_eager(program)


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

    def generate() -> Any:
        with ab.batch():
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
    assert len(scope.report().flushes) == 5
    for result, x in zip(results, xs, strict=True):
        torch.testing.assert_close(result, (w @ x).tanh())


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="'agenda'"):
        ab.batch(policy="best")
    with pytest.raises(ValueError, match="max_pending=0"):
        ab.batch(max_pending=0)


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


# --- the context of an op ---


def test_autocast_inside_and_around() -> None:
    def program(batch: Batch) -> Any:
        model, xs = nn.Linear(3, 3), [x.float() for x in inputs()]
        with torch.autocast("cpu", dtype=torch.bfloat16), batch():
            around = [model(x).tanh() for x in xs]
        with batch():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside = [model(x).tanh() for x in xs]
                inside += [F.softmax(model(x), -1) for x in xs]
                inside += [F.cross_entropy(model(x), torch.tensor(1)) for x in xs]
            outside = [model(x).tanh() for x in xs]
        return around, inside, outside

    assert_as_eager(program, tolerance=1e-2)


def test_grad_mode_belongs_to_the_op() -> None:
    def program(batch: Batch) -> Any:
        w, xs = weight(), inputs()
        with batch():
            with torch.no_grad():
                frozen = [w @ x for x in xs]
            trained = [w @ x for x in xs]
            with torch.no_grad():
                products = [f * t for f, t in zip(frozen, trained, strict=True)]
        flags = [t.requires_grad for t in frozen + trained + products]
        sum(t.sum() for t in trained).backward()
        return frozen, trained, products, flags, w.grad

    assert_as_eager(program)


@pytest.mark.parametrize("around", [True, False])
def test_inference_mode(around: bool) -> None:
    def program(batch: Batch) -> Any:
        w, xs = weight(), inputs()
        if around:
            with torch.inference_mode(), batch():
                results = [(w @ x).tanh() for x in xs]
        else:
            with batch(), torch.inference_mode():
                results = [(w @ x).tanh() for x in xs]
        flags = [r.is_inference() for r in results]
        with batch(), pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
            (w * results[0]).sum().backward()
        return results, flags, [r.requires_grad for r in results]

    assert_as_eager(program)


def test_default_dtype() -> None:
    def program(batch: Batch) -> Any:
        w, xs, results = weight(), inputs(), []
        for dtype in (torch.float32, DOUBLE):
            torch.set_default_dtype(dtype)
            try:
                with batch():
                    for x in xs:
                        i = (w @ x).argmax()
                        results += [i / 2, i * 1.5, i.sqrt(), (w @ x) + 1, torch.ones(2) * w[0, 0]]
            finally:
                torch.set_default_dtype(torch.float32)
        return results, [r.dtype for r in results]

    assert_as_eager(program)


@pytest.mark.parametrize("no_grad", [True, False])
def test_a_frozen_model_batches_as_a_trained_one(no_grad: bool) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4))
    instances = [torch.tensor([i % 5]) for i in range(6)]

    def batches() -> int:
        with ab.batch() as scope, torch.set_grad_enabled(not no_grad):
            results = [model(x) for x in instances]
        torch.testing.assert_close(results[2], model(instances[2]))
        return scope.report().batches

    model.requires_grad_(False)
    frozen = batches()
    model.requires_grad_(True)
    assert frozen == batches() == 4


def test_batch_norm_updates_its_statistics() -> None:
    def program(batch: Batch) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True)).double()
        with batch():
            losses = [model(torch.randn(4, 3, dtype=DOUBLE)).sum() for _ in range(3)]
        sum(losses).backward()
        return losses, [p.grad for p in model.parameters()], list(model.buffers())

    assert_as_eager(program)


def test_subclasses_and_dispatch_modes() -> None:
    class Sub(Tensor):
        pass

    def program(batch: Batch) -> Any:
        w, x = weight(), inputs(1)[0].as_subclass(Sub)
        with batch():
            y = w @ x
            z = (y * 2).sum()
        return type(y).__name__, type(z).__name__, z.as_subclass(Tensor)

    assert_as_eager(program)


# --- errors, and what is left after them ---


@pytest.fixture
def linear() -> nn.Linear:
    """A layer to capture ops of."""
    return nn.Linear(3, 4).double()


def rand(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=DOUBLE)


def line() -> int:
    """The caller's line."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def is_pending(tensor: Tensor) -> bool:
    return "DeferredInit" in str(torch._C._dispatch_keys(tensor))


def works(linear: nn.Linear) -> None:
    """A block is like any other: the block before has left nothing behind."""
    xs = [rand(n, 3) for n in (1, 4, 2)]
    with ab.batch() as scope:
        results = [linear(x).tanh() for x in xs]
    assert scope.report().batches == 2
    for x, result in zip(xs, results, strict=True):
        assert not is_pending(result)
        torch.testing.assert_close(result, linear(x).tanh())


def test_ops_that_touch_no_parameter_run_at_once() -> None:
    with ab.batch() as scope:
        x = torch.arange(3.0) * 2
        assert not is_pending(x)
        assert x.sum().item() == 6
    assert (scope.report().ops, scope.report().flushes) == (0, [])


def test_a_shape_error_names_the_op_and_both_shapes_at_the_users_line(linear: nn.Linear) -> None:
    with pytest.raises(RuntimeError) as raised, ab.batch():  # noqa: PT012
        h = linear(rand(2, 3)).tanh()
        where = line() + 1
        h @ rand(7, 5)
    message = str(raised.value)
    assert message.startswith("mat1 and mat2 shapes cannot be multiplied (2x4 and 7x5)")
    assert "aten::matmul(Double[2, 4], Double[7, 5])" in message
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert (__file__, where) in [(f.filename, f.lineno) for f in frames]
    torch.testing.assert_close(h.shape, torch.Size((2, 4)))
    assert not is_pending(h)  # the block's end has computed what was captured before
    works(linear)


def test_an_error_that_is_caught_leaves_the_block_usable(linear: nn.Linear) -> None:
    x = rand(2, 3)
    with ab.batch():
        h = linear(x)
        with pytest.raises(RuntimeError, match="must match the size"):
            h + rand(3, 7)
        with pytest.raises(IndexError):
            h[9]
        with pytest.raises(TypeError):
            torch.add(h)  # type: ignore[call-overload]
        after = h.tanh()
    torch.testing.assert_close(after, linear(x).tanh())


def test_an_exception_in_the_block_is_the_users(linear: nn.Linear) -> None:
    x = rand(2, 3)
    with pytest.raises(KeyError, match="mine"), ab.batch():  # noqa: PT012
        h = linear(x).tanh()
        raise KeyError("mine")
    torch.testing.assert_close(h, linear(x).tanh())
    works(linear)


def test_an_exception_wins_over_an_error_of_the_flush() -> None:
    table = nn.Embedding(5, 3)
    with pytest.raises(KeyError, match="mine"), ab.batch():  # noqa: PT012
        lost = table(torch.tensor([9]))
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="never computed"):
        lost.sum()
    works(nn.Linear(3, 4).double())


def test_an_op_that_fails_at_the_flush(linear: nn.Linear) -> None:
    table = nn.Embedding(5, 3).double()
    x = rand(2, 3)
    with pytest.raises(IndexError) as raised, ab.batch():  # noqa: PT012
        first = linear(x).tanh()
        where = line() + 1
        good, bad = [table(torch.tensor([i])) for i in (1, 7)]
        after = linear(bad)
        assert bad.shape == (1, 3)
    message = str(raised.value)
    assert message.startswith("index out of range")
    assert "aten::embedding(Double[5, 3], Long[1])" in message
    assert f"{__file__}:{where}" in message
    reads: list[Callable[[Tensor], Any]] = [
        Tensor.sum,
        Tensor.tolist,
        Tensor.item,
        Tensor.data_ptr,
        str,
        lambda t: t + 1,
        lambda t: t.sum().backward(),
    ]
    for lost in (bad, after):
        for read in reads:
            with pytest.raises(RuntimeError, match=r"never computed: index out of range"):
                read(lost)
        with pytest.raises(RuntimeError, match="never computed"), ab.batch():
            lost * 2
    for tensor, expected in ((first, linear(x).tanh()), (good, table(torch.tensor([1])))):
        try:
            torch.testing.assert_close(tensor, expected)
        except RuntimeError as error:  # run or lost, but never wrong
            assert "never computed" in str(error)  # noqa: PT017
    works(linear)


def test_an_early_read_raises_the_error_of_the_flush() -> None:
    table = nn.Embedding(5, 3)
    with ab.batch():
        bad = table(torch.tensor([7]))
        with pytest.raises(IndexError, match="aten::embedding"):
            bad.tolist()
        good = table(torch.tensor([2]))
    torch.testing.assert_close(good, table(torch.tensor([2])))


# --- flushes ---


def test_print(linear: nn.Linear, capsys: pytest.CaptureFixture[str]) -> None:
    x = rand(2, 3)
    with ab.batch():
        print(linear(x).detach())
    print(linear(x).detach())
    inside, outside = capsys.readouterr().out.strip().split("tensor(")[1:]
    assert inside.strip() == outside.strip()


def test_a_flush_says_what_read_and_where(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        h = linear(rand(2, 3))
        where = line() + 1
        h.tolist()
        h.sum().item()
    (first, second) = scope.report().flushes
    assert first.reason == "a raw read of a pending tensor's data"
    assert first.site == f"{__file__}:{where}"
    assert "aten::" in second.reason
    assert (first.nodes, second.nodes) == (1, 1)
    assert f"{__file__}:{where}" in str(scope.report())


def test_branching_on_shapes_does_not_flush(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        h = linear(rand(2, 3))
        if h.size(0) == 2 and h.shape[1] == 4 and len(h) == 2 and h.is_floating_point():
            h = h.new_zeros(h.shape) + torch.ones_like(h) + h
        assert is_pending(h)
        assert scope.report().flushes == []


# --- in-place ops on captured values ---


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "iadd": lambda t: t.__iadd__(1),
    "relu_": lambda t: t.relu_(),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
    "index_put": lambda t: t.index_put_((torch.tensor([0]),), torch.tensor(2.0, dtype=DOUBLE)),
    "out": lambda t: torch.add(t.detach(), 1, out=t.detach()),
    "masked_fill_": lambda t: t.masked_fill_(t > 0, 0.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_in_place_op_on_a_captured_value(linear: nn.Linear, name: str) -> None:
    write = WRITES[name]

    def run(enabled: bool) -> list[Tensor]:
        linear.zero_grad()
        torch.manual_seed(3)
        results = []
        with ab.batch(enabled=enabled):
            for n in (2, 3):
                h = linear(rand(n, 3))
                other = linear(rand(n, 3)).sum()
                before = h + 1
                sibling = h.detach()[0]
                write(h)
                results += [h, before, sibling, other, h * 2]
        torch.cat([r.reshape(-1) for r in results]).sum().backward()
        assert linear.weight.grad is not None
        return [*results, linear.weight.grad.clone()]

    for value, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(value, expected)


def test_a_write_through_a_view_reaches_all_views(linear: nn.Linear) -> None:
    x = rand(2, 3)
    with torch.no_grad(), ab.batch():
        h = linear(x)
        row = h[0]
        h[:, 1:] = 7.0
        h.view(-1)[:1].fill_(3)
        after = h * 2
    expected = linear(x).detach()
    expected[:, 1:] = 7.0
    expected[0, 0] = 3
    for value, other in ((h, expected), (row, expected[0]), (after, expected * 2)):
        torch.testing.assert_close(value, other)


def test_an_optimizer_step_in_the_block(linear: nn.Linear) -> None:
    x = rand(2, 3)

    def run(enabled: bool) -> list[Tensor]:
        model = copy.deepcopy(linear)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        with ab.batch(enabled=enabled):
            for _ in range(3):
                optimizer.zero_grad()
                losses.append(model(x).square().sum())
                losses[-1].backward()
                optimizer.step()
            losses.append(model(x).sum())
        return [*losses, model.weight.detach()]

    for value, expected in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(value, expected)


def test_autocast_gives_eagers_dtypes() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 2))
    xs = [torch.randn(2, 3) for _ in range(3)]

    def run(enabled: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        model.zero_grad()
        with ab.batch(enabled=enabled), torch.autocast("cpu", torch.bfloat16):
            hidden = [model[0](x) for x in xs]
            results = [model(x) for x in xs]
            losses = [F.cross_entropy(r, torch.zeros(2, dtype=torch.long)) for r in results]
            dtypes = [t.dtype for t in (hidden[0], results[0], losses[0])]
        assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
        torch.stack(losses).sum().backward()
        return [*hidden, *results, *losses], [p.grad for p in model.parameters()]

    expected, expected_grads = run(False)
    values, grads = run(True)
    for value, other in zip(values + grads, expected + expected_grads, strict=True):
        torch.testing.assert_close(value, other, rtol=0.05, atol=0.05)


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
    memory = linear.weight.detach().numpy()  # taken inside the block, it would flush
    with pytest.raises(RuntimeError) as raised, ab.batch(verify=True):  # noqa: PT012
        where = line() + 1
        result = linear(rand(2, 3))
        memory[...] += 1
        assert result.shape == (2, 4)
    message = str(raised.value)
    assert "verify: aten::linear" in message
    assert f"captured at {__file__}:{where}" in message
    assert "shape [2, 4]" in message
    assert "native rule in a batch of 1" in message
    with ab.batch(verify=True):
        works_again = linear(rand(2, 3))
    assert works_again.shape == (2, 4)


# --- other threads ---


def in_thread(function: Callable[[], Any]) -> Any:
    outcome: list[Any] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]


def test_a_block_belongs_to_its_thread(linear: nn.Linear) -> None:
    x = rand(2, 3)
    with ab.batch():
        h = linear(x)
        elsewhere = in_thread(lambda: linear(x))
        assert not is_pending(elsewhere)
        assert is_pending(h)
    torch.testing.assert_close(h, elsewhere)


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


def test_a_custom_function_sees_real_tensors(linear: nn.Linear) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert not is_pending(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return g * 2

    x = rand(2, 3)
    with ab.batch():
        result = Double.apply(linear(x)).sum()
    result.backward()
    torch.testing.assert_close(linear.weight.grad, 2 * x.sum(0).expand(4, 3))
