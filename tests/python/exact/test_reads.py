"""Row "Reads": what looks at a pending tensor's values, or at what autograd knows of it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import (
    DOUBLE,
    LENGTHS,
    Blocks,
    assert_deferred,
    differentiate,
    each,
    inputs,
    is_pending,
    rand,
    same,
    weight,
)
from torch import Tensor, nn


def printed(h: Tensor) -> str:
    """What print() writes."""
    file = io.StringIO()
    print(h.detach(), file=file)
    return file.getvalue()


def saved(h: Tensor) -> Any:
    """Through torch.save and torch.load, and how many bytes it took, to a hundred."""
    file = io.BytesIO()
    torch.save(h, file)
    return torch.load(io.BytesIO(file.getvalue())), len(file.getvalue()) // 100


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda h: h.sum().item(),
    "bool": lambda h: bool(h[0, 0] > 0),
    "if": lambda h: "positive" if h.sum() > 0 else "negative",
    "while": lambda h: [i for i in range(9) if h.detach().abs().sum() * i < 5],
    "int": lambda h: int(h[0, 0] * 100),
    "index": lambda h: list(range(9))[h[0].argmax()],
    "float": lambda h: float(h[0, 0]),
    "complex": lambda h: complex(h[0, 0]).real,
    "tolist": lambda h: h.tolist(),
    "tolist_of_integers": lambda h: (h * 10).long().tolist(),
    "numpy": lambda h: h.detach().numpy().copy(),
    "numpy_forced": lambda h: h.numpy(force=True).copy(),
    "asarray": lambda h: np.asarray(h.detach()).copy(),
    "array": lambda h: np.array(h.detach()),
    "__array__": lambda h: h.detach().__array__().copy(),
    "__array__dtype": lambda h: h.detach().__array__(np.float32).copy(),
    "numpy_function": lambda h: np.sum(h.detach().numpy()).item(),
    "data_ptr": lambda h: (h.data_ptr() != 0, h.data_ptr() == h.detach().data_ptr()),
    "storage": lambda h: (h.untyped_storage().nbytes(), h.storage_offset()),
    "print": printed,
    "repr": lambda h: repr(h.detach()),
    "format": lambda h: f"{h.sum():.6f}",
    "format_of_a_matrix": lambda h: f"{h.detach()}",
    "deepcopy": lambda h: copy.deepcopy(h.detach()),
    "deepcopy_of_a_list": lambda h: copy.deepcopy([h.detach(), {"h": h[0].detach()}]),
    "copy": copy.copy,
    "pickle": lambda h: pickle.loads(pickle.dumps(h.detach())),
    "save": lambda h: saved(h.detach()),
    "save_with_history": saved,
    "cpu": lambda h: h.cpu(),
    "to_device": lambda h: h.to("cpu", copy=True),
    "dlpack": lambda h: torch.from_dlpack(h.detach()).clone(),
    "dlpack_to_numpy": lambda h: np.from_dlpack(h.detach()).copy(),
    "nonzero": lambda h: (h > 0).nonzero(),
    "nonzero_as_tuple": lambda h: (h > 0).nonzero(as_tuple=True),
    "argwhere": lambda h: torch.argwhere(h > 0),
    "count_nonzero": lambda h: int(torch.count_nonzero(h > 0)),
    "mask": lambda h: h[h > 0],
    "masked_select": lambda h: h.masked_select(h > 0),
    "where": lambda h: h[torch.where(h[:, 0] > 0)[0]],
    "unique": lambda h: (h > 0).long().unique(),
    "unique_with_counts": lambda h: (h > 0).long().unique(return_inverse=True, return_counts=True),
    "unique_consecutive": lambda h: (h[0] > 0).unique_consecutive(),
    "repeat_interleave": lambda h: h.repeat_interleave((h[:, 0] > 0).long() + 1, 0),
    "bincount": lambda h: torch.bincount((h.view(-1) > 0).long()),
    "equal": lambda h: (torch.equal(h, h), torch.equal(h, h + 1)),
    "allclose": lambda h: torch.allclose(h, h + 1e-12),
    "isin": lambda h: 3.0 in h.detach(),
    "new_tensor": lambda h: h.new_tensor([1, 2]),
    "tensor_of_items": lambda h: torch.tensor([h[0, 0].item(), float(h[0, 1])]),
    "as_tensor": torch.as_tensor,
    "tensor_of_a_tensor": lambda h: torch.tensor(h[0, 0].detach().item()) + h,
    "range": lambda h: list(range(int((h[0] > 0).sum()) + 1)),
    "size_by_value": lambda h: torch.zeros(int((h > 0).sum()) + 1) + h.sum(),
    "slice_by_value": lambda h: h[: int((h > 0).sum()) + 1],
    "sorted": lambda h: sorted(h[0].tolist()),
    "sorted_tensors": lambda h: sorted(h[0].unbind()),
    "max": lambda h: max(h[0]),
    "sum": lambda h: sum(h),
    "all": lambda h: (all(h[0] > 9), any(h[0] < 9)),
    "iteration": lambda h: [x.item() for x in h[0]],
    "is_nonzero": lambda h: torch.is_nonzero(h[0, 0]),
    "assert": lambda h: torch._assert(h.sum() < 1e9, "too large"),
    "hash": lambda h: (hash(h) == hash(h), {h: 1}[h]),
    "share_memory": lambda h: h.detach().share_memory_().is_shared(),
    "is_set_to": lambda h: (h.is_set_to(h), h.is_shared(), h.is_pinned()),
    "module_buffer": lambda h: nn.BatchNorm1d(3).double().register_buffer("b", h),
    "grad": lambda h: h.detach().grad is None,
    "to_dtype": lambda h: (h.float(), h.int(), h.bool(), h.type(torch.bfloat16)),
}

SILENT: dict[str, Callable[[Tensor], Any]] = {
    "len": len,
    "shape": lambda h: (list(h.shape), h.size(0), h.dim(), h.numel(), h.ndim, h.nelement()),
    "stride": lambda h: (h.stride(), h.is_contiguous(), h.t().is_contiguous()),
    "dtype": lambda h: (h.dtype, h.type(), h.is_floating_point(), h.element_size(), h.nbytes),
    "device": lambda h: (h.device, h.is_cpu, h.is_cuda, h.layout, h.is_sparse),
    "requires_grad": lambda h: (h.requires_grad, h.detach().requires_grad),
    "detach": lambda h: h.detach() * 2,
    "isinstance": lambda h: (
        isinstance(h, Tensor),
        isinstance(h, nn.Parameter),
        torch.is_tensor(h),
    ),
    "unpacking": lambda h: [a + b for a, b, _ in h],
    "id": lambda h: (h is h, h in [h]),
    "cpu": lambda h: h.cpu() * 1,
    "to_same": lambda h: h.to(DOUBLE) * 1,
}


@pytest.mark.parametrize("name", READS)
def test_read(name: str) -> None:
    """In the block, of a value of each instance; what is computed next is right too."""

    def case(h: Tensor) -> Any:
        before = h * 3
        return READS[name](h), before, h + 1

    same(each(case))


@pytest.mark.parametrize("name", {**READS, **SILENT})
def test_read_after_the_block(name: str) -> None:
    """The same of a materialised tensor."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block():
            results = [F.linear(x, w) * 2 for x in xs]
        read = [{**READS, **SILENT}[name](h) for h in results]
        differentiate(results)
        return read, results, w

    same(program)


