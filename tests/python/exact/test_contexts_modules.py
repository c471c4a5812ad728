"""Row "Contexts": modules, their hooks and buffers, and other kinds of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import (
    DOUBLE,
    LENGTHS,
    Blocks,
    assert_deferred,
    differentiate,
    each,
    inputs,
    rand,
    same,
    weight,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

# --- modules ---


def test_context_module_hooks() -> None:
    """Tests order, arguments and replacements of forward(-pre) and backward(-pre) hooks."""

    def program(block: Blocks) -> Any:
        model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        calls: list[Any] = []
        for i, layer in enumerate(model):
            layer.register_forward_pre_hook(lambda m, a, i=i: calls.append(("pre", i, a[0].shape)))
            layer.register_forward_hook(lambda m, a, r, i=i: calls.append(("forward", i, r.shape)))
            layer.register_full_backward_pre_hook(lambda m, g, i=i: calls.append(("back pre", i)))
            layer.register_full_backward_hook(lambda m, gi, go, i=i: calls.append(("back", i)))
        model[1].register_forward_hook(lambda m, a, r: r * 1.5)
        model[2].register_forward_pre_hook(lambda m, a: (a[0] + 1,))
        model[0].register_full_backward_hook(lambda m, gi, go: gi)
        xs = inputs()
        with block():
            results = [model(x) for x in xs]
        forward = list(calls)
        for r in results:
            r.sum().backward()
        return results, list(model.parameters()), forward, calls

    same(program)


def test_context_global_module_hooks() -> None:
    """Tests hooks that apply to all modules."""

    def program(block: Blocks) -> Any:
        calls: list[str] = []
        hooks = nn.modules.module
        handles = [
            hooks.register_module_forward_pre_hook(lambda m, a: calls.append(type(m).__name__)),
            hooks.register_module_forward_hook(lambda m, a, r: r * 2),
            hooks.register_module_full_backward_hook(lambda m, a, b: calls.append("back")),
        ]
        try:
            model, xs = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).double(), inputs()
            with block():
                results = [model(x) for x in xs]
            differentiate(results)
        finally:
            for handle in handles:
                handle.remove()
        return results, calls, list(model.parameters())

    same(program)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch_norm": lambda: nn.BatchNorm1d(3),
    "batch_norm_cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "batch_norm_no_affine": lambda: nn.BatchNorm1d(3, affine=False),
    "batch_norm_no_statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "batch_norm_eval": lambda: nn.BatchNorm1d(3).eval(),
    "instance_norm": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)), nn.Flatten(1), nn.LayerNorm(3), nn.Dropout(0.0)
    ),
    "instance_norm_with_statistics": lambda: nn.InstanceNorm1d(5, track_running_stats=True),
}


@pytest.mark.parametrize("name", NORMS)
def test_context_batch_norm_statistics(name: str) -> None:
    """Running statistics match eager mode after each instance, and evaluation uses them."""

    def program(block: Blocks) -> Any:
        norm, w = NORMS[name]().double(), weight()
        xs, buffers = [rand(5, 3) for _ in range(4)], []
        with block():
            results = []
            for x in xs:
                results.append(norm(F.linear(x, w)).tanh())
                buffers.append([b.clone() for b in norm.buffers()])
        norm.eval()
        with block():
            results += [norm(F.linear(x, w)) for x in xs]
        differentiate(results)
        return results, buffers, list(norm.buffers()), list(norm.parameters()), w

    same(program)


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "parametrize": lambda: nn.Linear(3, 3),
    "parametrize_cached": lambda: nn.Linear(3, 3),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "old_weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "old_spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_context_parametrize(name: str) -> None:
    """Tests weights that are computed at each use, or once in a cached region."""

    def program(block: Blocks) -> Any:
        layer = PARAMETRIZED[name]().double()
        if name.startswith("parametrize"):
            parametrize.register_parametrization(layer, "weight", Symmetric())
        xs = inputs()
        with block():
            if name == "parametrize_cached":
                with parametrize.cached():
                    results = [layer(x).tanh() for x in xs]
            else:
                results = [layer(x).tanh() for x in xs]
        differentiate(results)
        return results, list(layer.parameters()), list(layer.buffers()), layer.weight

    same(program)


def test_context_parametrize_cached_stays_batched() -> None:
    """A weight that is computed once in the block is one weight for all instances."""

    def program(block: Blocks) -> Any:
        layer = nn.Linear(3, 3).double()
        parametrize.register_parametrization(layer, "weight", Symmetric())
        with block(), parametrize.cached():
            results = [layer(x).tanh() for x in inputs([2] * 8)]
        differentiate(results)
        return results, list(layer.parameters())

    assert_deferred(same(program), batches=5)


# --- other kinds of tensors ---


def to_sparse(h: Tensor) -> Any:
    s = (h * (h > 0)).to_sparse()
    return s.coalesce().values(), s.to_dense(), torch.sparse.mm(s.detach(), h.t())


def csr(h: Tensor) -> Any:
    s = torch.eye(3, dtype=DOUBLE).to_sparse_csr()
    return s @ h.t(), s


def quantized(h: Tensor) -> Any:
    q = torch.quantize_per_tensor(h.float().detach(), 0.1, 10, torch.qint8)
    return q, q.dequantize() * 2, q.int_repr(), (q.q_scale(), q.q_zero_point())


def nested(h: Tensor) -> Any:
    n = torch.nested.nested_tensor([h.detach(), h.detach()[:1]])
    return n.to_padded_tensor(0.0), [part * 2 for part in n.unbind()]


def nested_jagged(h: Tensor) -> Any:
    n = torch.nested.nested_tensor([h.detach(), h.detach()[:1]], layout=torch.jagged)
    return (n * 2).values(), n.offsets()


def nested_as(h: Tensor) -> Any:
    n = torch.nested.as_nested_tensor([h, h[:1]])
    return [part * 2 for part in n.unbind()]


def on_meta(h: Tensor) -> Any:
    return (
        h.detach().to("meta"),
        torch.empty(2, 3, device="meta") @ torch.empty(3, 2, device="meta"),
        h * 2,
    )


def complex_numbers(h: Tensor) -> Any:
    c = torch.complex(h, h * 2)
    return c, c.conj(), (c * 1j).real, c.imag, c.abs(), torch.view_as_real(c), c.angle(), c.mH @ c


def complex_views(h: Tensor) -> Any:
    c = h + 1j
    return c.conj() * 2, c.conj().imag, c.real * 3, torch.view_as_complex(torch.stack([h, h], -1))


KINDS = {
    "sparse": to_sparse,
    "sparse_csr": csr,
    "quantised": quantized,
    "nested": nested,
    "nested_jagged": nested_jagged,
    "nested_with_history": nested_as,
    "meta": on_meta,
    "complex": complex_numbers,
    "complex_views": complex_views,
    "masked": lambda h: torch.masked.softmax(h, -1, mask=h > -1),
    "zero_size": lambda h: (h[:0], h[:0].sum(), torch.cat([h[:0], h]), h[:0] @ h.new_ones(3, 2)),
    "scalar": lambda h: (h.sum(), h.sum() * h, h.sum().expand(2), torch.stack([h.sum()])),
    "mkldnn": lambda h: h.float().detach().to_mkldnn().to_dense(),
    "half": lambda h: (h.half() * 2, h.bfloat16().sum(), h.half().float()),
    "float8": lambda h: h.detach().float().to(torch.float8_e4m3fn).float(),
    "integers": lambda h: (h.int() // 2, h.long() % 3, h.to(torch.uint8), h.short() << 1),
    "booleans": lambda h: ((h > 0) & (h < 1), ~(h > 0), (h > 0).any(0), (h > 0).all()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", KINDS)
def test_context_kind_of_tensor(name: str) -> None:
    """Tensors of other kinds (sparse, nested, meta, ...) give the results of eager mode."""
    same(each(KINDS[name]))


@pytest.mark.parametrize("layer", ["embedding", "embedding_bag"])
def test_context_sparse_gradients(layer: str) -> None:
    """A sparse gradient is accumulated over instances."""

    def program(block: Blocks) -> Any:
        table = (
            nn.Embedding(7, 3, sparse=True)
            if layer == "embedding"
            else nn.EmbeddingBag(7, 3, mode="sum", sparse=True)
        ).double()
        with block():
            results = [table(torch.arange(n)[None]) * 2 for n in LENGTHS]
        differentiate(results)
        gradient = table.weight.grad
        assert gradient is not None
        return results, gradient.is_sparse, gradient.coalesce().to_dense()

    same(program)


def test_context_dynamic_quantised_module() -> None:
    """Calls a model that torch.ao quantised, and an ordinary model, in one block."""

    def program(block: Blocks) -> Any:
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(3, 3)), {nn.Linear})
        w, xs = weight(dtype=torch.float32), [rand(2, 3, dtype=torch.float32) for _ in range(3)]
        with block():
            return [model(F.linear(x, w)) for x in xs]

    same(program)
