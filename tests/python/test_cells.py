"""Cells: eager's values and gradients, whatever goes in and comes out, without running twice."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn


class Counted:
    """How often the function itself ran."""

    def __init__(self) -> None:
        self.runs = 0


class Tree(nn.Module):
    """A Tree-LSTM without its memory, its parts made cells or not."""

    def __init__(self, as_cells: bool, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 6)
        self.inner = nn.Linear(12, 12)
        self.dropout = nn.Dropout(dropout)
        self.runs = 0
        if as_cells:
            self.leaf = ab.cell(self.leaf)  # type: ignore[method-assign]
            self.node = ab.cell(self.node)  # type: ignore[method-assign]

    def leaf(self, word: Tensor) -> Tensor:
        self.runs += 1
        return self.embedding(word).tanh()

    def node(self, left: Tensor, right: Tensor) -> Tensor:
        self.runs += 1
        gate, value = self.inner(torch.cat([left, right], -1)).chunk(2, -1)
        return self.dropout(gate.sigmoid() * value.tanh() + left)

    def forward(self, tree: Any) -> Tensor:
        if isinstance(tree, Tensor):
            return self.leaf(tree)
        return self.node(self.forward(tree[0]), self.forward(tree[1]))


def random_tree(seed: int, depth: int = 4) -> Any:
    if depth == 0 or seed % 5 == 0:
        return torch.tensor([seed % 20])
    return random_tree(seed * 3 + 1, depth - 1), random_tree(seed * 7 + 2, depth - 1)


TREES = [random_tree(seed) for seed in range(1, 12)]


def losses_and_gradients(model: nn.Module, inputs: list[Any], enabled: bool) -> list[Tensor]:
    model.zero_grad()
    with ab.batch(enabled=enabled):
        losses = [model(x).square().sum() for x in inputs]
    torch.stack(losses).sum().backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [torch.stack(losses).detach(), *grads]


def check_function(
    function: Callable[..., Any], calls: list[tuple[Any, ...]], runs: int | None = None
) -> ab.Report:
    """Results of all calls and gradients of their tensors, as a cell in a block and without."""
    found = []
    for as_cell in (True, False):
        counted = Counted()

        def body(*args: Any, counted: Counted = counted) -> Any:
            counted.runs += 1
            return function(*args)

        called = ab.cell(body) if as_cell else body
        leaves: list[Tensor] = []

        def fresh(value: Any, leaves: list[Tensor] = leaves) -> Any:
            if not isinstance(value, Tensor):
                return value
            leaf = value.clone().requires_grad_(value.is_floating_point())
            leaves.append(leaf)
            return leaf * 1 if leaf.requires_grad else leaf

        with ab.batch(enabled=as_cell) as scope:
            results = [called(*(fresh(a) for a in args)) for args in calls]
        tensors = torch.utils._pytree.tree_leaves(results)
        outputs = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
        floats = [leaf for leaf in leaves if leaf.requires_grad]
        grads = torch.autograd.grad(
            [t.sum() for t in outputs], floats, allow_unused=True, materialize_grads=True
        )
        found.append((tensors, list(grads)))
        if as_cell and runs is not None:
            assert counted.runs == runs
        if as_cell:
            report = scope.report()
    torch.testing.assert_close(found[0], found[1])
    return report


def vectors(n: int, size: int = 3) -> list[Tensor]:
    return [torch.sin(torch.arange(float(size)) + k) for k in range(n)]


# ---------------------------------------------------------------- what it is for


def test_a_model_of_cells() -> None:
    ours, plain = Tree(True), Tree(False)
    torch.testing.assert_close(
        losses_and_gradients(ours, TREES, True), losses_and_gradients(plain, TREES, False)
    )
    assert ours.runs < 12 < plain.runs  # once for each kind of arguments


def test_a_cell_adds_the_same_ops() -> None:
    reports = []
    for as_cells in (True, False):
        model = Tree(as_cells)
        with ab.batch() as scope:
            kept = [model(tree) for tree in TREES]
        reports.append(scope.report())
        assert len(kept) == len(TREES)
    assert reports[0].ops == reports[1].ops
    assert reports[0].batches < reports[1].batches  # those of a cell run as one


def test_outside_a_block_and_under_no_grad() -> None:
    ours, plain = Tree(True), Tree(False)
    torch.testing.assert_close(ours(TREES[0]), plain(TREES[0]))
    with torch.no_grad(), ab.batch():
        found = [ours(tree) for tree in TREES]
    assert not any(f.requires_grad for f in found)
    torch.testing.assert_close(found, [plain(tree).detach() for tree in TREES])


def test_grad_mode_is_part_of_the_kind() -> None:
    w = torch.ones(3, requires_grad=True)
    times = ab.cell(lambda x: x * w)
    with ab.batch():
        a = times(torch.ones(3))
        with torch.no_grad():
            b = times(torch.ones(3))
        c = times(torch.ones(3))
    assert [t.requires_grad for t in (a, b, c)] == [True, False, True]


def test_create_graph() -> None:
    cube = ab.cell(lambda x: (x * x * x).sum())
    xs = [v.requires_grad_() for v in vectors(4)]
    with ab.batch():
        losses = [cube(x) for x in xs]
    grads = torch.autograd.grad(losses, xs, create_graph=True)
    second = torch.autograd.grad([g.sum() for g in grads], xs)
    for x, g in zip(xs, second, strict=True):
        torch.testing.assert_close(g, 6 * x.detach())


# ---------------------------------------------------------------- ways to make one


def test_kinds_of_callables() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    @ab.cell
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module
            self.runs = 0

        def forward(self, x: Tensor, *, scale: float = 2.0) -> Tensor:
            self.runs += 1
            return self.inner(x) * scale

    doubled = Doubled()
    of_module = ab.cell(module)
    with ab.batch():
        a = [doubled(x) for x in vectors(4)]
        b = [doubled(x, scale=3.0) for x in vectors(4)]
        c = [of_module(x) for x in vectors(4)]
    assert doubled.runs == 2
    for k, x in enumerate(vectors(4)):
        torch.testing.assert_close([a[k], b[k], c[k]], [module(x) * 2, module(x) * 3, module(x)])
    assert isinstance(Doubled, type)
    assert isinstance(doubled, nn.Module)


def test_it_looks_like_the_function() -> None:
    @ab.cell
    def double(x: Tensor) -> Tensor:
        """Twice x."""
        return x * 2

    assert double.__name__ == "double"
    assert double.__doc__ == "Twice x."
    assert double.__wrapped__(torch.ones(1)).item() == 2  # type: ignore[attr-defined]
    assert weakref.ref(double)() is double
    with pytest.raises(TypeError, match="can be called, not int"):
        ab.cell(3)  # type: ignore[type-var]


def test_cells_in_cells() -> None:
    runs = []

    @ab.cell
    def inner(x: Tensor) -> Tensor:
        runs.append("inner")
        return x.tanh()

    @ab.cell
    def outer(x: Tensor) -> Tensor:
        runs.append("outer")
        return inner(x) + inner(x * 2)

    with ab.batch():
        found = [outer(x.requires_grad_()) for x in vectors(5)]
    assert runs == ["outer", "inner", "inner"]
    torch.testing.assert_close(found, [x.tanh() + (x * 2).tanh() for x in vectors(5)])


# ---------------------------------------------------------------- what goes in and comes out


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
    @ab.cell
    def step(state: State, pair: Pair, options: dict[str, Any]) -> Any:
        h = state.h * pair.first + pair.second * options["scale"]
        rest = {"c": state.rest["c"] + h, "none": None}
        return State(h, rest, state.steps + 1, ("a",)), [Pair(h, pair.first)], Frozen(h * 2)

    x, y, z = vectors(3)
    with ab.batch():
        found = [step(State(x + k, {"c": y}), Pair(y, z + k), {"scale": 2.0}) for k in range(4)]
        other = step(State(x, {"c": y}), Pair(y, z), {"scale": 3.0})
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
    with ab.batch():
        u, v = x * 1, y * 1
        found = [both(u, u), both(u, v), both(v, v), both(v, u)]
    torch.testing.assert_close(found, [x * x, x * y, y * y, y * x])


def test_arguments_come_back_as_they_are() -> None:
    @ab.cell
    def choose(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, x

    x, y = vectors(2)
    with ab.batch():
        for _ in range(3):
            a, b = choose(x, y)
            assert a is y
            assert b is x


def test_unused_arguments_and_results() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        (y * 3).exp()  # nobody needs it
        return x + 1

    check_function(function, [(v, v * 2) for v in vectors(4)], runs=1)


def test_views_in_and_out() -> None:
    rows = torch.sin(torch.arange(24.0)).view(4, 6)
    calls = [(rows[k],) for k in range(4)]
    check_function(lambda x: (x.view(2, 3).t()[1], x[2:4] * 2, x.unfold(0, 2, 2)), calls)
    columns = [(rows[:, k],) for k in range(6)]
    check_function(lambda x: x.flip(0) * x, columns)


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
            # Another order of the modules in each flush: their numbers change.
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
    deep = [k for k, tree in enumerate(TREES[:3]) if not isinstance(tree, Tensor)]
    for k in deep:  # randomness is each call's own
        assert not torch.equal(trained[2 * k], trained[2 * k + 1])
    assert not torch.equal(again[0], again[1]) or isinstance(TREES[1], Tensor)


# ---------------------------------------------------------------- what can't be a template


def run_op_by_op(function: Callable[..., Any], reason: str) -> None:
    report = check_function(function, [(v,) for v in vectors(4)])
    assert any(reason in entry.reason for entry in report.at_once), report.at_once


def test_writes_run_op_by_op() -> None:
    def fill(x: Tensor) -> Tensor:
        out = torch.zeros(3)
        out[1] = x[0]
        return out + x

    run_op_by_op(fill, "writes to a tensor")
    run_op_by_op(lambda x: (x * 2).mul_(3), "writes to a tensor")


def test_ops_at_once_run_op_by_op() -> None:
    mask = torch.tensor([True, False, True])

    def masked(x: Tensor) -> Tensor:
        return x * mask.to(torch.int64).cumsum(0)

    run_op_by_op(masked, "runs at once")


def test_results_that_are_no_tensors() -> None:
    class Box:
        def __init__(self, h: Tensor) -> None:
            self.h = h

    boxed = ab.cell(lambda x: Box(x * 2))
    with ab.batch() as scope:
        found = [boxed(x.requires_grad_()) for x in vectors(3)]
    torch.testing.assert_close([b.h for b in found], [x * 2 for x in vectors(3)])
    assert "can't be made again" in scope.report().at_once[0].reason


def test_a_tensor_from_outside() -> None:
    state = {}

    @ab.cell
    def accumulate(x: Tensor) -> Tensor:
        return x + state["h"]

    with ab.batch() as scope:
        found = []
        state["h"] = torch.zeros(3, requires_grad=True) * 1
        for x in vectors(3):
            state["h"] = accumulate(x)  # the promise is broken
            found.append(state["h"])
    x, y, z = vectors(3)
    torch.testing.assert_close(found[1], x + y)
    assert "none of its arguments" in scope.report().at_once[0].reason
    assert len(found) == len([x, y, z])


def test_hooks_run_each_time() -> None:
    module = nn.Linear(3, 3)
    seen = []
    module.register_forward_hook(lambda m, i, o: seen.append(1))
    called = ab.cell(module)
    with ab.batch():
        kept = [called(x) for x in vectors(4)]
    assert len(seen) == len(kept) == 4


@pytest.mark.parametrize("read", ["item", "bool", "nonzero"])
def test_a_read_is_an_error_that_names_the_line(read: str) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        if read == "item":
            return y * y.sum().item()
        if read == "bool":
            return y if y.sum() > 0 else -y
        return y.nonzero() if read == "nonzero" else y

    called = ab.cell(function)
    with ab.batch():
        x = torch.ones(3, requires_grad=True) * 1
        with pytest.raises(RuntimeError, match=r"the cell '.*function' reads .*test_cells.py:\d+"):
            called(x)
        fine = x + 1
    assert fine.tolist() == [2, 2, 2]
    torch.testing.assert_close(called(x.detach()), function(x.detach()))  # outside a block


def test_printing_runs_each_time(capsys: Any) -> None:
    @ab.cell
    def loud(x: Tensor) -> Tensor:
        print(x)
        return x * 2

    with ab.batch():
        found = [loud(x.requires_grad_() * 1) for x in vectors(3)]
    assert capsys.readouterr().out.count("tensor(") == 3
    torch.testing.assert_close(found, [x * 2 for x in vectors(3)])


def test_arguments_that_are_not_hashable() -> None:
    called = ab.cell(lambda x, options: x * 2)
    with ab.batch(), pytest.raises(TypeError, match="type 'set', which is not hashable"):
        called(torch.ones(2), {1, 2})
    nested: list[Any] = []
    nested.append(nested)
    with ab.batch(), pytest.raises(RecursionError, match="nested too deeply"):
        called(torch.ones(2), nested)


def test_errors_pass_through() -> None:
    @ab.cell
    def wrong(x: Tensor, fail: bool) -> Tensor:
        if fail:
            raise KeyError("mine")
        return x @ x

    with ab.batch():
        with pytest.raises(KeyError, match="mine"):
            wrong(torch.ones(2), True)
        with pytest.raises(RuntimeError):
            wrong(torch.ones(2, 3, requires_grad=True) * 1, False)
        w = torch.ones(2, requires_grad=True) * 1
        found = [wrong(w, False) for _ in range(3)]
    assert [f.item() for f in found] == [2, 2, 2]


# ---------------------------------------------------------------- broken promises


def test_check_cells() -> None:
    counter = Counted()

    @ab.cell
    def changing(x: Tensor, how: str) -> Any:
        counter.runs += 1
        if how == "constant":
            return x * counter.runs
        if how == "op":
            return x.tanh() if counter.runs % 2 else x.sigmoid()
        if how == "more":
            return x + 1 if counter.runs % 2 else x + 1 + 1
        if how == "result":
            return x * 2, counter.runs
        return x * 2

    x = torch.ones(2, requires_grad=True)
    for how, message in [
        ("constant", "mul.Tensor with other arguments"),
        ("op", r"(sigmoid|tanh) where there was"),
        ("more", "one op (more|less)"),
        ("result", "another constant result"),
    ]:
        with ab.batch(check_cells=True):
            changing(x, how)
            with pytest.raises(RuntimeError, match=rf"'.*changing' at .*test_cells.*{message}"):
                changing(x, how)
    with ab.batch(check_cells=True):
        counter.runs = 0
        found = [changing(x, "not") for _ in range(3)]
    assert counter.runs == 3
    torch.testing.assert_close(found, [x * 2] * 3)
    model = Tree(True)
    with ab.batch(check_cells=True):
        trees = [model(tree) for tree in TREES]
    torch.testing.assert_close(trees, [Tree(False)(tree) for tree in TREES])


def test_granularity() -> None:
    runs = {}
    for granularity in ("op", "cell", "auto"):
        model = Tree(True)
        with ab.batch(granularity=granularity):
            kept = [model(tree) for tree in TREES]
        torch.testing.assert_close(kept, [Tree(False)(tree) for tree in TREES])
        runs[granularity] = model.runs
    assert runs["op"] > 20 > runs["cell"] == runs["auto"]
    with pytest.raises(ValueError, match=r"granularity='graph'.*'auto', 'cell', 'op'"):
        ab.batch(granularity="graph")


# ---------------------------------------------------------------- state


def test_nothing_outlives_the_block() -> None:
    class Marker:
        pass

    marker = Marker()
    module = nn.Linear(2, 2)
    called = ab.cell(lambda m, x, marker: m(x))
    with ab.batch():
        kept = called(module, torch.ones(2), marker)
    gone = weakref.ref(marker), weakref.ref(module)
    del marker, module, kept
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_threads_have_their_own_templates() -> None:
    model = Tree(True)
    expected = losses_and_gradients(Tree(False), TREES, False)[0]
    found: dict[int, Tensor] = {}

    def work(k: int) -> None:
        for _ in range(3):
            with ab.batch():
                losses = [model(tree).square().sum() for tree in TREES]
            found[k] = torch.stack(losses).detach()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(3):
        torch.testing.assert_close(found[k], expected)


@pytest.mark.parametrize("options", [{"verify": True}, {"max_pending": 5}, {"policy": "depth"}])
def test_with_other_options(options: dict[str, Any]) -> None:
    model = Tree(True)
    with ab.batch(**options):
        found = [model(tree) for tree in TREES]
    torch.testing.assert_close(found, [Tree(False)(tree) for tree in TREES])


def test_very_many_kinds() -> None:
    scaled = ab.cell(lambda x, k: x * k)
    x = torch.ones(2, requires_grad=True)
    with ab.batch():
        found = [scaled(x, k) for k in range(6000)]
    assert [int(f[0]) for f in found] == list(range(6000))


def test_autocast_is_part_of_the_kind() -> None:
    module = nn.Linear(4, 4)
    called = ab.cell(module)
    x = torch.ones(4)
    with ab.batch():
        a = called(x)
        with torch.autocast("cpu"):
            b = [called(x) for _ in range(2)]
        c = called(x)
    with torch.autocast("cpu"):
        expected = module(x)
    assert [t.dtype for t in (a, *b, c)] == [
        torch.float,
        torch.bfloat16,
        torch.bfloat16,
        torch.float,
    ]
    torch.testing.assert_close(b[1], expected)