@pytest.mark.parametrize("name", ["item", "tolist", "numpy", "deepcopy", "mask", "print"])
def test_read_of_a_view(name: str) -> None:
    """Of a transposed slice, whose base stays pending or is dead."""
    same(each(lambda h: (READS[name](h.t()[1:].contiguous()), READS[name](h.flip(1)[:, 1:]))))


@pytest.mark.parametrize("name", SILENT)
def test_read_that_needs_no_value(name: str) -> None:
    """Metadata is known at once: nothing is flushed for it, and the instances stay batched."""
    report = same(each(lambda h: (SILENT[name](h), h + 1), (2, 2, 2, 2)))
    assert_deferred(report, batches=5)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "item_of_a_matrix": lambda h: h.item(),
    "bool_of_a_matrix": bool,
    "float_of_a_matrix": float,
    "numpy_with_history": lambda h: h.numpy(),
    "deepcopy_with_history": copy.deepcopy,
    "dlpack_with_history": torch.from_dlpack,
    "index_of_a_float": lambda h: list(range(9))[h[0, 0]],
    "len_of_a_number": lambda h: len(h[0, 0]),
    "iteration_of_a_number": lambda h: list(h[0, 0]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_read_that_eager_refuses(name: str) -> None:
    """Eager's error, and the block goes on after it."""

    def case(h: Tensor) -> Any:
        try:
            REFUSED[name](h)
        except (RuntimeError, TypeError, ValueError, BufferError) as error:
            return type(error).__name__, str(error)[:40], h * 2
        return "no error"

    same(each(case))


# --- only what is needed, with line and reason ---

NAMED = ["item", "bool", "float", "tolist", "numpy", "asarray", "data_ptr", "format", "deepcopy"]
NAMED += ["pickle", "save", "dlpack", "nonzero", "mask", "unique", "print"]


@pytest.mark.parametrize("name", NAMED)
def test_read_is_reported_with_line_and_reason(name: str) -> None:
    """The user's own line, also where a library function reads."""
    w = weight()
    read = READS[name]
    with ab.batch() as scope:
        h = F.linear(rand(2, 3), w) * 2
        read(h)
        (flush,) = scope.report().flushes[:1]
    file, number = flush.site.rsplit(":", 1)
    assert file == __file__
    codes = [function.__code__ for function in (read, printed, saved)]
    assert int(number) in {where for code in codes for _, _, where in code.co_lines()}
    assert flush.reason


@pytest.mark.parametrize("name", ["item", "tolist", "float", "bool", "nonzero", "mask", "numpy"])
def test_read_runs_only_what_it_needs(name: str) -> None:
    """What does not feed the value that is read stays pending."""
    w = weight()
    with ab.batch() as scope:
        needed = F.linear(rand(2, 3), w)
        others = [F.linear(rand(n, 3), w).tanh() for n in LENGTHS]
        READS[name](needed)
        assert all(is_pending(h) for h in others)
        assert scope.report().nodes <= 4
    assert not is_pending(others[0])


def test_read_in_every_instance_leaves_the_rest_batched() -> None:
    """A value read from each instance costs the batching of its own ancestors only."""

    def program(block: Blocks) -> Any:
        w, u, xs = weight(), weight(), inputs([2] * 8)
        results = []
        with block():
            for x in xs:
                gate = (x[0] @ w[0]).sum()
                h = F.linear(x, u).tanh()
                results.append(h * 2 if gate.item() > 0 else h * 2 + 1)
        differentiate(results)
        return results, w, u

    report = same(program)
    for rows in report.signatures:
        if rows.op in ("aten::linear", "aten::tanh"):
            assert rows.batches == 1, str(report)


# --- what autograd knows of a pending tensor, before the flush and after ---


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("which", ["data", "detach"])
def test_read_data_and_detach(which: str, flushed: bool) -> None:
    """They share memory, need no grad, and writing to them is writing to the tensor."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []
        with block() as scope:
            for x in xs:
                h = F.linear(x, w) * 2
                if flushed:
                    scope.flush()
                other = h.data if which == "data" else h.detach()
                read = other * 3
                other.mul_(10)
                results.append((h, other, read, h + 1, other.requires_grad, other.grad_fn))
        differentiate([r[3] for r in results])
        return results, w

    same(program)


@pytest.mark.parametrize("flushed", [False, True])
def test_read_grad_fn(flushed: bool) -> None:
    """There is one exactly where eager has one, and it can be walked to the parameters."""

    def leaves(node: Any, seen: set[int]) -> list[tuple[int, ...]]:
        found = [tuple(node.variable.shape)] if hasattr(node, "variable") else []
        for child, _ in node.next_functions:
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found += leaves(child, seen)
        return found

    def program(block: Blocks) -> Any:
        w, bias, xs, results = weight(), weight(3), inputs(), []
        with block() as scope:
            for x in xs:
                h = F.linear(x, w, bias).tanh()
                cut = h.detach()
                if flushed:
                    scope.flush()
                with torch.no_grad():
                    frozen = F.linear(x, w, bias)
                results.append([t.grad_fn is None for t in (h, cut, frozen, w, x, h[0], h.data)])
                results.append(sorted(set(leaves(h.grad_fn, set()))))
        return results

    same(program)


@pytest.mark.parametrize("flushed", [False, True])
def test_read_is_leaf(flushed: bool) -> None:
    """Also of what requires no grad, of views, and of leaves made in the block."""

    def program(block: Blocks) -> Any:
        w, xs, results = weight(), inputs(), []
        with block() as scope:
            for x in xs:
                h = F.linear(x, w)
                made = h.detach().requires_grad_()
                results.append([t.requires_grad for t in (h, h.detach(), h[0], made)])
                if flushed:
                    scope.flush()
                results.append([t.is_leaf for t in (h, h.detach(), h[0], w, x, made)])
                (made * 2).sum().backward()
                results.append([made, h * 2])
        return results, w

    same(program)


@pytest.mark.parametrize("when", ["pending", "flushed", "after"])
@pytest.mark.parametrize("kind", ["look", "change", "remove"])
def test_read_register_hook(when: str, kind: str) -> None:
    """A hook of a value sees its gradient once, and may replace it."""

    def program(block: Blocks) -> Any:
        w, xs, seen = weight(), inputs(), []

        def hook(g: Tensor) -> Tensor | None:
            seen.append(g.clone())
            return g * 2 if kind == "change" else None

        def register(h: Tensor) -> None:
            handle = h.register_hook(hook)
            if kind == "remove":
                handle.remove()

        with block() as scope:
            hidden = []
            for x in xs:
                h = F.linear(x, w).tanh()
                if when == "flushed":
                    scope.flush()
                if when != "after":
                    register(h)
                hidden.append(h)
            losses = [(h * h).sum() for h in hidden]
        if when == "after":
            for h in hidden:
                register(h)
        for loss in losses:
            loss.backward()
        return seen, w, losses

    same(program)


@pytest.mark.parametrize("when", ["pending", "flushed", "after"])
def test_read_retain_grad(when: str) -> None:
    """`.grad` of a value that is no leaf, in two backward passes."""

    def program(block: Blocks) -> Any:
        w, xs = weight(), inputs()
        with block() as scope:
            hidden = [F.linear(x, w).tanh() for x in xs]
            if when == "flushed":
                scope.flush()
            if when != "after":
                for h in hidden:
                    h.retain_grad()
            losses = [(h * h).sum() for h in hidden]
        if when == "after":
            for h in hidden:
                h.retain_grad()
        losses[0].backward(retain_graph=True)
        first = [h.grad for h in hidden]
        sum(losses).backward()
        return first, [h.grad for h in hidden], [h.retains_grad for h in hidden], w

    same(program)


@pytest.mark.parametrize("inside", [False, True])
def test_read_gradients_of_held_values(inside: bool) -> None:
    """`autograd.grad(loss, h)` of intermediate values, of views of them, and of several at once."""

    def program(block: Blocks) -> Any:
        w, u, xs = weight(), weight(), inputs()

        def grads() -> Any:
            first = [
                torch.autograd.grad(losses[i], [hidden[i], deeper[i]], retain_graph=True)
                for i in range(len(xs))
            ]
            unused = torch.autograd.grad(losses[0], hidden[1], allow_unused=True, retain_graph=True)
            return first, unused, torch.autograd.grad(sum(losses), [*hidden, w, u])

        with block():
            hidden = [F.linear(x, w).tanh() for x in xs]
            deeper = [F.linear(h, u).sigmoid() for h in hidden]
            losses = [(d * h).sum() for h, d in zip(hidden, deeper, strict=True)]
            if inside:
                found = grads()
        if not inside:
            found = grads()
        return found

    same(program)


# --- memory that changes behind the tracer ---


@pytest.mark.parametrize("remade", [False, True])
@pytest.mark.parametrize("use", ["linear", "add", "matmul", "weight", "index"])
def test_read_of_a_numpy_buffer_that_is_refilled(use: str, remade: bool) -> None:
    """`torch.from_numpy(buffer)`, filled for each instance."""

    def program(block: Blocks) -> Any:
        w, buffer, results = weight(), np.zeros((3, 3)), []
        shared = torch.from_numpy(buffer)
        with block():
            for i in range(4):
                buffer[:] = np.arange(9).reshape(3, 3) % (i + 1)
                x = torch.from_numpy(buffer) if remade else shared
                if use == "index":
                    results.append(w[x[0].long()])
                elif use == "weight":
                    results.append(F.linear(w * 1, x))
                elif use == "add":
                    results.append(w + x)
                else:
                    results.append(F.linear(x, w) if use == "linear" else x @ w)
        return results

    same(program)


@pytest.mark.parametrize("how", ["at_once", "nothing_saved"])
def test_read_of_a_numpy_buffer_that_is_refilled_and_gradients(how: str) -> None:
    """Where backward comes before the next filling, or needs no values, eager is well-defined."""

    def program(block: Blocks) -> Any:
        w, buffer, results = weight(), np.zeros((3, 3)), []
        x = torch.from_numpy(buffer)
        with block():
            for i in range(4):
                buffer[:] = np.arange(9).reshape(3, 3) % (i + 1)
                results.append(w + x if how == "nothing_saved" else F.linear(x, w).tanh())
                if how == "at_once":
                    results[-1].sum().backward()
        if how == "nothing_saved":
            differentiate(results)
        return results, w

    same(program)


@pytest.mark.parametrize("way", ["numpy", "data", "detach", "dlpack", "view", "storage"])
def test_read_of_a_tensor_that_is_written_behind_the_tracer(way: str) -> None:
    """A tensor's memory, written through something else that shares it."""

    def program(block: Blocks) -> Any:
        w, x, results = weight(), torch.zeros(2, 3, dtype=DOUBLE), []
        array, bare = x.numpy(), np.from_dlpack(x)
        storage = torch.tensor([], dtype=DOUBLE).set_(x.untyped_storage(), 0, (2, 3))
        with block():
            for i in range(4):
                if way == "numpy":
                    array[:] = i
                elif way == "data":
                    x.data.fill_(i)
                elif way == "detach":
                    x.detach().fill_(i)
                elif way == "dlpack":
                    if not bare.flags.writeable:
                        bare.flags.writeable = True
                    bare[:] = i
                elif way == "view":
                    x.view(-1)[1:].fill_(i)
                else:
                    storage.fill_(i)
                results.append((F.linear(x, w), w[:2] * x))
        return results

    same(program)


def test_read_of_a_weight_that_is_written_through_data() -> None:
    """`p.data.mul_()` and `p.data = ...` between two instances."""

    def program(block: Blocks) -> Any:
        w, u, xs, results = weight(), weight(), inputs(), []
        with block():
            for x in xs:
                results.append(F.linear(x, w) + F.linear(x, u))
                w.data.mul_(2)
                u.data = u.data + 1
        return results, w, u

    same(program)


def test_read_of_a_dead_weights_address() -> None:
    """A weight made for each instance, freed, and its memory given to the next."""

    def program(block: Blocks) -> Any:
        xs, results = inputs([2] * 6), []
        with block():
            for x in xs:
                layer = nn.Linear(3, 3).double()
                results.append(layer(x))
                del layer
                gc.collect()
        return results

    same(program)


def test_read_of_a_dead_inputs_address() -> None:
    """The same of inputs."""

    def program(block: Blocks) -> Any:
        w, results = weight(), []
        with block():
            for i in range(6):
                results.append(F.linear(torch.full((2, 3), float(i), dtype=DOUBLE), w))
        differentiate(results)
        return results, w

    same(program)
