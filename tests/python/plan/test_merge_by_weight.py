"""Products with different weights that run as one batch: the linear layers of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_backward import assert_close, grads_of
from helpers_rules import check, rand
from torch import Tensor, nn

DOUBLE = torch.float64
WIDTH = 4


class Experts(nn.Module):
    """A row passes through an expert with two layers. A residual connection adds the row itself."""

    def __init__(self, experts: int = 3, bias: bool = True) -> None:
        super().__init__()
        layers = (nn.Linear(WIDTH, WIDTH, bias, dtype=DOUBLE) for _ in range(2 * experts))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        inner = self.layers[2 * expert](x).relu()
        outer: Tensor = self.layers[2 * expert + 1](inner)
        return x + outer


ROUTE = (0, 2, 1, 0, 2, 2, 0)


def rows(ragged: bool) -> list[Tensor]:
    return [rand(1 + i % 3 if ragged else 1, WIDTH).requires_grad_() for i in range(len(ROUTE))]


def losses(model: Experts, x: Sequence[Tensor]) -> list[Tensor]:
    return [model(each, e).square().sum() for each, e in zip(x, ROUTE, strict=True)]


def batches_run(function: Callable[[], object], op: str) -> list[int]:
    """Returns the members of each batch of the op, according to the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    named = [e.name for e in profile.events() if f"torch_autobatch::{op}(" in e.name]
    return [int(name.rpartition(" x ")[2]) for name in named if "backward" not in name]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ragged", [False, True])
def test_experts(ragged: bool, bias: bool) -> None:
    model, x = Experts(bias=bias), rows(ragged)
    expected = losses(model, x)
    torch.stack(expected).sum().backward()
    wanted = grads_of(model), [each.grad for each in x]
    model.zero_grad()
    for each in x:
        each.grad = None
    with ab.batch() as scope:
        results = losses(model, x)
    torch.stack(results).sum().backward()
    assert_close(results, expected)
    assert_close((grads_of(model), [each.grad for each in x]), wanted)
    counts = {(s.op, s.batches) for s in scope.report().signatures}  # batches in the schedule
    assert ("aten::linear", 1) in counts
    assert sum(s.batches for s in scope.report().signatures if s.op == "aten::linear") == 6


@pytest.mark.needs("merge_by_weight")
def test_they_run_as_one() -> None:
    model, x = Experts(), rows(False)

    def step() -> None:
        with ab.batch():
            _results = losses(model, x)

    assert batches_run(step, "aten::linear") == [len(ROUTE)] * 2


def test_what_has_the_same_inputs_stays_apart() -> None:
    gates = [nn.Linear(WIDTH, WIDTH, dtype=DOUBLE) for _ in range(3)]
    x = rows(False)

    def step() -> None:
        with ab.batch():
            _results = [[gate(each) for gate in gates] for each in x]

    assert batches_run(step, "aten::linear") == [len(x)] * 3


def test_what_waits_for_another_stays_apart() -> None:
    weights = [rand(WIDTH, WIDTH) for _ in range(3)]

    def chain(a: Tensor, b: Tensor, c: Tensor, x: Tensor) -> Tensor:
        return F.linear(F.linear(F.linear(x, a), b), c)

    check(chain, *[(rand(n, WIDTH),) for n in (1, 3, 2)], parameters=weights)


def test_backward_of_some_and_again() -> None:
    model, x = Experts(), rows(True)
    for chosen in ([1], [0, 3], [2, 4, 5], list(range(len(ROUTE)))):
        expected = losses(model, x)
        with ab.batch():
            results = losses(model, x)
        for kept in (True, False):
            of = [
                torch.autograd.grad(
                    [each[i] for i in chosen],
                    [*model.parameters(), *x],
                    retain_graph=kept,
                    allow_unused=True,
                )
                for each in (expected, results)
            ]
            assert_close(of[1], of[0])
        with pytest.raises(RuntimeError, match="second time"):
            results[chosen[0]].backward()


@pytest.mark.parametrize("policy", ab.policy_names())
def test_the_same_weights_twice(policy: str) -> None:
    """With `depth`, `b` has a second batch after `c`. Results of `a` get no gradient."""
    a, b, c = (nn.Linear(WIDTH, WIDTH, dtype=DOUBLE) for _ in range(3))
    x = [[rand(1, WIDTH).requires_grad_() for _ in range(4)] for _ in range(3)]
    leaves = [*b.parameters(), *c.parameters(), *(value for each in x for value in each[1:])]

    def step(enabled: bool) -> list[Tensor | None]:
        for tensor in leaves:
            tensor.grad = None
        held, losses = [], []
        with ab.batch(enabled=enabled, policy=policy):
            for one, two, three, four in x:
                later = four.relu()
                held.append(a(one))
                first = (b(two) * 2).sum() + (c(three) * 3).sum()
                losses.append(first + (b(later) * two.detach()).sum())
        torch.stack(losses).sum().backward()
        return [leaf.grad for leaf in leaves]

    assert_close(step(True), step(False))


