"""Packages that keep a stack of contexts for the whole process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn


class Stack:
    """As such packages have one: a context manager that complains if it is not on top."""

    def __init__(self) -> None:
        self.entered: list[Any] = []

    def context(self, name: Any) -> Context:
        return Context(self, name)

    def save(self) -> list[Any]:
        return list(self.entered)

    def restore(self, saved: list[Any]) -> None:
        self.entered[:] = saved


class Context:
    def __init__(self, stack: Stack, name: Any) -> None:
        self.stack, self.name = stack, name

    def __enter__(self) -> Context:
        self.stack.entered.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        if self.stack.entered[-1] is not self:
            raise ValueError("not on top of the stack")
        self.stack.entered.pop()


@pytest.fixture(scope="module")
def registered() -> Stack:
    stack = Stack()
    ab.register_fiber_state(stack.save, stack.restore)
    return stack


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(3, 3)


def inputs(count: int = 5) -> list[tuple[int, Tensor]]:
    return [(i, torch.randn(2, 3)) for i in range(count)]


class Instance:
    """Enters contexts, more than one, and reads in each."""

    def __init__(self, stack: Stack, layer: nn.Linear, fails: tuple[int, ...] = ()) -> None:
        self.stack, self.layer, self.fails = stack, layer, fails

    def __call__(self, pair: tuple[int, Tensor]) -> list[Any]:
        i, x = pair
        seen = [[c.name for c in self.stack.entered]]
        for depth in range(i % 3 + 1):
            with self.stack.context((i, depth)), self.stack.context(i):
                x = self.layer(x)
                seen.append([x.sum().item() > 0, *[c.name for c in self.stack.entered]])
                if i in self.fails:
                    raise KeyError(i)
        seen.append([c.name for c in self.stack.entered])
        return seen


def test_each_instance_has_its_own(registered: Stack, layer: nn.Linear) -> None:
    instance = Instance(registered, layer)
    with registered.context("outer"):
        results = ab.map(instance, pairs := inputs())
        assert [c.name for c in registered.entered] == ["outer"]
        assert results == [instance(pair) for pair in pairs]
    assert registered.entered == []


@pytest.mark.parametrize("options", [{}, {"max_live": 2}])
def test_it_is_as_before_after_a_failure(
    registered: Stack, layer: nn.Linear, options: dict[str, Any]
) -> None:
    with registered.context("outer"):
        with pytest.raises(KeyError) as caught:
            ab.map(Instance(registered, layer, fails=(3,)), inputs(), **options)
        assert caught.value.args == (3,)
        assert [c.name for c in registered.entered] == ["outer"]
    results = ab.map(Instance(registered, layer, fails=(3,)), inputs(), return_exceptions=True)
    assert [type(r) for r in results] == [list, list, list, KeyError, list]
    assert registered.entered == []


def test_what_an_instance_leaves_is_not_the_next_ones(registered: Stack, layer: nn.Linear) -> None:
    def leaves(pair: tuple[int, Tensor]) -> int:
        registered.context(pair[0]).__enter__()
        layer(pair[1]).sum().item()
        return len(registered.entered)

    assert ab.map(leaves, inputs()) == [1] * 5
    assert registered.entered == []


def test_maps_in_maps(registered: Stack, layer: nn.Linear) -> None:
    instance = Instance(registered, layer)

    def outer(i: int) -> list[Any]:
        with registered.context(f"outer {i}"):
            layer(torch.ones(3)).sum().item()
            return ab.map(instance, pairs)

    pairs = inputs(3)
    expected = []
    for i in range(3):
        with registered.context(f"outer {i}"):
            expected.append([instance(pair) for pair in pairs])
    assert ab.map(outer, range(3)) == expected
    assert registered.entered == []


def test_generators_that_make_instances(registered: Stack, layer: nn.Linear) -> None:
    def pairs() -> Iterator[tuple[int, Tensor]]:
        for pair in inputs():
            assert registered.entered == []
            yield pair

    assert len(ab.map(Instance(registered, layer), pairs(), max_live=2)) == 5


def test_an_unknown_stack_is_named(layer: nn.Linear) -> None:
    stack = Stack()
    with pytest.raises(ValueError, match="on top") as caught:
        ab.map(Instance(stack, layer), inputs())
    notes = "\n".join(caught.value.__notes__)
    assert "Context.__exit__" in notes
    assert "register_fiber_state" in notes


def test_hooks_that_fail_are_reported(
    layer: nn.Linear, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = [False]

    def save() -> None:
        if fails[0]:
            raise KeyError("save fails")

    ab.register_fiber_state(save, lambda _: None)
    fails[0] = True
    reported: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", lambda u: reported.append(u.exc_value))
    assert len(ab.map(lambda pair: layer(pair[1]).sum().item(), inputs())) == 5
    fails[0] = False
    assert {type(error) for error in reported} == {KeyError}


def test_pyro() -> None:
    pyro = pytest.importorskip("pyro", reason="pyro-ppl: make bench-real installs it")
    encoder = nn.Linear(3, 3)

    def loss(x: Tensor) -> Tensor:
        def model() -> None:
            with pyro.plate("rows", len(x)):
                y = pyro.sample("y", pyro.distributions.Normal(encoder(x), 1.0).to_event(1), obs=x)
                y.sum().item()
                encoder(x).sum().item()

        return -pyro.poutine.trace(model).get_trace().log_prob_sum()

    xs = [torch.randn(i % 3 + 1, 3) for i in range(6)]
    results = ab.map(loss, xs)
    assert pyro.poutine.runtime._PYRO_STACK == []
    assert not any(pyro.poutine.runtime._DIM_ALLOCATOR._stack)
    for result, x in zip(results, xs, strict=True):
        torch.testing.assert_close(result, loss(x))
    with pytest.raises(RuntimeError):
        ab.map(loss, [*xs, torch.randn(2, 4)])
    assert pyro.poutine.runtime._PYRO_STACK == []
    torch.testing.assert_close(loss(xs[0]), results[0])
