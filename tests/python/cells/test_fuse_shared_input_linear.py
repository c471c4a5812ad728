"""Cells with several products of one tensor (a linear layer per gate), which run as one product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_cells import Variant, compare_with_eager
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.needs("fuse_shared_input_linear")

K, N = 6, 4
Weights = dict[str, Tensor]


def weights(*, dtype: torch.dtype = torch.float32, k: int = K, n: int = N) -> Weights:
    torch.manual_seed(5)
    made = {name: torch.randn(n, k, dtype=dtype) / 3 for name in ("w1", "w2", "w3")}
    made |= {name: torch.randn(n, dtype=dtype) for name in ("b1", "b2", "b3")}
    return {name: w.requires_grad_() for name, w in made.items()}


def inputs(n: int = 7, k: int = K, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(n)
    return [torch.randn(1, k, dtype=dtype).requires_grad_() for _ in range(n)]


def gates(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
    a, b, c = (F.linear(x, w[f"w{i}"], w[f"b{i}"]) for i in (1, 2, 3))
    shared = b.tanh()
    return a.sigmoid() * shared, c.sigmoid() * shared


def program(
    function: Callable[[Tensor, Weights], Any],
    *,
    of: Callable[[Any], Any] = lambda results: results,
    w: Weights | None = None,
    xs: Sequence[Tensor] | None = None,
    **options: Any,
) -> Callable[[Variant], Any]:
    """Returns the results of all calls, and the gradients of `of` results (None if missing)."""

    def run(variant: Variant) -> Any:
        params = weights() if w is None else w
        given = inputs() if xs is None else xs
        called = variant.cell(lambda x: function(x, params))
        with variant.block(**options):
            results = [called(x * 1) for x in given]
        outputs = [t for r in results for t in torch.utils._pytree.tree_leaves(of(r))]
        leaves = [t for t in (*params.values(), *given) if t.requires_grad]
        loss = torch.stack([t.double().square().sum() for t in outputs]).sum()
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        missing = [g is None for g in grads]
        flat = [t.detach() for r in results for t in torch.utils._pytree.tree_leaves(r)]
        return missing, flat, [g for g in grads if g is not None]

    return run


def joined(function: Callable[[], Any]) -> list[str]:
    """Returns the joined products that a profiler records."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        function()
    names = {event.name for event in profiled.events()}
    products = ("aten::linear", "aten::addmm", "aten::mm", "aten::matmul", "aten::mv")
    found = [n for n in names if n.startswith(tuple(f"torch_autobatch::{p}(" for p in products))]
    return [n for n in found if n.count("], ") >= 2 and n.count(f"{N}, {K}]") >= 2]


def is_joined(function: Callable[[Tensor, Weights], Any]) -> bool:
    return bool(joined(lambda: program(function)(Variant(True))))


def test_gates_are_one_product() -> None:
    compare_with_eager(program(gates))
    (forward,) = (n for n in joined(lambda: program(gates)(Variant(True))) if "backward" not in n)
    assert forward.count(f"[{N}, {K}]") == 3
    assert forward.endswith(" x 7")


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "no_bias": lambda x, w, b: F.linear(x, w) + b,
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "mm": lambda x, w, b: torch.mm(x, w.t()) + b,
    "matmul": lambda x, w, b: x @ w.t() + b,
    "vector": lambda x, w, b: F.linear(x[0], w, b),
    "mv": lambda x, w, b: torch.mv(w, x[0]) + b,
    "column": lambda x, w, b: (w @ x.t()).t() + b,
    "rows_of_a_weight": lambda x, w, b: F.linear(x, w[1:3], b[1:3]),
    "columns_of_a_weight": lambda x, w, b: F.linear(x[:, :3], w[:, ::2], b),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    def f(x: Tensor, w: Weights) -> Tensor:
        a, b, c = (FORMS[form](x, w[f"w{i}"], w[f"b{i}"]) for i in (1, 2, 3))
        return a.sigmoid() * b.tanh() + c

    compare_with_eager(program(f))