def test_second_derivatives() -> None:
    model, x = Experts(), rows(True)

    def penalty(values: list[Tensor]) -> Tensor:
        grads = torch.autograd.grad(torch.stack(values).sum(), x, create_graph=True)
        return torch.stack([g.square().sum() for g in grads]).sum()

    def gradients(values: list[Tensor]) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(penalty(values), list(model.parameters()), allow_unused=True)

    expected = gradients(losses(model, x))
    with ab.batch():
        results = losses(model, x)
    assert_close(gradients(results), expected)


def test_frozen_weights_and_held_results() -> None:
    model, x = Experts(), rows(True)
    for parameter in (*model.layers[0].parameters(), model.layers[3].weight):
        parameter.requires_grad_(False)

    def step(enabled: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        model.zero_grad()
        with ab.batch(enabled=enabled):
            inner = [model.layers[2 * e](each) for each, e in zip(x, ROUTE, strict=True)]
            out = [model.layers[2 * e + 1](h).sum() for h, e in zip(inner, ROUTE, strict=True)]
        held = torch.autograd.grad(out[0], inner[0], retain_graph=True)
        torch.stack(out).sum().backward()
        return [*inner, *out, *held], grads_of(model)

    assert_close(step(True), step(False))


@pytest.mark.parametrize(
    ("product", "sizes"),
    [
        (lambda w, x: x @ w, [(1, WIDTH), (3, WIDTH)]),
        (lambda w, x: torch.mm(x, w), [(2, WIDTH), (3, WIDTH)]),
        (lambda w, x: w @ x.tanh(), [(WIDTH,), (WIDTH,)]),
        (lambda w, x: torch.mv(w, x.tanh()), [(WIDTH,), (WIDTH,)]),
        (lambda w, x: torch.addmm(w[0], x, w), [(1, WIDTH), (4, WIDTH)]),
        (lambda w, x: F.linear(x, w, w[1]), [(WIDTH,), (2, 3, WIDTH)]),
        (lambda w, x: F.linear(x, w), [(0, WIDTH), (2, WIDTH)]),
    ],
)
def test_forms(
    product: Callable[[Tensor, Tensor], Tensor], sizes: Sequence[tuple[int, ...]]
) -> None:
    weights = [rand(WIDTH, WIDTH) for _ in range(3)]

    def function(a: Tensor, b: Tensor, c: Tensor, x: Tensor, expert: int) -> Tensor:
        return product((a, b, c)[expert], x)

    check(function, *[(rand(*size), e) for e in (1, 0, 2, 1) for size in sizes], parameters=weights)


def test_inputs_that_lie_together() -> None:
    """In two directions, the inputs of each product are the results of one batch."""

    def step(forward: Tensor, back: Tensor, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x, y = (x @ forward).tanh(), (y @ back).tanh()
        return torch.cat([x, y], 1)

    check(
        step,
        *[(rand(1, WIDTH), rand(1, WIDTH)) for _ in range(3)],
        parameters=[rand(WIDTH, WIDTH), rand(WIDTH, WIDTH)],
    )


def test_views_of_a_parameter_are_one_weight_without_gradients() -> None:
    """Each instance makes its own views, over the same memory."""
    weights = rand(3, WIDTH, WIDTH).requires_grad_()
    x = [rand(n, WIDTH) for n in (1, 2, 3)]
    for _ in range(2):  # the calls of the second block are cached
        with torch.no_grad(), ab.batch() as scope:
            results = [((v @ weights[1]) @ weights[2].t()).relu() for v in x]
        rows = {(row.op, row.batches) for row in scope.report().signatures}
        assert {batches for op, batches in rows if op == "aten::matmul"} == {1}
        assert sum(row.op == "aten::matmul" for row in scope.report().signatures) == 2
        for v, result in zip(x, results, strict=True):
            torch.testing.assert_close(result, ((v @ weights[1]) @ weights[2].t()).relu())


def test_a_detached_weight_is_not_one_that_was_met_without_gradients() -> None:
    weight = rand(WIDTH, WIDTH).requires_grad_()
    x = rand(2, WIDTH)
    with ab.batch():
        with torch.no_grad():
            before = x @ weight.t()
        constant = x @ weight.detach().t()
        after = x @ weight.t()
    assert not before.requires_grad
    assert not constant.requires_grad
    assert after.requires_grad
    (grad,) = torch.autograd.grad(after.sum(), weight)
    torch.testing.assert_close(grad, x.sum(0).expand_as(weight))
