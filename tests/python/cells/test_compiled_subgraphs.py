"""cell(compile=True): the same results as without it, and cells that can't be compiled."""

from __future__ import annotations

import functools
import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import test_subgraph_inputs
import test_subgraph_values
import test_subgraphs
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _compiled
from torch_autobatch._compiled_graph import tanh
from torch_autobatch._compiled_views import UnsupportedError, view

CELL = ab.cell


@pytest.fixture
def compiled_code(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[_compiled.Code]]:
    """Asserts that cells are compiled, and lists the compiled code."""
    made: list[_compiled.Code] = []
    compile_body = _compiled.compile_body

    def noted(*args: Any) -> _compiled.Code | None:
        code = compile_body(*args)
        if code is not None:
            made.append(code)
        return code

    monkeypatch.setattr(ab, "cell", functools.partial(CELL, compile=True))
    monkeypatch.setattr(_compiled, "compile_body", noted)
    monkeypatch.setattr(_compiled, "_known", {})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r"cell\(compile=True\)")
        yield made


@pytest.fixture
def traced_code(
    compiled_code: list[_compiled.Code], monkeypatch: pytest.MonkeyPatch
) -> list[_compiled.Code]:
    """Does the same as ``compiled_code``, but runs the traced graph op by op, without Inductor."""
    monkeypatch.setattr(_compiled, "_compile", lambda module, _: module)
    return compiled_code


def cases_in(*modules: ModuleType) -> list[Any]:
    """Returns the tests of a module that take no arguments."""
    found = []
    for module in modules:
        for name, test in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and not inspect.signature(test).parameters:
                found.append(pytest.param(test, id=name))
    return found


@pytest.mark.parametrize(
    "test", cases_in(test_subgraphs, test_subgraph_inputs, test_subgraph_values)
)
def test_what_holds_of_cells(test: Callable[[], None], traced_code: list[_compiled.Code]) -> None:
    test()


# ---------------------------------------------------------------- with Inductor itself


class State(NamedTuple):
    h: Tensor
    c: Tensor


