"""Functions of parameters that each instance computes again are computed once, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_rules import assert_same, check, rand
from torch import Tensor, nn
from torch.nn.utils import prune

pytestmark = pytest.mark.needs("common_subexpressions")

Function = Callable[[Tensor, Tensor], Tensor]

# Functions of a parameter [4, 4] and an instance [n, 4], and the number of nodes that depend only
# on the parameter.
FUNCTIONS: dict[str, tuple[Function, int]] = {
    "linear": (lambda w, x: F.linear(x, w / w.norm(dim=1, keepdim=True)), 2),
    "matmul": (lambda w, x: x @ w.softmax(0), 1),
    "matmul of a batch": (lambda w, x: x.view(-1, 1, 4) @ w.softmax(0), 1),
    "matrix times vector": (lambda w, x: w.softmax(0) @ x[0], 1),
    "low rank": (lambda w, x: x @ (w[:, :2] @ w[:2]), 1),
    "transposed": (lambda w, x: x @ (w - w.t()).matrix_exp(), 2),
    "several matrices": (lambda w, x: x @ w.exp()[:2].t() + x @ w.exp()[2:].t(), 1),
    "elementwise": (lambda w, x: x * w[0].sigmoid() + w[1].exp(), 2),
    "views": (lambda w, x: x * w.tanh().view(2, 8)[1, :4].expand(x.shape[0], 4), 1),
    "scalar": (lambda w, x: x * w.sum().exp() / w.abs().max(), 4),
    "lookup": (lambda w, x: F.embedding(torch.arange(len(x)) % 4, F.normalize(w)) * x, 1),
    "convolution": (lambda w, x: F.conv1d(x.t(), w.exp().view(4, 2, 2), groups=2), 1),
    "mask": (lambda w, x: x @ (w * torch.ones(4, 4, dtype=w.dtype).tril()), 1),
    "layer norm": (lambda w, x: F.layer_norm(x, (4,), 1 + w[0], w[1].exp()), 2),
}


def instances() -> list[Tensor]:
    return [rand(n, 4) for n in (3, 5, 3, 2)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_a_parameter_is_computed_once(name: str) -> None:
    function, nodes = FUNCTIONS[name]
    report = check(function, *instances(), parameters=[rand(4, 4)])
    assert report.passes["common_subexpressions"] >= 3 * nodes, report


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"mask"}))  # the factory runs eagerly
def test_without_gradients(name: str) -> None:
    function, _ = FUNCTIONS[name]
    w, xs = rand(4, 4).requires_grad_(), instances()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            expected = [function(w, x) for x in xs]
            with ab.batch(adaptive=False) as scope:
                results = [function(w, x) for x in xs]
            for result, other in zip(results, expected, strict=True):
                assert_same(name, result, other)
            assert len(scope.report().flushes) == 1
            assert scope.report().passes["common_subexpressions"] >= 3, scope.report()


def test_verify() -> None:
    for function, _ in FUNCTIONS.values():
        w, xs = rand(4, 4).requires_grad_(), instances()
        with ab.batch(verify=True):
            total = torch.stack([function(w, x).sum() for x in xs]).sum()
        total.backward()


def test_modules_with_weight_norm_and_pruning() -> None:
    """Compares results and gradients. Each layer is one call for all instances."""
    torch.manual_seed(0)
    layer: Any = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, dtype=torch.float64))
    pruned = nn.Linear(4, 4, dtype=torch.float64)
    prune.random_unstructured(pruned, "weight", 0.5)
    conv: Any = nn.utils.parametrizations.weight_norm(
        nn.Conv1d(4, 4, 3, padding=1, dtype=torch.float64)
    )
    modules = nn.ModuleList([layer, pruned, conv])
    xs = instances()

    def model(x: Tensor) -> Tensor:
        hidden = pruned(layer(x))
        return conv(hidden.t()).relu().t() * hidden

    def run(enabled: bool) -> tuple[list[Tensor], ab.Report]:
        modules.zero_grad()
        with ab.batch(enabled=enabled, adaptive=False) as scope:
            results = [model(x) for x in xs]
        torch.stack([r.square().sum() for r in results]).sum().backward()
        grads = [p.grad for p in modules.parameters() if p.grad is not None]
        return [*results, *(g.clone() for g in grads)], scope.report()

    expected, _ = run(False)
    found, report = run(True)
    assert len(found) == len(xs) + len(list(modules.parameters()))
    for value, other in zip(found, expected, strict=True):
        assert_same("result or gradient", value, other)
    layers = [s for s in report.signatures if s.op in ("aten::linear", "aten::conv1d")]
    assert {s.rule for s in layers} == {"native"}
    assert [s.launches for s in layers if s.op == "aten::conv1d"] == [1]


def losses(
    enabled: bool, function: Function = FUNCTIONS["linear"][0]
) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    w = rand(4, 4).requires_grad_()
    xs = instances()
    with ab.batch(enabled=enabled, adaptive=False):
        return w, [function(w, x).tanh().sum() for x in xs]


def test_each_loss_can_be_differentiated_by_itself() -> None:
    """Backward of a loss frees the values of its instance, but no values that others need."""
    grads = []
    for enabled in (True, False):
        w, each = losses(enabled)
        for loss in each[:2]:
            loss.backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
        (each[2] + each[3]).backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            sum(each).backward()  # type: ignore[union-attr]
        grads.append(w.grad)
    assert_same("gradient", *grads)


@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_each_loss(create_graph: bool) -> None:
    found = []
    for enabled in (True, False):
        w, each = losses(enabled)
        grads = [torch.autograd.grad(x, w, create_graph=create_graph)[0] for x in each]
        if create_graph:
            grads += torch.autograd.grad(sum(g.square().sum() for g in grads), w)  # type: ignore[arg-type]
        found.append(grads)
    for grad, other in zip(*found, strict=True):
        assert_same("gradient", grad, other)


@pytest.mark.parametrize("name", ["linear", "matmul", "scalar", "views", "several matrices"])
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_within_the_block_after_a_read(name: str, create_graph: bool) -> None:
    """The read runs the shared nodes. A gradient of one loss does not consume them for others."""
    function, _ = FUNCTIONS[name]

    def gradient(loss: Tensor) -> Tensor:
        return torch.autograd.grad(loss, w, create_graph=create_graph)[0]

    def read_and_differentiate(x: Tensor) -> Tensor | None:
        loss = function(w, x).tanh().sum()
        return None if loss.item() > 1e9 else gradient(loss)

    w, xs = rand(4, 4).requires_grad_(), instances()
    expected = [gradient(function(w, x).tanh().sum()) for x in xs]
    with ab.batch(adaptive=False):
        losses = [function(w, x).tanh().sum() for x in xs]
        losses[1].item()
        found = [gradient(loss) for loss in losses]
        if not create_graph:
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                gradient(losses[0])
    for values in (found, ab.map(read_and_differentiate, xs)):
        for grad, other in zip(values, expected, strict=True):
            assert_same("gradient", grad, other)


def test_held_results_are_tensors_of_their_own() -> None:
    def held(enabled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        w, xs = rand(4, 4).requires_grad_(), instances()
        with ab.batch(enabled=enabled):
            squares = [w.square() for _ in xs]
            for square in squares[:3]:
                square.retain_grad()
            results = [(x @ square).sum() for x, square in zip(xs, squares, strict=True)]
        with torch.no_grad():
            squares[3].add_(1)
        found = [square.detach().clone() for square in squares]
        torch.stack(results[:3]).sum().backward()
        assert w.grad is not None
        return [*found, w.grad, *(s.grad for s in squares[:3] if s.grad is not None)]

    for value, other in zip(held(True), held(False), strict=True):
        assert_same("held", value, other)


def test_writes_hooks_and_random_numbers_stay_apart() -> None:
    seen: list[Tensor] = []

    def written(w: Tensor, x: Tensor) -> Tensor:
        scaled = w + 1
        before = scaled * 2
        scaled[0] += x[0]
        return (x @ scaled + before[0]).sum()

    def hooked(w: Tensor, x: Tensor) -> Tensor:
        scale = w.exp()
        scale.register_hook(lambda grad: seen.append(grad))
        return (x @ scale).sum()

    check(written, *instances(), parameters=[rand(4, 4)])
    check(hooked, *instances(), parameters=[rand(4, 4)])
    assert len(seen) == 8
    by_sum = [sorted(grads, key=lambda g: g.sum().item()) for grads in (seen[:4], seen[4:])]
    for grad, other in zip(*by_sum, strict=True):  # the hooks may run in another order
        assert_same("gradient of a hook", grad, other)
    w = torch.ones(1000).requires_grad_()
    with ab.batch() as scope:
        drawn = [(F.dropout(w * 1, 0.5) * x[0, 0].float()).detach() for x in instances()]
    assert not torch.equal(drawn[0] != 0, drawn[1] != 0)
    assert scope.report().passes["common_subexpressions"] == 3  # only for w * 1


def test_a_read_in_each_instance() -> None:
    def reads(w: Tensor, x: Tensor) -> Tensor:
        hidden = x @ w.softmax(0)
        if hidden.sum().item() > 0:
            hidden = hidden @ w.softmax(0)
        return hidden.tanh().sum()

    torch.manual_seed(0)
    w, xs = rand(4, 4).requires_grad_(), instances()
    expected = torch.stack([reads(w, x) for x in xs]).sum()
    (gradient,) = torch.autograd.grad(expected, w)
    for run in (lambda: ab.map(lambda x: reads(w, x), xs), lambda: [reads(w, x) for x in xs]):
        with ab.batch(adaptive=False):
            total = torch.stack(list(run())).sum()
        assert_same("total", total, expected)
        assert_same("gradient", torch.autograd.grad(total, w)[0], gradient)


def test_parameters_may_change_within_the_block() -> None:
    torch.manual_seed(0)
    w, xs = rand(4, 4), instances()
    expected = []
    for i, x in enumerate(xs):
        expected.append(x @ (w + i).softmax(0))
    v = w.clone().requires_grad_()
    with torch.no_grad(), ab.batch(adaptive=False):
        results = []
        for x in xs:
            results.append(x @ v.softmax(0))
            v += 1
    for result, other in zip(results, expected, strict=True):
        assert_same("result", result, other)


def test_many_different_operands_are_not_compared_for_long() -> None:
    """The pass stops comparing the nodes of a signature if all of them differ."""
    table = rand(600, 4).requires_grad_()
    with ab.batch() as scope:
        rows = [table[i] * 2 for i in range(600)]
        again = [table[i] * 2 for i in range(600)]
        total = torch.stack([(a * b).sum() for a, b in zip(rows, again, strict=True)]).sum()
        del rows, again
    total.backward()
    assert "common_subexpressions" not in scope.report().passes
