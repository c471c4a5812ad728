"""Cells with all kinds of arguments and results: eager's values and gradients from one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_cells import TREES, Counted, Tree, check_function, losses_and_gradients, vectors
from torch import Tensor, nn

# ---------------------------------------------------------------- arguments and results


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class State:
    h: Tensor
    rest: dict[str, Any]
    steps: int = 0
    tags: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Frozen:
    h: Tensor


def test_structures() -> None:
    counted = Counted()

    @ab.cell
    def step(state: State, pair: Pair, options: dict[str, Any]) -> Any:
        counted.runs += 1
        h = state.h * pair.first + pair.second * options["scale"]
        rest = {"c": state.rest["c"] + h, "none": None}
        return State(h, rest, state.steps + 1, ("a",)), [Pair(h, pair.first)], Frozen(h * 2)

    x, y, z = (v.requires_grad_() for v in vectors(3))
    with ab.batch():
        found = [step(State(x + k, {"c": y}), Pair(y, z + k), {"scale": 2.0}) for k in range(4)]
        other = step(State(x, {"c": y}), Pair(y, z), {"scale": 3.0})
    assert counted.runs == 2  # once for each scale
    for k, (state, pairs, frozen) in enumerate(found):
        h = (x + k) * y + (z + k) * 2.0
        torch.testing.assert_close([state.h, state.rest["c"]], [h, y + h])
        assert (state.rest["none"], state.steps, state.tags) == (None, 1, ("a",))
        assert isinstance(pairs[0], Pair)
        torch.testing.assert_close(frozen.h, h * 2)
        assert isinstance(frozen, Frozen)
    torch.testing.assert_close(other[0].h, x * y + z * 3.0)
    assert found[1][0].rest is not found[2][0].rest


def test_lengths_and_dtypes_are_kinds() -> None:
    calls = [(torch.sin(torch.arange(float(n)) + n),) for n in (3, 5, 3, 5, 2, 3)]
    check_function(lambda x: (x.exp() * 2).sum(), calls, runs=3)
    mixed = [(v.to(t),) for v in vectors(3) for t in (torch.float32, torch.float64)]
    check_function(lambda x: x.tanh(), mixed, runs=2)


@pytest.mark.parametrize(
    ("values", "runs"),
    [
        ([1, 2, 1, 2], 2),
        ([1, True, 1.0, None], 4),
        (["a", "b", "".join(["a"])], 2),
        ([(1, "x"), (1, "y"), (1, "x")], 2),
        ([{"k": 1}, {"k": 2}, {"k": 1}], 2),
        ([2.0, -0.0, 0.0, float("nan"), float("nan")], 4),
    ],
)
def test_other_arguments_are_kinds(values: list[Any], runs: int) -> None:
    def function(x: Tensor, value: Any) -> tuple[Tensor, Any]:
        return x * (len(repr(value)) + 1), None

    check_function(function, [(vectors(1)[0], value) for value in values], runs)


def test_the_same_tensor_twice() -> None:
    x, y = vectors(2)
    check_function(lambda a, b: a * b + a, [(x, y), (y, x)], runs=1)
    both = ab.cell(lambda a, b: a * b)
    x, y = x.requires_grad_(), y.requires_grad_()
    with ab.batch() as scope:
        u, v = x * 1, y * 1
        found = [both(u, u), both(u, v), both(v, v), both(v, u)]
    assert scope.report().at_once == []
    torch.testing.assert_close(found, [x * x, x * y, y * y, y * x])


def test_arguments_come_back_as_they_are() -> None:
    counted = Counted()

    @ab.cell
    def choose(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counted.runs += 1
        return y, x, x + y * 2

    x, y = (v.requires_grad_() for v in vectors(2))
    found = []
    with ab.batch():
        for u, v in [(x, y), (y * 1, x * 1), (y, x), (x * 2, y)] * 2:
            a, b, c = choose(u, v)
            assert a is v
            assert b is u
            found.append((u, v, c))
    assert counted.runs == 3  # the arguments are leaves, results, or one leaf and one result
    for u, v, c in found:
        torch.testing.assert_close(c, u + v * 2)


def test_unused_arguments_and_results() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        (y * 3).exp()  # unused
        return x + 1

    check_function(function, [(v, v * 2) for v in vectors(4)], runs=1)


def test_views_in_and_out() -> None:
    rows = torch.sin(torch.arange(24.0)).view(4, 6)
    calls = [(rows[k],) for k in range(4)]
    check_function(lambda x: (x.view(2, 3).t()[1], x[2:4] * 2), calls, runs=1)
    report = check_function(lambda x: (x.unfold(0, 2, 2), x[2:4] * 2), calls, runs=4)
    assert "it makes a view that cannot be replayed" in report.at_once[0].reason
    columns = [(rows[:, k],) for k in range(6)]
    check_function(lambda x: x.flip(0) * x, columns, runs=1)


# ---------------------------------------------------------------- parameters


def test_each_module_has_its_own_parameters() -> None:
    torch.manual_seed(0)
    experts = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(3)])

    class Router(nn.Module):
        def __init__(self, call: Callable[..., Tensor]) -> None:
            super().__init__()
            self.experts = experts
            self.call = call

        def forward(self, x: Tensor) -> Tensor:
            return self.call(self.experts[int(x.numel() + x[0] * 1000) % 3], x)

    def call(expert: nn.Module, x: Tensor) -> Tensor:
        return expert(x)

    inputs = vectors(9)
    torch.testing.assert_close(
        losses_and_gradients(Router(ab.cell(call)), inputs, True),
        losses_and_gradients(Router(call), inputs, False),
    )


def test_weights_as_arguments() -> None:
    weights = [nn.Parameter(torch.eye(3) * (k + 1)) for k in range(3)]
    affine = ab.cell(lambda w, x: F.linear(x, w).tanh())
    inputs = [(weights[k % 3], v) for k, v in enumerate(vectors(9))]
    with ab.batch():
        found = [affine(w, x) for w, x in inputs]
    expected = [F.linear(x, w).tanh() for w, x in inputs]
    torch.testing.assert_close(found, expected)
    ours = torch.autograd.grad([f.sum() for f in found], weights)
    torch.testing.assert_close(ours, torch.autograd.grad([e.sum() for e in expected], weights))


def test_parameters_that_are_replaced() -> None:
    module = nn.Linear(3, 3)
    called = ab.cell(lambda m, x: m(x).tanh())
    x = vectors(1)[0]
    other = nn.Parameter(torch.ones(3, 3))
    with ab.batch():
        a = [called(module, x) for _ in range(2)]
        old, module.weight = module.weight, other
        b = [called(module, x) for _ in range(2)]
        with torch.no_grad():
            c = torch.func.functional_call(module, {"weight": old * 2}, (x,))
        module.weight = old
        d = called(module, x)
    bias = module.bias
    torch.testing.assert_close(a, [F.linear(x, old, bias).tanh()] * 2)
    torch.testing.assert_close(b, [F.linear(x, other, bias).tanh()] * 2)
    torch.testing.assert_close([c, d], [F.linear(x, old * 2, bias), a[0]])


def test_functional_call_for_each_instance() -> None:
    module = nn.Linear(3, 3)
    called = ab.cell(module)
    x = vectors(1)[0]

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Tensor) -> Tensor:
            return called(x)

    holder = Holder()
    sets = [{"module.weight": torch.randn(3, 3), "module.bias": torch.zeros(3)} for _ in range(4)]
    with ab.batch():
        found = [torch.func.functional_call(holder, one, (x,)) for one in sets]
        found += [torch.func.functional_call(holder, one, (x,)) for one in sets]
    expected = [F.linear(x, one["module.weight"]) for one in sets]
    torch.testing.assert_close(found, expected * 2)


def test_optimizer_steps_between_blocks() -> None:
    results = []
    for as_cells in (True, False):
        model = Tree(as_cells)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            losses_and_gradients(model, TREES, as_cells)
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(results[0], results[1])


def test_flushes_between_calls() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    called = ab.cell(lambda m, x: m(x).tanh())
    x = vectors(1)[0]
    found, expected = [], []
    with ab.batch() as scope:
        for turn in range(6):
            # The order of the modules changes in each flush, so their numbers change.
            for module in (first, second) if turn % 2 else (second, first):
                found.append(called(module, x + turn))
                expected.append((module, x + turn))
            scope.flush() if turn % 3 else found[-1].sum().item()
    torch.testing.assert_close(found, [m(v).tanh() for m, v in expected])


def test_training_mode_and_dropout() -> None:
    model = Tree(True, dropout=0.5)
    with ab.batch():
        trained = [model(tree) for tree in TREES[:3] for _ in range(2)]
        model.eval()
        steady = [model(tree) for tree in TREES[:3] for _ in range(2)]
        model.train()
        again = [model(TREES[1]) for _ in range(2)]
    plain = Tree(False).eval()
    torch.testing.assert_close(steady, [plain(t) for t in TREES[:3] for _ in range(2)])
    for first, second in zip([*trained, *again][::2], [*trained, *again][1::2], strict=True):
        assert not torch.equal(first, second)  # each call draws its own random numbers
