"""Code that all tests share: seeds, small random instances, and the comparison with eager mode."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _C

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES), str(Path(__file__).parent)]

from data import Example  # noqa: E402
from helpers_backward import SIZES  # noqa: E402
from helpers_threads import in_thread  # noqa: E402

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}  # relative to the largest expected magnitude

Backward = Callable[[list[Tensor]], None]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests that assert an optimization which AUTOBATCH_DISABLE has turned off."""
    for mark in item.iter_markers("needs"):
        for name in mark.args:
            if not _C.switches()[name][1]:
                pytest.skip(f"{name} is off")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Sets the same random state at the start of every test."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def always_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Always defers, because tests often have blocks of one instance, which would run eagerly."""
    monkeypatch.setattr(sys.modules["torch_autobatch._scope"], "ADAPTIVE", False)


@pytest.fixture(autouse=True)
def no_block_left_open() -> Iterator[None]:
    """Fails if a block stays open on any thread, because it would affect all later tests."""
    yield
    assert not _C.any_block_open()


@pytest.fixture
def no_trials() -> Iterator[None]:
    """Disables timing trials, so that only the ops of blocks decide whether blocks are deferred."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is marked ``own_thread`` on a new thread.

    The library keeps cached calls for each thread. On a new thread, earlier tests have no effect.
    """
    if pyfuncitem.get_closest_marker("own_thread") is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    in_thread(lambda: pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


class Synthetic:
    """Small random examples in the form of the examples' data: ids are shared tensors [1]."""

    vocabulary = 13
    classes = 4

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.symbols = torch.arange(self.vocabulary).unsqueeze(1).unbind()
        self.labels = torch.arange(self.classes).unsqueeze(1).unbind()

    def _example(self, children: list[tuple[int, ...]], symbols: int, targets: int) -> Example:
        return Example(
            [self.random.choice(self.symbols) for _ in range(symbols)],
            children,
            [self.random.choice(self.labels) for _ in range(targets)],
        )

    def syntax_trees(self, count: int, largest: int = 12) -> list[Example]:
        """Returns trees with one target each. The first three: a single node, a star, a chain."""
        trees = []
        for i in range(count):
            size = 1 if i == 0 else self.random.randint(2, largest)
            children: list[list[int]] = [[] for _ in range(size)]
            for node in range(size - 1):
                parent = self.random.randint(node + 1, size - 1)
                children[{1: size - 1, 2: node + 1}.get(i, parent)].append(node)
            trees.append(self._example([tuple(below) for below in children], size, 1))
        return trees

    def binary_trees(self, count: int, most_leaves: int = 8) -> list[Example]:
        """Returns binary trees with a target at each node. The first tree is a single leaf."""
        trees = []
        for i in range(count):
            leaves = 1 if i == 0 else self.random.randint(2, most_leaves)
            children: list[tuple[int, ...]] = [() for _ in range(leaves)]
            roots = list(range(leaves))
            while len(roots) > 1:
                left = self.random.randrange(len(roots) - 1)
                children.append((roots[left], roots[left + 1]))
                roots[left : left + 2] = [len(children) - 1]
            trees.append(self._example(children, len(children), len(children)))
        return trees

    def sentences(self, count: int, longest: int = 9) -> list[Example]:
        """Returns sentences with a target for each word. The first sentence has one word."""
        lengths = [1 if i == 0 else self.random.randint(1, longest) for i in range(count)]
        return [self._example([], length, length) for length in lengths]


@pytest.fixture
def synthetic() -> Synthetic:
    """Returns a generator of small examples, which are equal in every test."""
    return Synthetic()


def _close(what: str, value: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Fails if the two differ by more than ``tolerance`` of the largest expected magnitude."""
    assert (value is None) == (expected is None), f"{what}: {value} where eager has {expected}"
    if value is None or expected is None:
        return
    assert value.shape == expected.shape, f"{what}: {value.shape}, eager has {expected.shape}"
    assert value.dtype == expected.dtype, f"{what}: {value.dtype}, eager has {expected.dtype}"
    scale = max(expected.abs().max().item(), torch.finfo(expected.dtype).tiny)
    difference = (value - expected).abs().max().item() / scale
    assert difference <= tolerance, f"{what}: relative difference {difference:.2e} from eager"


def _sum(losses: list[Tensor]) -> None:
    torch.stack(losses).sum().backward()


class Compare(Protocol):
    """The signature of the ``compare`` fixture."""

    def __call__(
        self,
        model: nn.Module,
        instances: Sequence[Any],
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        policy: str = "auto",
        backward: Backward | None = None,
    ) -> Any: ...


@pytest.fixture
def compare() -> Compare:
    """Runs eagerly and batched, compares losses and gradients, and returns the report.

    ``loss_fn(model, instance)`` defaults to ``model(instance)``. ``backward`` gets the list of
    losses, and defaults to the backward of their sum. It is not called if the losses don't require
    grad.
    """

    def run(
        model: nn.Module,
        instances: Sequence[Any],
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        policy: str = "auto",
        backward: Backward | None = None,
    ) -> Any:
        loss_of = loss_fn or (lambda model, instance: model(instance))
        model.to(dtype)

        def finish(losses: list[Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
            if losses[0].requires_grad:
                (backward or _sum)(losses)
            gradients = {name: p.grad for name, p in model.named_parameters()}
            model.zero_grad(set_to_none=True)
            return torch.stack(losses).detach(), gradients

        model.zero_grad(set_to_none=True)
        expected, expected_gradients = finish([loss_of(model, x) for x in instances])
        with ab.batch(policy=policy) as scope:
            losses = [loss_of(model, x) for x in instances]
        values, gradients = finish(losses)

        _close("losses", values, expected, TOLERANCE[dtype])
        for name, gradient in gradients.items():
            _close(f"gradient of {name}", gradient, expected_gradients[name], TOLERANCE[dtype])
        return scope.report()

    return run


@pytest.fixture
def instances() -> list[Tensor]:
    """Returns index sequences of unequal length."""
    return [torch.randint(7, (n,)) for n in SIZES]


@pytest.fixture
def linear() -> nn.Linear:
    """Returns a layer whose ops are captured."""
    return nn.Linear(3, 4).double()