def test_matrices_that_are_not_transposed() -> None:
    w = {
        name: (t.detach().t().contiguous() if t.dim() == 2 else t) for name, t in weights().items()
    }
    w = {name: t.detach().requires_grad_() for name, t in w.items()}

    def f(x: Tensor, w: Weights) -> Tensor:
        return (x @ w["w1"]).sigmoid() * (x @ w["w2"]).tanh() + (x @ w["w3"] + w["b3"]).exp()

    compare_with_eager(program(f, w=w))


def test_both_ways_round() -> None:
    """One group contains a weight and a transposed weight."""
    square = {name: t.detach()[:, :1] * 1 for name, t in weights(k=N).items() if name[0] == "w"}
    torch.manual_seed(8)
    square = {name: torch.randn(N, N).requires_grad_() for name in square}

    def f(x: Tensor, w: Weights) -> Tensor:
        return (x @ w["w1"].t()).sigmoid() * (x @ w["w2"]).tanh() + x @ w["w3"].t()

    compare_with_eager(program(f, w=square, xs=inputs(k=N)))


def test_one_weight_twice_and_its_parts() -> None:
    def f(x: Tensor, w: Weights) -> Tensor:
        a, b = F.linear(x, w["w1"]), F.linear(x, w["w1"])
        c, d = F.linear(x, w["w1"][:2]), F.linear(x, w["w2"][2:])
        return a.sigmoid() * b.tanh() + torch.cat([c, d], -1).exp()

    compare_with_eager(program(f))


@pytest.mark.parametrize("which", [0, 1])
def test_gates_that_no_gradient_comes_to(which: int) -> None:
    """Weights of unused results have no gradient, and not a gradient of zeros."""
    compare_with_eager(program(gates, of=lambda results: results[which]))

    def apart(x: Tensor, w: Weights) -> tuple[Tensor, Tensor]:
        return F.linear(x, w["w1"]).tanh() * 2, F.linear(x, w["w2"]).sigmoid() * 3

    compare_with_eager(program(apart, of=lambda results: results[which]))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_weights_that_are_not_reached_add_nothing(bad: float) -> None:
    w = weights()
    with torch.no_grad():
        w["w3"].fill_(bad)
    run = program(gates, of=lambda results: results[0], w=w)
    missing, _, grads = run(Variant(True))
    assert missing.count(True) == 2
    assert all(g.isfinite().all() for g in grads)
    compare_with_eager(lambda variant: run(variant)[2])


def test_some_instances_need_both_results_others_one() -> None:
    def run(variant: Variant) -> Any:
        w = weights()
        called = variant.cell(lambda x: gates(x, w))
        with variant.block():
            results = [called(x) for x in inputs(9)]
        parts = [r[k] for i, r in enumerate(results) for k in range(2) if (i + k) % 3 or i > 6]
        loss = torch.stack([t.square().sum() for t in parts]).sum()
        return torch.autograd.grad(loss, list(w.values()))

    compare_with_eager(run)


def test_a_product_that_is_a_result() -> None:
    def f(x: Tensor, w: Weights) -> tuple[Tensor, ...]:
        a, b, c = (F.linear(x, w[f"w{i}"], w[f"b{i}"]) for i in (1, 2, 3))
        return a, b.tanh() * c.sigmoid()

    compare_with_eager(program(f))


def test_products_read_whole_and_in_parts() -> None:
    def f(x: Tensor, w: Weights) -> Tensor:
        a, b, c = (F.linear(x, w[f"w{i}"], w[f"b{i}"]) for i in (1, 2, 3))
        left, right = a.chunk(2, -1)
        pairs = b.view(2, 2)
        total = (left * right.tanh()).sum() + a.softmax(-1).sum() + (pairs @ pairs).sum()
        return torch.cat([c, c.view(4, 1).t(), a], -1).tanh() * total

    dtype = torch.float64
    compare_with_eager(program(f, w=weights(dtype=dtype), xs=inputs(dtype=dtype)))


def test_a_product_of_a_detached_part() -> None:
    def f(x: Tensor, w: Weights) -> Tensor:
        a, b, c = (F.linear(x, w[f"w{i}"], w[f"b{i}"]) for i in (1, 2, 3))
        return a.detach().sigmoid() * b.tanh() + c * b.detach()

    compare_with_eager(program(f))


