"""Process-wide state of PyTorch and packages, such as stacks of contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap


class Stack:
    """A stack of contexts. A context that is not on top at its end raises an error."""

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
    """Enters several contexts, and reads a value in each."""

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


# --- functional_call: parameters that are replaced during a call ---


class Reader(nn.Module):
    """Reads a value between two uses of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.inner = nn.Linear(2, 2, dtype=torch.float64)
        self.tied = nn.Linear(2, 2, dtype=torch.float64)
        self.tied.weight = self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.w).sum()
        if h.item() > 0:
            h = h * 2
        return ((self.inner(x) + self.tied(x)) * self.w).sum() * h


def values(count: int = 4) -> list[Tensor]:
    return [torch.tensor([1.0, 2.0], dtype=torch.float64) * (k - 1) for k in range(count)]


def swapped(net: Reader, x: Tensor) -> Tensor:
    scale = x.sum()
    given = {"w": net.w * scale, "inner.weight": net.inner.weight + scale}
    return functional_call(net, given, (x,)) + net(x)


class Outer(nn.Module):
    """Runs a function of a module during a call that has swapped the module's parameter."""

    def __init__(self, net: Reader, function: Callable[[Reader, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.function = net, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.net, x) + self.net(x)


def nested(net: Reader, x: Tensor) -> Tensor:
    outer = Outer(net, lambda net, x: functional_call(net, {"w": net.w * 2}, (x,)))
    return functional_call(outer, {"net.w": net.w * x.sum()}, (x,))


def mapped_inside(net: Reader, x: Tensor) -> Tensor:
    def rows(net: Reader, x: Tensor) -> Tensor:
        return torch.stack(ab.map(lambda k: swapped(net, x * k), [1.0, -1.0, 2.0])).sum()

    return functional_call(Outer(net, rows), {"net.w": net.w * x.sum()}, (x,))


@pytest.mark.parametrize("function", [swapped, nested, mapped_inside])
def test_functional_call(function: Callable[[Reader, Tensor], Tensor]) -> None:
    net = Reader()
    before = dict(net.named_parameters())
    expected = [function(net, x) for x in values()]
    found = ab.map(lambda x: function(net, x), values())
    torch.testing.assert_close(found, expected)
    after = dict(net.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    for mine, eagers in zip(found, expected, strict=True):
        parameters = list(before.values())
        torch.testing.assert_close(
            torch.autograd.grad(mine, parameters), torch.autograd.grad(eagers, parameters)
        )


def test_functional_call_after_an_error() -> None:
    net = Reader()
    before = net.w

    def function(x: Tensor) -> Tensor:
        y = swapped(net, x)
        if y.item() > 1:
            raise ZeroDivisionError
        return y

    with pytest.raises(ZeroDivisionError):
        ab.map(function, values())
    assert net.w is before
    with pytest.raises(RuntimeError, match="Unexpected key"), ab.batch():
        functional_call(net, {"nothing": before}, (values()[1],), strict=True)
    assert net.w is before


def test_functional_call_in_threads() -> None:
    nets = [Reader(), Reader()]
    expected = [[swapped(net, x) for x in values()] for net in nets]

    def mapped(net: Reader) -> list[Tensor]:
        return [y for _ in range(20) for y in ab.map(lambda x: swapped(net, x), values())]

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(mapped, nets))
    for mine, eagers in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, eagers * 20)


def test_gradients_of_each_row_by_functional_call() -> None:
    net = nn.Linear(4, 1, dtype=torch.float64)
    parameters = dict(net.named_parameters())

    def loss(p: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(net, p, (row,)).square().sum()

    def function(x: Tensor) -> Tensor:
        return vmap(grad(loss), in_dims=(None, 0))(parameters, x)["weight"]

    xs = [torch.randn(2, 4, dtype=torch.float64) for _ in range(3)]
    torch.testing.assert_close(ab.map(function, xs), [function(x) for x in xs])
    assert net.weight is parameters["weight"]


# --- forward-mode AD: one level per process ---


def dual(w: Tensor, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        y = (forward_ad.make_dual(x, x * 2) @ w).cos()
        return forward_ad.unpack_dual(y).tangent * (2 if y.sum().item() > 0 else 1)


FORWARD_AD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dual level": dual,
    "jvp": lambda w, x: jvp(lambda r: (r @ w).cos(), (x,), (x * 2,))[1],
    "jacfwd": lambda w, x: jacfwd(lambda r: (r @ w).cos())(x[0]),
    "hessian": lambda w, x: hessian(lambda r: ((r @ w).sin() ** 2).sum())(x[0]),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", FORWARD_AD)
def test_forward_ad(name: str, requires_grad: bool) -> None:
    w = torch.randn(3, 3, dtype=torch.float64)
    xs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=requires_grad) for _ in range(4)]

    def function(x: Tensor) -> Tensor:
        y = FORWARD_AD[name](w, x)
        return y * 2 if y.sum().item() > 0 else y

    expected = [function(x) for x in xs]
    torch.testing.assert_close(ab.map(function, xs), expected)
    torch.testing.assert_close([function(x) for x in xs], expected)  # no state is left over


# --- packages ---


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
