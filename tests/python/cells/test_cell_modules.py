"""Cells and modules: modules that a function refers to, hooks, and modules as cells."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_cells import check_function, rows
from torch import Tensor, nn

Step = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh() * 2 + 1


def in_closure(layer: Layer) -> Step:
    return lambda x: layer.inner(x).tanh() * 2 + 1


def in_partial(layer: Layer) -> Step:
    return functools.partial(lambda layer, x: layer(x), layer)


def in_a_list_of_a_default(layer: Layer) -> Step:
    def step(x: Tensor, layers: tuple[Layer, ...] = (layer,)) -> Tensor:
        return layers[0](x)

    return step


_global_layer: Layer


def in_a_global(layer: Layer) -> Step:
    global _global_layer
    _global_layer = layer

    def helper(x: Tensor) -> Tensor:
        return _global_layer(x)

    return lambda x: helper(x)


def as_a_module(layer: Layer) -> Step:
    return layer


WAYS = [in_closure, in_partial, in_a_list_of_a_default, in_a_global, as_a_module]


@pytest.mark.parametrize("way", WAYS)
def test_a_replaced_parameter_is_noticed(way: Callable[[Layer], Step]) -> None:
    layer = Layer().eval()
    called = ab.cell(way(layer))
    x = torch.ones(1, 3)
    with ab.batch():
        called(x), called(x)
        layer.inner[0].weight = nn.Parameter(torch.ones(3, 3))
        y = called(x)
    assert torch.allclose(y, layer(x))


class Layers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.list = nn.ModuleList([nn.Linear(3, 3)])
        self.dict = nn.ModuleDict()
        self.weights = nn.ParameterList([torch.randn(3, 3)])

    def add(self) -> None:
        self.list.append(nn.Linear(3, 3))
        self.dict["another"] = nn.Linear(3, 3)
        self.weights.append(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in {"list": self.list, "dict": self.dict.values(), "weights": ()}[self.kind]:
            x = layer(x)
        for weight in self.weights if self.kind == "weights" else ():
            x = x @ weight
        return x.tanh()


@pytest.mark.parametrize("kind", ["list", "dict", "weights"])
def test_what_is_added_to_a_container_is_noticed(kind: str) -> None:
    layers = Layers(kind)
    called = ab.cell(lambda x: layers(x) + 1)
    x = torch.ones(1, 3)
    with ab.batch():
        called(x), called(x)
        layers.add()
        y = called(x)
    assert torch.allclose(y, layers(x) + 1)


@pytest.mark.parametrize("way", WAYS)
def test_eval_between_uses_is_noticed(way: Callable[[Layer], Step]) -> None:
    layer = Layer()
    called = ab.cell(way(layer))
    x = torch.ones(1, 3)
    with ab.batch():
        called(x), called(x)
        layer.eval()
        y = called(x)
    assert torch.allclose(y, layer(x))


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("way", WAYS)
def test_forward_hooks_run_in_each_call(way: Callable[[Layer], Step], when: str) -> None:
    layer = Layer().eval()
    called = ab.cell(way(layer))
    fired = []

    def hook(*_: Any) -> None:
        fired.append(1)

    if when == "before":
        layer.inner[0].register_forward_hook(hook)
    with ab.batch():
        for _ in range(5):
            called(torch.ones(1, 3))
        if when == "between":
            layer.inner[0].register_forward_hook(hook)
            for _ in range(5):
                called(torch.ones(1, 3))
    assert len(fired) == 5


@pytest.mark.parametrize("when", ["before", "between"])
def test_hooks_of_all_modules_run_in_each_call(when: str) -> None:
    layer = Layer().eval()
    called = ab.cell(in_closure(layer))
    fired = []

    def hook(module: nn.Module, *_: Any) -> None:
        fired.append(module)

    @contextmanager
    def hooked() -> Iterator[None]:
        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()

    with ab.batch():
        if when == "between":
            called(torch.ones(1, 3)), called(torch.ones(1, 3))
        with hooked():
            called(torch.ones(1, 3)), called(torch.ones(1, 3))
        called(torch.ones(1, 3))
    assert fired.count(layer.inner) == 2


def test_backward_hooks_of_modules_run_op_by_op() -> None:
    def grads(cell: bool) -> tuple[int, Tensor]:
        layer = Layer().eval()
        fired = []
        layer.inner.register_full_backward_hook(lambda *_: fired.append(1))
        called = ab.cell(layer) if cell else layer
        xs = [torch.ones(1, 3, requires_grad=True) for _ in range(3)]
        with ab.batch() as scope:
            out = [called(x) for x in xs]
        torch.autograd.backward([y.sum() for y in out])
        assert not cell or any("op by op" in entry.reason for entry in scope.report().at_once)
        grad = xs[0].grad
        assert grad is not None
        return len(fired), grad

    plain, called = grads(False), grads(True)
    assert plain[0] == called[0] == 3
    assert torch.allclose(plain[1], called[1])


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


linear = nn.Linear(3, 3)


def own_function(x: Tensor) -> Tensor:
    y: Tensor = Tripled.apply(linear(x))
    return y.tanh()


def own_hook(x: Tensor) -> Tensor:
    y: Tensor = linear(x)
    y.register_hook(lambda grad: grad * 5)
    return y.tanh()


def own_leaf(x: Tensor) -> Tensor:
    y = linear(x).detach().requires_grad_()
    return (y * 2).tanh() + linear(x)


def own_gradient(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(linear(x).tanh().sum(), x, create_graph=True)
    return grad + 1


def retained(x: Tensor) -> Tensor:
    y: Tensor = linear(x)
    y.retain_grad()
    return y.tanh()


@pytest.mark.parametrize("f", [own_function, own_hook, own_leaf, own_gradient, retained])
def test_what_needs_autograd_in_a_cell_runs_op_by_op(f: Step) -> None:
    check_function(f, [(x,) for x in rows(4, 3)])


# --- modules made cells ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.expert = ab.cell(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5)))
        self.more = nn.ModuleList([ab.cell(nn.Linear(3, 3)), nn.Linear(3, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for module in (self.expert, *self.more):
            x = module(x)
        return x


def test_a_module_made_a_cell_is_a_module() -> None:
    net = Net()
    assert set(net.state_dict()) == {
        *("expert.0.weight", "expert.0.bias", "more.0.weight", "more.0.bias"),
        *("more.1.weight", "more.1.bias"),
    }
    assert isinstance(net.expert, nn.Sequential)
    assert type(net.expert).__name__ == "Sequential"
    net.eval()
    assert not net.expert.training
    assert net.double().expert[0].weight.dtype == torch.float64


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy],
    ids=["deepcopy", "pickle", "copy"],
)
def test_copies_of_modules_made_cells(copied: Callable[[Net], Net]) -> None:
    net = Net().eval()
    other = copied(net)
    x = torch.ones(1, 3)
    with ab.batch() as scope:
        out = [other(x) for _ in range(3)]
    for y in out:
        assert torch.allclose(y, net(x))
    assert any(s.op == "autobatch::cell" for s in scope.report().signatures), scope.report()
    assert type(other.expert).__qualname__ == "Sequential"


@ab.cell
def at_the_top(x: Tensor) -> Tensor:
    return (x * 2).tanh()


def test_a_cell_at_the_top_of_a_file_is_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(at_the_top)) is at_the_top
    assert copy.deepcopy(at_the_top) is at_the_top


def test_scripted_modules_are_wrapped() -> None:
    scripted = torch.jit.script(nn.Linear(3, 3))
    called = ab.cell(scripted)
    x = torch.ones(1, 3)
    with ab.batch():
        out = [called(x), called(x)]
    for y in out:
        assert torch.allclose(y, scripted(x))


# --- arguments and results with hidden state ---


@dataclasses.dataclass
class Wide:
    h: Tensor

    def __post_init__(self) -> None:
        self.width = self.h.shape[-1]


def test_dataclasses_keep_what_is_no_field() -> None:
    @ab.cell
    def f(s: Wide) -> Wide:
        return Wide(linear(s.h).tanh() * s.width)

    with ab.batch():
        out = [f(Wide(torch.ones(1, 3))) for _ in range(3)]
    for s in out:
        assert s.width == 3
        assert torch.allclose(s.h, linear(torch.ones(1, 3)).tanh() * 3)


def test_subclasses_of_dict_and_list_run_op_by_op() -> None:
    class Pair(list[Tensor]):
        pass

    @ab.cell
    def f(table: Any, pair: Pair) -> Tensor:
        return linear(table["x"]).tanh() + pair[0]

    x = torch.ones(1, 3)
    with ab.batch():
        out = [f(collections.OrderedDict(x=x), Pair([x])) for _ in range(3)]
        out.append(f(collections.defaultdict(list, x=x), Pair([x])))
    for y in out:
        assert torch.allclose(y, linear(x).tanh() + x)


# --- check_cells ---


def test_check_cells_takes_a_changed_module_for_another_kind() -> None:
    layer = Layer()
    called = ab.cell(layer)
    x = torch.ones(1, 3)
    with ab.batch(check_cells=True):
        called(x)
        layer.eval()
        a = called(x)
        expected = layer.inner(x).tanh() * 2 + 1
        layer.inner[0].weight = nn.Parameter(torch.ones(3, 3))
        b = called(x)
    assert torch.allclose(a, expected)
    assert torch.allclose(b, layer(x))
