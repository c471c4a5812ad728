"""Row "Reads": operations that read the values of a pending tensor."""

from __future__ import annotations

import copy
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

# --- values ---


def printed(h: Tensor) -> str:
    """Returns the text that print() writes."""
    file = io.StringIO()
    print(h.detach(), file=file)
    return file.getvalue()


def saved(h: Tensor) -> Any:
    """Saves and loads the tensor. Also returns the size of the file in hundreds of bytes."""
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
    """Reads a value of each instance in the block. Later values are also right."""

    def case(h: Tensor) -> Any:
        before = h * 3
        return READS[name](h), before, h + 1

    same(each(case))


@pytest.mark.parametrize("name", {**READS, **SILENT})
def test_read_after_the_block(name: str) -> None:
    """Performs the read on a materialised tensor."""

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
    """Reads a transposed slice, whose base stays pending or is freed."""
    same(each(lambda h: (READS[name](h.t()[1:].contiguous()), READS[name](h.flip(1)[:, 1:]))))


@pytest.mark.parametrize("name", SILENT)
def test_read_that_needs_no_value(name: str) -> None:
    """Metadata is known at capture, so there is no flush, and the instances stay batched."""
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
    """The block raises eager's error, and continues after it."""

    def case(h: Tensor) -> Any:
        try:
            REFUSED[name](h)
        except (RuntimeError, TypeError, ValueError, BufferError) as error:
            return type(error).__name__, str(error)[:40], h * 2
        return "no error"

    same(each(case))


# --- a read runs only the nodes it needs, and reports line and reason ---


NAMED = ["item", "bool", "float", "tolist", "numpy", "asarray", "data_ptr", "format", "deepcopy"]


NAMED += ["pickle", "save", "dlpack", "nonzero", "mask", "unique", "print"]


@pytest.mark.parametrize("name", NAMED)
def test_read_is_reported_with_line_and_reason(name: str) -> None:
    """The report shows the user's line, even if a library function reads the value."""
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
    """Only nodes that the value depends on run, and nodes that join their batches."""
    w = weight()
    with ab.batch() as scope:
        needed = F.linear(rand(2, 3), w)
        others = [F.linear(rand(n, 3), w).tanh() for n in LENGTHS]
        READS[name](needed)
        assert all(is_pending(h) for h in others)
        assert scope.report().nodes <= 2 + len(LENGTHS)  # all linear ops, not all tanh
    assert not is_pending(others[0])


def test_read_in_every_instance_leaves_the_rest_batched() -> None:
    """If each instance reads a value, only the nodes that this value depends on are not batched."""

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
