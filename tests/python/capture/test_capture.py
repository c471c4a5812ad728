"""Metadata that is known at capture, and how all references to pending tensors become real."""

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
from helpers_capture import (
    DOUBLE,
    Batch,
    assert_as_eager,
    flat,
    inputs,
    weight,
)
from torch import Tensor

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