class TreeLSTM(nn.Module):
    """A binary Tree-LSTM with a loss at each node; its states are named tuples."""

    def __init__(self, size: int, cell: Callable[..., Any], names: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(10, size, padding_idx=2)
        self.w = nn.Linear(size, 3 * size)
        self.u = nn.Linear(2 * size, 5 * size)
        self.classifier = nn.Linear(size, 3)
        for name in names:
            setattr(self, name, cell(getattr(self, name)))

    def leaf(self, word: Tensor) -> State:
        i, o, u = self.w(self.embedding(word)).chunk(3, dim=-1)
        c = i.sigmoid() * u.tanh()
        return State(o.sigmoid() * c.tanh(), c)

    def node(self, children: dict[str, State]) -> State:
        left, right = children["left"], children["right"]
        gates = self.u(torch.cat([left.h, right.h], dim=-1))
        i, o, u, f, g = gates.chunk(5, dim=-1)
        c = i.sigmoid() * u.tanh() + f.sigmoid() * left.c + g.sigmoid() * right.c
        return State(o.sigmoid() * c.tanh(), c)

    def loss(self, state: State, label: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(state.h), label)

    def forward(self, tree: Any, losses: list[Tensor]) -> State:
        state: State
        if isinstance(tree, int):
            state = self.leaf(torch.tensor([tree]))
        else:
            left, right = (self(child, losses) for child in tree)
            state = self.node({"left": left, "right": right})
        losses.append(self.loss(state, torch.tensor([len(losses) % 3])) + state.c.mean())
        return state


TREES = [3, (1, 2), ((1, 2), (3, 4)), ((5, (6, 7)), 8), (((1, 2), 3), ((4, 5), (6, (7, 8))))]


# Each test uses different sizes, because a thread keeps the compiled code of each kind of cell.


def compare_trees(size: int, names: tuple[str, ...], **options: Any) -> None:
    """Compares blocks with different numbers of trees, which use the same compiled code."""
    found = []
    for enabled in (True, False):
        model = TreeLSTM(size, ab.cell if enabled else lambda function: function, names)
        for count in (5, 3, 1):
            losses: list[Tensor] = []
            with ab.batch(enabled=enabled, **options) as scope:
                for tree in TREES[:count]:
                    model(tree, losses)
            # Backward from some of the losses, then from others that share values with them.
            torch.stack(losses[::2]).sum().backward(retain_graph=count == 5)
            if count == 5:
                torch.stack(losses[1:]).sum().backward()
                notes = [row.note for row in scope.report().signatures]
                compiled = sum(note.endswith(", compiled") for note in notes)
                # With check_cells, cells run op by op.
                alone = not enabled or "check_cells" in options
                assert compiled == (0 if alone else len(names)), notes
        found.append([*losses, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[0], found[1])


def test_trees(traced_code: list[_compiled.Code]) -> None:
    compare_trees(6, ("leaf", "node", "loss"))
    assert len(traced_code) == 3


def test_check_cells(traced_code: list[_compiled.Code]) -> None:
    compare_trees(7, ("leaf", "node", "loss"), check_cells=True)


def test_inductor(compiled_code: list[_compiled.Code]) -> None:
    compare_trees(16, ("node",))
    assert len(compiled_code) == 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(mode: Callable[..., Any], traced_code: list[_compiled.Code]) -> None:
    found = []
    for enabled in (True, False):
        model = TreeLSTM(8, ab.cell if enabled else lambda function: function, ("node",))
        with mode(), ab.batch(enabled=enabled):
            found.append([model(tree, []) for tree in TREES])
    torch.testing.assert_close(found[0], found[1])
    assert len(traced_code) == 1


def test_views() -> None:
    """Each view in a tape equals the view of ``as_strided``, or is not supported."""
    draw = random.Random(0)
    steps: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.narrow(-1, x.shape[-1] // 2, 1),
        lambda x: x.select(0, x.shape[0] - 1),
        lambda x: x[..., ::2],
        lambda x: x.transpose(0, -1),
        lambda x: x.unsqueeze(draw.randrange(x.dim())),
        lambda x: x.unsqueeze(0).expand(2, *x.shape),
        lambda x: x.view(-1) if x.is_contiguous() else x,
        lambda x: x.view(2, -1) if x.is_contiguous() and x.numel() % 2 == 0 else x,
    ]
    unsupported = 0
    for _ in range(300):
        sizes = [draw.choice([1, 2, 3, 4]) for _ in range(draw.randint(1, 3))]
        members = torch.arange(2.0 * torch.Size(sizes).numel()).view(2, *sizes)
        to = torch.empty(sizes)
        for _ in range(draw.randint(1, 3)):
            to = draw.choice(steps)(to) if to.dim() > 0 else to
        place = (to.shape, to.stride(), to.storage_offset())
        expected = torch.stack([m.clone().as_strided(*place) for m in members])
        try:
            found = view(members, 1, members[0].stride(), *place)
        except UnsupportedError:
            unsupported += 1
            continue
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert unsupported < 30


def test_tanh() -> None:
    x = torch.cat([torch.linspace(-12, 12, 100001), torch.logspace(-30, 1, 10001)])
    ends = torch.tensor([-0.0, float("inf"), -float("inf"), float("nan")])
    torch.testing.assert_close(tanh(x).double(), x.double().tanh(), rtol=3e-7, atol=0)
    torch.testing.assert_close(tanh(ends), ends.tanh(), rtol=0, atol=0, equal_nan=True)
    assert tanh(ends)[0].signbit()


# ---------------------------------------------------------------- cells that can't be compiled


def answers(size: int, cell: Callable[..., Any], enabled: bool) -> list[Tensor]:
    torch.manual_seed(1)
    linear = nn.Linear(size, size)
    x = [torch.linspace(0, 1, size).requires_grad_() for _ in range(4)]
    called = cell(lambda v: linear(v).tanh() * v)
    with ab.batch(enabled=enabled):
        results = [called(v * 1) for v in x]
    torch.stack(results).square().sum().backward()
    grads = [p.grad for p in (*x, *linear.parameters())]
    return [*(r.detach() for r in results), *(g for g in grads if g is not None)]


def no_compiler(*_: Any) -> Any:
    raise RuntimeError("No working C++ compiler found")


def wrong(module: Any, _: Any) -> Any:
    return lambda *given: [out * 1.01 for out in module(*given)]


@pytest.mark.parametrize(
    ("size", "compiles", "reason"),
    [
        (3, no_compiler, "No working C\\+\\+ compiler found"),
        (4, wrong, "a result differs from eager mode in value"),
    ],
)
def test_one_warning_and_the_answers_without(
    size: int, compiles: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_compiled, "_compile", compiles)
    monkeypatch.setattr(_compiled, "_known", {})
    expected = answers(size, lambda function: function, enabled=False)
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        found = [answers(size, ab.cell(compile=True), enabled=True) for _ in range(2)]
    torch.testing.assert_close(found, [expected, expected])
    assert len([w for w in caught if "cell(compile=True)" in str(w.message)]) == 1


def test_backward_alone_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    size, count = 5, iter(range(10))
    monkeypatch.setattr(
        _compiled, "_compile", lambda m, _: m if next(count) == 0 else no_compiler()
    )
    monkeypatch.setattr(_compiled, "_known", {})
    expected = answers(size, lambda function: function, enabled=False)
    with pytest.warns(RuntimeWarning, match="the backward of a cell is not compiled"):
        torch.testing.assert_close(answers(size, ab.cell(compile=True), enabled=True), expected)