@pytest.mark.parametrize("xs_need", [True, False])
def test_frozen_weights(xs_need: bool) -> None:
    w = weights()
    for name in ("w2", "b1", "b2"):
        w[name].requires_grad_(False)
    xs = [x.requires_grad_(xs_need) for x in inputs()]
    compare_with_eager(program(gates, w=w, xs=xs))


def test_more_than_one_row() -> None:
    torch.manual_seed(1)
    compare_with_eager(program(gates, xs=[torch.randn(3, K).requires_grad_() for _ in range(4)]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    run = program(gates, w=weights(dtype=dtype), xs=inputs(dtype=dtype))
    if dtype == torch.float64:
        compare_with_eager(run)
    ours, eager = run(Variant(True)), run(Variant(False))
    assert ours[0] == eager[0]
    torch.testing.assert_close(ours[1:], eager[1:], rtol=3e-2, atol=3e-2)


def test_autocast() -> None:
    run = program(gates)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, eager = run(Variant(True)), run(Variant(False))
    assert ours[0] == eager[0]
    torch.testing.assert_close(ours[1:], eager[1:], rtol=3e-2, atol=3e-2)


def test_weights_too_large_to_be_copied() -> None:
    w = weights(dtype=torch.float64, k=300, n=200)
    compare_with_eager(program(gates, w=w, xs=inputs(5, 300, torch.float64)))


@pytest.mark.parametrize("options", [{"verify": True}, {"check_cells": True}])
def test_checks(options: dict[str, Any]) -> None:
    def run(variant: Variant) -> Any:
        return program(gates, **(options if variant.enabled else {}))(variant)

    compare_with_eager(run, bodies="verify" not in options)


class Lstm(nn.Module):
    """Each gate has separate layers for x and for h, which form two groups."""

    def __init__(self, gates: int = 4) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.of_x = nn.ModuleList(nn.Linear(K, N) for _ in range(gates))
        self.of_h = nn.ModuleList(nn.Linear(N, N, bias=False) for _ in range(gates))

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, o, g = (u(x) + v(h) for u, v in zip(self.of_x, self.of_h, strict=True))
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def gru(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        xs, hs = [u(x) for u in self.of_x], [v(h) for v in self.of_h]
        r, z = (xs[0] + hs[0]).sigmoid(), (xs[1] + hs[1]).sigmoid()
        return (1 - z) * (xs[2] + r * hs[2]).tanh() + z * h, c


def sequences(kind: str, variant: Variant, *, hold: bool = False) -> tuple[Lstm, list[Tensor]]:
    model = Lstm(4 if kind == "step" else 3)
    step = variant.cell(getattr(model, kind))
    torch.manual_seed(4)
    held = []
    for _ in range(2):  # from the second block on, the products of x run before the cell
        held = []
        with variant.block():
            for length in (3, 1, 4, 2):
                h = c = torch.zeros(1, N)
                for x in torch.randn(length, K).split(1):
                    h, c = step(x, h, c)
                    held += [h, c] if hold else []
                held += [] if hold else [h]
    return model, held


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("kind", ["step", "gru"])
def test_recurrent_cells(kind: str, hold: bool) -> None:
    """Also tests held states. Subgraphs whose results are read again are unfolded."""

    def run(variant: Variant) -> Any:
        model, held = sequences(kind, variant, hold=hold)
        loss = torch.stack([t.square().sum() for t in held]).sum()
        return held, torch.autograd.grad(loss, list(model.parameters()))

    compare_with_eager(run)


def test_create_graph() -> None:
    def run(variant: Variant) -> Any:
        model, held = sequences("step", variant)
        params = list(model.parameters())
        loss = torch.stack([t.square().sum() for t in held]).sum()
        first = torch.autograd.grad(loss, params, create_graph=True)
        total = torch.stack([g.square().sum() for g in first]).sum()
        return [g.detach() for g in first], torch.autograd.grad(total, params)

    compare_with_eager(run)


def test_twice_with_retain_graph() -> None:
    def run(variant: Variant) -> Any:
        model, held = sequences("step", variant)
        params = list(model.parameters())
        loss = torch.stack([t.square().sum() for t in held]).sum()
        first = torch.autograd.grad(loss, params, retain_graph=True)
        second = torch.autograd.grad(loss, params)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, params)
        return first, second

    compare_with_eager(run)


def test_hooks_of_weights() -> None:
    def run(variant: Variant) -> Any:
        w = weights()
        seen: list[tuple[str, Tensor]] = []
        for name, t in w.items():
            t.register_hook(lambda g, name=name: seen.append((name, g.clone())))
        called = variant.cell(lambda x: gates(x, w))
        with variant.block():
            total = torch.stack([called(x)[0].square().sum() for x in inputs()]).sum()
        total.backward()
        seen.sort(key=lambda item: item[0])
        return [name for name, _ in seen], [g for _, g in seen]

    ours, eager = run(Variant(True)), run(Variant(False))
    assert ours[0] == eager[0] == ["b1", "b2", "w1", "w2"]
    torch.testing.assert_close(ours[1], eager[1])


@pytest.mark.parametrize("way", ["data", "in_place"])
@pytest.mark.parametrize("when", ["before", "between", "after_a_read"])
def test_weights_that_are_written_to(way: str, when: str) -> None:
    """An op reads the weights as they were at its capture, in any flush."""

    def run(variant: Variant) -> Any:
        w = weights()
        called = variant.cell(lambda x: gates(x, w))

        def write() -> None:
            with torch.no_grad():
                (w["w2"].data if way == "data" else w["w2"]).mul_(2)

        results = []
        with torch.no_grad(), variant.block():
            results += [called(x) for x in inputs(3)]
            if when == "after_a_read":
                results[0][0].sum().item()
            if when != "before":
                write()
            results += [called(x) for x in inputs(4)]
        write()
        with torch.no_grad(), variant.block():
            results += [called(x) for x in inputs(5)]
        return results

    compare_with_eager(run)


def test_written_to_before_backward() -> None:
    """Writes through `.data` change no version counter, so eager reads the new content."""

    def run(variant: Variant) -> Any:
        w = weights()
        called = variant.cell(lambda x: gates(x, w))
        xs = inputs()
        with variant.block():
            loss = torch.stack([called(x)[0].square().sum() for x in xs]).sum()
        w["w2"].data.mul_(3)
        return torch.autograd.grad(loss, xs)

    compare_with_eager(run)

    w = weights()
    called = ab.cell(lambda x: gates(x, w))
    with ab.batch():
        loss = torch.stack([called(x)[0].square().sum() for x in inputs()]).sum()
    with torch.no_grad():
        w["w2"].mul_(3)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_cells_that_differ_in_their_weights() -> None:
    def run(variant: Variant) -> Any:
        experts = [
            {name: (t.detach() * k).requires_grad_() for name, t in weights().items()}
            for k in (1, 2, 3)
        ]
        called = variant.cell(lambda x, *w: gates(x, dict(zip(experts[0], w, strict=True))))
        with variant.block():
            results = [called(x, *experts[i % 3].values()) for i, x in enumerate(inputs(9))]
        loss = torch.stack([t.square().sum() for r in results for t in r]).sum()
        return results, torch.autograd.grad(loss, [t for w in experts for t in w.values()])

    compare_with_eager(run)


def test_a_map_that_reads_in_between() -> None:
    def run(variant: Variant) -> Any:
        w = weights()
        called = variant.cell(lambda x: gates(x, w))

        def instance(x: Tensor) -> Tensor:
            h, c = called(x)
            for _ in range(4):
                if h.sum().item() > 0.3:
                    h, c = called(torch.cat([h, c[:, :2]], -1))
            return h + c

        xs = inputs(12)
        if variant.enabled:
            with variant.block():
                results = ab.map(instance, xs)
        else:
            results = [instance(x) for x in xs]
        loss = torch.stack([t.square().sum() for t in results]).sum()
        return results, torch.autograd.grad(loss, list(w.values()))

    compare_with_eager(run)


def test_what_is_not_joined() -> None:
    def of_different(x: Tensor, w: Weights) -> Tensor:
        return F.linear(x, w["w1"]).tanh() * F.linear(x + 1, w["w2"]).sigmoid()

    def with_and_without(x: Tensor, w: Weights) -> Tensor:
        return F.linear(x, w["w1"]).tanh() * F.linear(x, w["w2"], w["b2"]).sigmoid()

    assert not is_joined(of_different)
    assert not is_joined(with_and_without)
    assert is_joined(gates)
