"""Cells that are called on tensors of any sizes (``ab.cell(function, dynamic=True)``)."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

WIDTH = 6
SIZES = (3, 7, 5, 2, 9, 4, 1, 8)

Function = Callable[..., Any]


@pytest.fixture
def xs() -> list[Tensor]:
    return [torch.randn(n, WIDTH, dtype=torch.double) for n in SIZES]


class Counted:
    """A function, and how often it ran."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.runs = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return self.function(*args, **kwargs)


def compare(function: Function, calls: list[tuple[Any, ...]], **options: Any) -> tuple[int, str]:
    """The calls give what they give eagerly. How often the function ran in the block, and why."""
    counted = Counted(function)
    cell = ab.cell(counted, dynamic=True)
    with ab.batch(**options) as scope:
        found = [cell(*args) for args in calls]
    torch.testing.assert_close(found, [function(*args) for args in calls])
    plain = [row.reason for row in scope.report().at_once if row.reason.startswith("captured op")]
    return counted.runs, plain[0] if plain else ""


def alone(xs: list[Tensor]) -> list[tuple[Tensor]]:
    return [(x,) for x in xs]


def attention(x: Tensor) -> Tensor:
    n, width = x.shape
    heads = x.view(n, 2, width // 2).transpose(0, 1)
    scores = heads @ heads.transpose(1, 2) / math.sqrt(width // 2)
    mask = torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1)
    weights = scores.masked_fill(mask, -1e9).softmax(-1)
    positions = torch.arange(n, dtype=x.dtype)[:, None] / 10
    return (weights @ heads).transpose(0, 1).reshape(n, -1) + positions


def strided(x: Tensor) -> Tensor:
    half = x.size(0) // 2 + 1
    return torch.cat([x[:half].tanh(), x[half - 1 :: 2].exp()]).sum(0) / (x.shape[0] * 2)


def own_memory(x: Tensor) -> Tensor:
    out = x.new_zeros(x.size(0) + 1, x.size(1))
    out[1:] = x
    out.index_add_(0, torch.zeros(x.size(0), dtype=torch.long), x.sigmoid())
    return out.mean(0)


def pieces(x: Tensor) -> dict[str, Any]:
    a, b = x.tanh().chunk(2, dim=1)
    return {"a": a, "pair": (b, [a + b, None]), "rows": x.size(0), "mean": 1 / x.size(0)}


FUNCTIONS = [attention, strided, own_memory, pieces]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_sizes_are_traced_and_others_replayed(function: Function, xs: list[Tensor]) -> None:
    assert compare(function, alone(xs)) == (2, "")


@pytest.mark.parametrize("function", [attention, strided, own_memory])
def test_gradients(function: Function, xs: list[Tensor]) -> None:
    gradients = []
    for enabled in (True, False):
        counted = Counted(function)
        cell = ab.cell(counted, dynamic=True)
        leaves = [x.clone().requires_grad_() for x in xs]
        with ab.batch(enabled=enabled):
            loss = sum(cell(x).square().sum() for x in leaves)
        gradients.append(torch.autograd.grad(loss, leaves))
        assert counted.runs == (2 if enabled else len(xs))
    torch.testing.assert_close(*gradients)


def test_a_program_outlives_the_block(xs: list[Tensor]) -> None:
    counted = Counted(attention)
    cell = ab.cell(counted, dynamic=True)
    for x in xs:
        with ab.batch():
            found = cell(x)
        torch.testing.assert_close(found, attention(x))
    assert counted.runs == 2
    cell(xs[0])
    assert counted.runs == 3  # outside a block


def test_batches_are_those_of_plain_calls(xs: list[Tensor]) -> None:
    cell = ab.cell(strided, dynamic=True)
    reports = []
    for function in (cell, cell, strided):
        with ab.batch() as scope:
            kept = [function(x) for x in xs]
        reports.append(scope.report())
        assert len(kept) == len(xs)
    assert reports[1].ops == reports[2].ops
    assert reports[1].batches == reports[2].batches


def test_what_follows_from_sizes_is_computed_once(xs: list[Tensor]) -> None:
    cell = ab.cell(attention, dynamic=True)
    ops = []
    for _ in range(3):
        with ab.batch() as scope:
            found = [cell(x) for x in xs]
        torch.testing.assert_close(found, [attention(x) for x in xs])
        ops.append([row.op for row in scope.report().signatures])
    assert any("triu" in op for op in ops[0])
    assert not any("triu" in op or "arange" in op for op in ops[2])


def test_what_is_written_to_or_returned_is_made_anew(xs: list[Tensor]) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        counts = torch.arange(x.size(0), dtype=x.dtype) * 2
        mask = torch.ones(x.size(0), dtype=x.dtype).cumsum(0)
        mask[0] = x[0, 0]
        return x * mask[:, None], counts

    cell = ab.cell(function, dynamic=True)
    for _ in range(2):
        with ab.batch():
            found = [cell(x) for x in xs]
        torch.testing.assert_close(found, [function(x) for x in xs])
        for _, counts in found:
            counts.zero_()


# ---------------------------------------------------------------- sizes that decide


def test_a_comparison_gives_two_programs(xs: list[Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        return x.sin() if x.size(0) > 4 else x.cos()

    runs, why = compare(function, alone(xs) * 2)
    assert runs <= 4
    assert why == ""


COUNTS: dict[str, Function] = {
    "range": lambda x: sum(x[i] for i in range(x.size(0) // 4 + 1)),
    "list": lambda x: torch.stack([x.sum()] * (x.size(0) // 4 + 1)),
    "key": lambda x: x * {1: 1.0, 2: 3.0}.get(x.size(0) // 4, 2.0),
    "text": lambda x: x * len(f"{x.size(0) * 3}"),
    "root": lambda x: x * math.sqrt(x.size(0)),
    "rows": lambda x: sum(row.exp() for row in x),
    "unbind": lambda x: sum(row.exp() for row in x.unbind(0)),
    "split": lambda x: torch.stack([part.sum() for part in x.split(3)]),
    "len": lambda x: x * len(x),
    "bits": lambda x: x * x.size(0).bit_length(),
    "numpy": lambda x: x * np.sqrt(x.size(0)) + torch.from_numpy(np.arange(x.size(0)))[:, None],
    "divmod": lambda x: x * divmod(x.size(0), 3)[0] + pow(x.size(0), 2, 5),
    "bitwise": lambda x: x * (x.size(0) ^ 3) + (5 & x.size(0)) + ~x.size(0),
    "rounding": lambda x: x * round(x.size(0) / 2) + math.ceil(0.5 * x.size(0)) - abs(-x.size(0)),
    "broadcast_shapes": lambda x: x + torch.zeros(torch.broadcast_shapes(x.shape, (1, WIDTH))),
    "its shape": lambda x: (x.exp(), x.shape),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_counts_by_a_size(name: str, xs: list[Tensor]) -> None:
    """The trace sees it, or gives up: answers are eager's whichever sizes come first."""
    compare(COUNTS[name], alone(xs) * 2)
    compare(COUNTS[name], alone(xs[::-1]) * 2)


def test_sizes_that_may_be_keys_need_not(xs: list[Tensor]) -> None:
    """As einops caches what it does for a shape, where a shape can be a key."""
    known: dict[Any, Any] = {}

    def halves(size: Any) -> Any:
        try:
            return known.setdefault(size, size // 2)
        except TypeError:
            return size // 2

    runs, why = compare(lambda x: x[: halves(x.size(0)) + 1].exp(), alone(xs))
    assert runs == 3
    assert why == ""


def test_the_number_of_dimensions_may_follow_from_sizes(xs: list[Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x[:, :1].t().squeeze()  # a number where there is one row
        return y.exp() if y.dim() == 0 else y.sin()

    runs, why = compare(function, alone(xs) * 2)
    assert runs <= 4
    assert why == ""


def test_ints_are_arguments_too(xs: list[Tensor]) -> None:
    def function(x: Tensor, n: int, *, scale: int = 2) -> Tensor:
        return x.new_zeros(n + 1, WIDTH).index_add(0, torch.arange(x.size(0)) % n, x) * scale

    assert compare(function, [(x, i + 2) for i, x in enumerate(xs)])[0] == 2


def test_sizes_that_never_differ_are_conditions(xs: list[Tensor]) -> None:
    counted = Counted(lambda x: x * torch.Size(x.shape[1:]).numel())
    cell = ab.cell(counted, dynamic=True)
    others = [torch.randn(n, WIDTH + 2, dtype=torch.double) for n in SIZES]
    with ab.batch():
        found = [cell(x) for x in xs + others]
    torch.testing.assert_close(found, [x * x.size(1) for x in xs + others])
    assert counted.runs == 4


def test_sizes_that_are_known_from_others(xs: list[Tensor]) -> None:
    """Each of these is asked of a result, and is a size of the argument."""
    w = torch.randn(8, WIDTH, dtype=torch.double)

    def function(x: Tensor) -> Tensor:
        n = x.size(0)
        pairs = (x[:, None] * x[None]).view(n, -1)
        assert pairs.size(1) == n * WIDTH
        h = F.linear(x.tanh(), w).relu().view(-1, 2, 4).transpose(0, 1)
        h = h.new_zeros(2, n, 4).scatter_add_(1, torch.zeros(2, n, 4, dtype=torch.long), h)
        return h.sum(-1).unsqueeze(-1).expand(2, n, 3) * h.size(1) + h.shape[2] + pairs.mean()

    assert compare(function, alone(xs)) == (2, "")


# ---------------------------------------------------------------- arguments and results


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclasses.dataclass
class Output:
    hidden: Tensor
    pooled: Tensor | None = None


def test_structures_of_tensors(xs: list[Tensor]) -> None:
    def function(pair: Pair, more: dict[str, list[Tensor]], flag: bool) -> Pair:
        left = pair.left + more["a"][0] if flag else pair.left
        return Pair(left, pair.right.sum(0))

    calls = [(Pair(x, x.exp()), {"a": [x.cos()]}, bool(i % 2)) for i, x in enumerate(xs)]
    assert compare(function, calls)[0] == 4


def test_dataclasses_are_results(xs: list[Tensor]) -> None:
    cell = ab.cell(lambda x: Output(x.exp(), x.sum(0)), dynamic=True)
    with ab.batch():
        found = [cell(x) for x in xs]
    assert all(type(output) is Output for output in found)
    torch.testing.assert_close([output.hidden for output in found], [x.exp() for x in xs])


def test_one_tensor_in_two_places(xs: list[Tensor]) -> None:
    calls = [(x, x) for x in xs] + [(x, x + 1) for x in xs]
    assert compare(lambda a, b: a * b.exp(), calls)[0] == 4


def test_a_parameter_among_the_arguments() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.randn(WIDTH))
            self.cell = ab.cell(self.combine, dynamic=True)

        def combine(self, x: Tensor, rows: Tensor) -> Tensor:
            return x * self.empty + rows.sum(0)

    model = Model()
    rows = [torch.randn(n, WIDTH) for n in SIZES]
    with ab.batch():
        found = [model.cell(model.empty, r) for r in rows]
        found += [model.cell(torch.ones(WIDTH), r) for r in rows]
    expected = [model.combine(model.empty, r) for r in rows]
    expected += [model.combine(torch.ones(WIDTH), r) for r in rows]
    torch.testing.assert_close(found, expected)


# ---------------------------------------------------------------- modules


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.5)
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.dropout(self.norm(self.layer(x)).relu()) + x


@pytest.fixture
def floats() -> list[Tensor]:
    return [torch.randn(n, WIDTH) for n in SIZES]


def run(model: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    with ab.batch():
        return [model(x) for x in xs]


def test_a_module(floats: list[Tensor]) -> None:
    model = ab.cell(Encoder().eval(), dynamic=True)
    found = run(model, floats)
    assert model.runs == 2
    torch.testing.assert_close(found, [model(x) for x in floats])


def test_a_class_of_modules(floats: list[Tensor]) -> None:
    @ab.cell(dynamic=True)
    class Model(Encoder):
        pass

    one, other = Model().eval(), Model().eval()
    torch.testing.assert_close(run(one, floats), [one(x) for x in floats])
    torch.testing.assert_close(run(other, floats), [other(x) for x in floats])


def test_what_changes_in_a_module_is_noticed(floats: list[Tensor]) -> None:
    model = ab.cell(Encoder().eval(), dynamic=True)
    run(model, floats)
    model.layer.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    torch.testing.assert_close(run(model, floats), [model(x) for x in floats])
    with torch.no_grad():
        model.layer.weight.mul_(2)  # the same parameter
    runs = model.runs
    found = run(model, floats)
    assert model.runs == runs
    torch.testing.assert_close(found, [model(x) for x in floats])
    model.train()
    rate, model.dropout.p = model.dropout.p, 1.0
    torch.testing.assert_close(run(model, floats), floats)
    model.eval()
    model.dropout.p = rate
    runs = model.runs
    run(model, floats)
    assert model.runs == runs  # the program of before


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda model: setattr(model, "scale", 3.0),
    "a rate": lambda model: setattr(model.dropout, "p", 1.0),
    "a constant of a layer": lambda model: setattr(model.norm, "eps", 2.0),
    "a function": lambda model: setattr(model, "activation", torch.sin),
    "a tensor": lambda model: setattr(model, "shift", torch.ones(WIDTH)),
    "forward": lambda model: setattr(model.layer, "forward", lambda x: x * 2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_attributes_that_change_between_blocks(name: str, floats: list[Tensor]) -> None:
    class Model(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.activation, self.shift = 1.0, torch.tanh, torch.zeros(WIDTH)
            self.dropout.p = 0.0

        def forward(self, x: Tensor) -> Tensor:
            h = self.activation(super().forward(x) * self.scale) + self.shift
            return self.dropout(h)

    model = ab.cell(Model().train(), dynamic=True)
    run(model, floats)
    runs = model.runs
    run(model, floats)
    assert model.runs == runs  # `runs` is the function's own
    CHANGES[name](model)
    torch.testing.assert_close(run(model, floats), [model(x) for x in floats])


def test_sizes_that_are_kept_are_ordinary_numbers(floats: list[Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.most, self.shapes, self.last = 0, [], ()

        def forward(self, x: Tensor) -> Tensor:
            self.most = max(self.most, x.size(0))
            self.shapes.append(x.shape)
            self.last = x.shape
            return x.exp()

    model = ab.cell(Model(), dynamic=True)
    run(model, floats)
    assert type(model.most) is int
    assert {type(shape) for shape in (*model.shapes, model.last)} == {torch.Size}
    pickle.dumps(model.__dict__)


def test_dropout_draws_anew(floats: list[Tensor]) -> None:
    model = ab.cell(Encoder().train(), dynamic=True)
    x = torch.randn(50, WIDTH)
    run(model, floats)
    first, second = run(model, [x, x])
    assert not torch.equal(first, second)


def test_hooks_run(floats: list[Tensor]) -> None:
    model = Encoder().eval()
    called: list[int] = []
    model.layer.register_forward_hook(lambda *_: called.append(1))
    run(ab.cell(model, dynamic=True), floats)
    assert len(called) == len(floats)


def test_copies_and_pickles(floats: list[Tensor]) -> None:
    model = ab.cell(Encoder().eval(), dynamic=True)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = other.runs
        torch.testing.assert_close(run(other, floats), run(model, floats))
        assert other.runs == before + 2


def test_programs_keep_no_module_alive(floats: list[Tensor]) -> None:
    @ab.cell(dynamic=True)
    class Model(Encoder):
        pass

    model = Model().eval()
    run(model, floats)
    dead = weakref.ref(model), weakref.ref(model.layer.weight)
    del model
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


# ---------------------------------------------------------------- what is no program


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 5  # not what autograd would find


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.t()


NO_PROGRAM: dict[str, tuple[Function, str]] = {
    "a value": (lambda x: x.sin() if x.sum() > 0 else x.cos(), "__bool__"),
    "a custom function": (lambda x: Double.apply(x.exp()), "autograd.Function"),
    "autocast": (autocast, "autocast"),
    "a transform": (lambda x: torch.vmap(torch.tanh)(x.exp()), "transform"),
    "a tensor that is not PyTorch's": (lambda x: x * torch.Tensor([2.0]), "something else"),
    "a result of another kind": (lambda x: iter((x.sum(0),)), "kind"),
}


@pytest.mark.parametrize("name", NO_PROGRAM)
def test_what_can_not_be_replayed_runs(name: str) -> None:
    function, reason = NO_PROGRAM[name]
    leaves = [torch.randn(n, WIDTH, requires_grad=True) for n in range(1, 14)]
    counted = Counted(function)
    cell = ab.cell(counted, dynamic=True)
    with ab.batch() as scope:
        found = [cell(x) for x in leaves]
    assert counted.runs == len(leaves)
    rows = scope.report().at_once
    assert any("captured op by op" in row.reason and reason in row.reason for row in rows)
    if name in ("a value", "a custom function", "autocast", "a transform"):
        assert any(reason in r.reason and f"{Path(__file__).name}:" in r.reason for r in rows)
    if isinstance(found[0], Tensor):
        torch.testing.assert_close(found, [function(x) for x in leaves])


def test_gradients_of_a_custom_function(xs: list[Tensor]) -> None:
    cell = ab.cell(lambda x: Double.apply(x.exp()), dynamic=True)
    leaves = [x.clone().requires_grad_() for x in xs]
    with ab.batch():
        loss = sum(cell(x).sum() for x in leaves)
    torch.testing.assert_close(
        torch.autograd.grad(loss, leaves), tuple(5 * x.detach().exp() for x in leaves)
    )


def test_gradient_mode_is_switched_in_it(xs: list[Tensor]) -> None:
    w = torch.ones(WIDTH, dtype=torch.double, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x * w).exp().sum(0)
        return x * scale * w

    gradients = []
    for enabled in (True, False):
        counted = Counted(function)
        cell = ab.cell(counted, dynamic=True)
        with ab.batch(enabled=enabled):
            loss = sum(cell(x).sum() for x in xs)
        gradients += torch.autograd.grad(loss, w)
        assert counted.runs == (2 if enabled else len(xs))
        assert torch.is_grad_enabled()
    torch.testing.assert_close(*gradients)


def test_a_write_to_an_argument_happens_once(xs: list[Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.exp()
        y.add_(1)
        x.add_(1)
        return y.sum() if y.size(0) > 100 else y.sum(0)

    eager = [x.clone() for x in xs]
    expected = [function(x) for x in eager]
    cell = ab.cell(function, dynamic=True)
    with ab.batch():
        found = [cell(x) for x in xs]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(xs, eager)


def test_an_error_is_at_the_functions_line(xs: list[Tensor]) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x + y  # here

    cell = ab.cell(function, dynamic=True)
    with ab.batch():
        for x in xs:
            cell(x, x.exp())
        with pytest.raises(RuntimeError, match="size of tensor") as raised:
            cell(xs[0], xs[1])
    assert "function" in [entry.name for entry in raised.traceback]


def test_hidden_state_is_found(xs: list[Tensor]) -> None:
    state = {"scale": 1.0}

    def function(x: Tensor) -> Tensor:
        return x * state["scale"]

    cell = ab.cell(function, dynamic=True)
    with ab.batch(check_cells=True):
        for x in xs[:4]:
            cell(x)
        state["scale"] = 2.0
        with pytest.raises(RuntimeError, match=r"does not do at this call .* 1\.0.*2\.0"):
            cell(xs[4])


# ---------------------------------------------------------------- other places


def test_in_a_map(xs: list[Tensor]) -> None:
    counted = Counted(attention)
    cell = ab.cell(counted, dynamic=True)

    def instance(x: Tensor) -> Tensor:
        h = cell(x)
        return cell(h[: h.shape[0] // 2 + 1]) if h.sum() > 0 else h

    found = ab.map(instance, xs)
    assert counted.runs == 2
    torch.testing.assert_close(found, [instance(x) for x in xs])


def test_cells_in_cells(xs: list[Tensor]) -> None:
    inner = ab.cell(attention, dynamic=True)
    outer = Counted(lambda x: inner(inner(x)))
    cell = ab.cell(outer, dynamic=True)
    with ab.batch():
        found = [cell(x) for x in xs]
    assert outer.runs == 2
    torch.testing.assert_close(found, [attention(attention(x)) for x in xs])


def test_as_plain_functions(xs: list[Tensor]) -> None:
    counted = Counted(attention)
    cell = ab.cell(counted, dynamic=True)
    with ab.batch(granularity="op"):
        found = [cell(x) for x in xs]
    assert counted.runs == len(xs)
    torch.testing.assert_close(found, [attention(x) for x in xs])


def test_the_report_names_the_functions_line(xs: list[Tensor]) -> None:
    cell = ab.cell(attention, dynamic=True)
    for _ in range(2):
        with ab.batch() as scope:
            kept = [cell(x) for x in xs]
        assert len(kept) == len(xs)
    line = attention.__code__.co_firstlineno
    assert f"test_dynamic_cells.py:{line}" in str(scope.report())


def test_compile_and_dynamic_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="not both"):
        ab.cell(F.relu, compile=True, dynamic=True)
