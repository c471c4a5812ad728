"""Code that the tests of cells share. Programs run twice: with cells in blocks, and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _C

Function = TypeVar("Function", bound=Callable[..., Any])
Calls = Sequence[tuple[Any, ...]]

H = 4
LENGTHS = (1, 3, 2, 5, 4, 3, 1, 2)


class Counted:
    """Counts the runs of a function."""

    def __init__(self) -> None:
        self.runs = 0


class Variant:
    """How a program runs: with cells and blocks, or without both."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scopes: list[ab.batch] = []

    def cell(self, function: Function) -> Function:
        return ab.cell(function) if self.enabled else function

    def block(self, **options: Any) -> ab.batch:
        self.scopes.append(ab.batch(enabled=self.enabled, **options))
        return self.scopes[-1]

    def model(self) -> Cells:
        """Returns the same object each time. Its functions are cells."""
        model = Cells()
        model.step = self.cell(model.step)  # type: ignore[method-assign]
        model.word = self.cell(model.word)  # type: ignore[method-assign]
        return model


def has_bodies(report: ab.Report) -> bool:
    """Asserts that some cells ran as one node each."""
    return any("as one" in row.note for row in report.signatures)


def compare_with_eager(program: Callable[[Variant], Any], *, bodies: bool = True) -> None:
    """Asserts that the program returns the same tensors in both variants."""
    with_cells, eager = Variant(True), Variant(False)
    torch.testing.assert_close(program(with_cells), program(eager))
    reports = [scope.report() for scope in with_cells.scopes]
    assert any(map(has_bodies, reports)) == bodies, [report.signatures for report in reports]


def check_function(
    function: Callable[..., Any],
    calls: Calls,
    runs: int | None = None,
    loss: Callable[[Tensor], Tensor] = torch.sum,
) -> ab.Report:
    """Returns the results of all calls, the gradients of their tensors, and the number of runs.

    The arguments are pending tensors. A function that is already a cell is used as it is.
    """
    found = []
    for variant in (Variant(True), Variant(False)):
        counted = Counted()

        def body(*args: Any, counted: Counted = counted) -> Any:
            counted.runs += 1
            return function(*args)

        called = function if isinstance(function, _C.Cell) else variant.cell(body)
        leaves: list[Tensor] = []

        def fresh(value: Any, leaves: list[Tensor] = leaves) -> Any:
            if not isinstance(value, Tensor):
                return value
            leaf = value.clone().requires_grad_(value.is_floating_point())
            if leaf.requires_grad:
                leaves.append(leaf)
            return leaf * 1 if leaf.requires_grad else leaf

        with variant.block() as scope:
            results = [called(*(fresh(a) for a in args)) for args in calls]
        tensors = [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, Tensor)]
        outputs = [loss(t) for t in tensors if t.requires_grad]
        grads = torch.autograd.grad(outputs, leaves, allow_unused=True, materialize_grads=True)
        recorded = [t.requires_grad for t in tensors]
        found.append((recorded, [t.detach() for t in tensors], list(grads)))
        if variant.enabled:
            assert runs is None or counted.runs == runs
            report = scope.report()
    torch.testing.assert_close(found[0], found[1])
    return report


def check_body(function: Callable[..., Any], calls: Calls, *, body: bool = True) -> None:
    """Does the same as ``check_function``. Also checks whether each cell ran as one node."""
    report = check_function(function, calls, loss=lambda t: t.square().sum())
    assert has_bodies(report) == body, report.signatures


def vectors(n: int, size: int = 3) -> list[Tensor]:
    return [torch.sin(torch.arange(float(size)) + k) for k in range(n)]


def rows(n: int, *sizes: int) -> list[Tensor]:
    torch.manual_seed(n)
    return [torch.randn(*sizes) for _ in range(n)]


class Cells(nn.Module):
    """An LSTM-like cell with separate gates. The weights of the output gate affect only h."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(10, H)
        self.gates = nn.Linear(2 * H, 2 * H)
        self.out = nn.Linear(2 * H, H)

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        xh = torch.cat([x, h], -1)
        forget, new = self.gates(xh).chunk(2, -1)
        c = c * forget.sigmoid() + new.tanh() * (1 - forget.sigmoid())
        return self.out(xh).sigmoid() * c.tanh(), c

    def word(self, index: Tensor) -> Tensor:
        return self.embedding(index).tanh() * 2


def states_of(
    model: Cells, block: ab.batch, lengths: Sequence[int] = LENGTHS
) -> list[tuple[Tensor, Tensor]]:
    """Returns the states (h, c) after each instance's words."""
    states = []
    with block:
        for k, length in enumerate(lengths):
            h = c = torch.zeros(1, H) + 0.1 * k
            for t in range(length):
                h, c = model.step(model.word(torch.tensor([(k * 3 + t) % 10])), h, c)
            states.append((h, c))
            del h, c
    return states


class Tree(nn.Module):
    """A Tree-LSTM without a memory cell. Its parts may be cells."""

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
