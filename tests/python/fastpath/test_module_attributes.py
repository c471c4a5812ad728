"""The fast path to submodules and parameters: the same attributes and errors as nn.Module's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn


class Plain(nn.Module):
    made_in_class = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(1))
        self.nothing: Any = None
        self.register_parameter("absent", None)
        self.several = nn.ModuleList([nn.Linear(1, 1) for _ in range(12)])
        self.reads: list[str] = []

    @property
    def failing(self) -> int:
        self.reads.append("failing")
        raise AttributeError("from the property")

    @property
    def doubled(self) -> Tensor:
        return self.weight * 2


class Derived(Plain):
    """Attributes of the class take precedence over entries of nn.Module's dicts."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["made_in_class"] = nn.Tanh()
        self._parameters["doubled"] = nn.Parameter(torch.zeros(1))
        self._buffers["linear"] = torch.zeros(1)


class WithGetattr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def __getattr__(self, name: str) -> Any:
        return "made up" if name == "invented" else super().__getattr__(name)


class WithGetattribute(Plain):
    def __getattribute__(self, name: str) -> Any:
        return "always" if name == "linear" else super().__getattribute__(name)


class WithItem(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        return ("mine", index)


def outcome(read: Callable[[], Any]) -> Any:
    """Returns the result, or the type and text of the error."""
    try:
        value = read()
    except Exception as error:
        return type(error), str(error), type(error.__cause__)
    if isinstance(value, nn.ModuleList):
        return [id(module) for module in value]
    return value.tolist() if isinstance(value, Tensor) else value


NAMES = [
    "linear", "weight", "count", "nothing", "absent", "made_in_class", "failing", "doubled",
    "training", "missing", "__class__", "forward", "_modules", "zero_grad", "invented",
]  # fmt: skip


@pytest.mark.parametrize("kind", [Plain, Derived, WithGetattr, WithGetattribute])
@pytest.mark.parametrize("name", NAMES)
def test_attributes(kind: type[nn.Module], name: str) -> None:
    module = kind()
    before = outcome(lambda: getattr(module, name))
    reads = list(getattr(module, "reads", []))
    with ab.batch():
        inside = outcome(lambda: getattr(module, name))
        assert hasattr(module, name) == (
            before[:1] != (AttributeError,) if isinstance(before, tuple) else True
        )
    assert inside == before
    if name == "failing" and reads:
        assert module.reads == ["failing"] * 3  # once per access


@pytest.mark.parametrize("index", [0, 11, -1, -12, 12, -13, True, "0", 1.0, slice(2, 5), None])
def test_items_of_a_module_list(index: Any) -> None:
    module = Plain()
    before = outcome(lambda: module.several[index])
    with ab.batch():
        assert outcome(lambda: module.several[index]) == before
        assert outcome(lambda: nn.ModuleList()[index]) == outcome(lambda: nn.ModuleList()[index])
        assert WithItem()[index] == ("mine", index)
    assert outcome(lambda: module.several[index]) == before


def test_attributes_that_change() -> None:
    module = Plain()
    with ab.batch():
        other = nn.Linear(2, 2)
        module.linear = other
        assert module.linear is other
        del module.linear
        assert outcome(lambda: module.linear)[0] is AttributeError
        module.__dict__["linear"] = "of its own"
        assert module.linear == "of its own"
        module._modules["linear"] = other
        assert module.linear == "of its own"
        Plain.linear = property(lambda self: "the class's")  # type: ignore[assignment]
        assert module.linear == "the class's"
        del Plain.linear
        assert module.linear == "of its own"
        del module.__dict__["linear"]
        assert module.linear is other
    assert module.linear is other


def test_getattr_replaced_in_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Plain()
    original = nn.Module.__getattr__
    with ab.batch():
        assert isinstance(module.linear, nn.Linear)
        monkeypatch.setattr(Plain, "__getattr__", lambda self, name: "replaced")
        assert module.linear == "replaced"
        monkeypatch.undo()
        assert isinstance(module.linear, nn.Linear)
        monkeypatch.setattr(nn.Module, "__getattr__", lambda self, name: "for all")
        assert module.linear == "for all"
        with monkeypatch.context() as patched:
            patched.setattr(nn.Module, "__getattr__", original)
            assert isinstance(module.linear, nn.Linear)
    with ab.batch():
        assert module.linear == "for all"
    monkeypatch.undo()
    with ab.batch():
        assert isinstance(module.linear, nn.Linear)


def test_class_made_in_a_block() -> None:
    for _ in range(2):
        with ab.batch():

            class Local(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.inner = nn.Linear(1, 1)

                def __getattr__(self, name: str) -> Any:
                    return "local" if name == "odd" else super().__getattr__(name)

            class Further(Local):
                pass

            assert Further().odd == "local"
            assert isinstance(Further().inner, nn.Linear)


def test_classes_are_not_kept_alive() -> None:
    class Local(nn.Module):
        pass

    with ab.batch():
        Local()
    gone = weakref.ref(Local)
    del Local
    gc.collect()
    assert gone() is None
    with ab.batch():
        assert isinstance(Plain().linear, nn.Linear)


def test_values_and_gradients_through_attributes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
            self.scale = nn.Parameter(torch.full((3,), 0.5))
            self.register_buffer("shift", torch.arange(3.0))

        def forward(self, x: Tensor, expert: int) -> Tensor:
            return (self.experts[expert](x) * self.scale + self.shift).sum()

    torch.manual_seed(0)
    model = Model()
    inputs = [(torch.randn(3), k % 4 - 4 * (k % 2)) for k in range(9)]
    found = []
    for enabled in (True, False):
        model.zero_grad()
        with ab.batch(enabled=enabled):
            losses = [model(x, expert) for x, expert in inputs]
        torch.stack(losses).sum().backward()
        found.append([torch.stack(losses), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*found)


def test_attributes_known_and_then_changed() -> None:
    """A cached result is used as long as no dict that is searched earlier has changed."""
    module, parameter, layer = Plain(), nn.Parameter(torch.zeros(2)), nn.Linear(2, 2)
    original = module.linear

    class Table(dict[str, Any]):
        pass

    def add(name: str) -> None:
        setattr(Plain, name, "of the class")

    changes: list[tuple[Callable[[], Any], Any]] = [
        (lambda: setattr(module, "linear", layer), layer),
        (lambda: module._parameters.__setitem__("linear", parameter), parameter),
        (lambda: module.__dict__.__setitem__("linear", 5), 5),
        (lambda: module.__dict__.__delitem__("linear"), parameter),
        (lambda: module._parameters.__delitem__("linear"), layer),
        (lambda: module.__dict__.__setitem__("_buffers", {"linear": parameter}), parameter),
        (lambda: module.__dict__.__setitem__("_buffers", Table()), layer),
        (lambda: module.__dict__.__setitem__("_modules", {"linear": original}), original),
        (lambda: add("linear"), "of the class"),
        (lambda: delattr(Plain, "linear"), original),
    ]
    with ab.batch():
        for change, expected in changes:
            before = [module.linear for _ in range(3)]
            change()
            assert all(x is before[0] for x in before)
            assert all(module.linear is expected for _ in range(3))
        module._modules.clear()
        with pytest.raises(AttributeError, match="linear"):
            _ = module.linear


def test_attributes_of_many_modules() -> None:
    """Tests more attributes than the cache holds, and names that are created and freed."""
    modules = [Plain() for _ in range(300)]
    with ab.batch():
        for _ in range(2):
            for k, module in enumerate(modules):
                name = "made_" + str(k)
                module._modules[f"made_{k}"] = module.linear
                assert getattr(module, name) is module._modules["linear"]
                assert module.weight is module._parameters["weight"]
                del module._modules[name]
                assert not hasattr(module, "made_" + str(k))


def test_items_of_a_module_list_out_of_order() -> None:
    several = nn.ModuleList([nn.Linear(1, 1) for _ in range(12)])
    modules = list(several)
    with ab.batch():
        assert [several[i] for i in range(12)] == modules
        table = several._modules
        table["3"] = table.pop("3")  # moves it to the end
        table["07"] = nn.Tanh()
        assert [several[i] for i in range(12)] == modules
        del table["5"]
        assert [several[i] for i in range(12) if i != 5] == modules[:5] + modules[6:]
        for index in (5, 12, 10**30):
            with pytest.raises((IndexError, KeyError)) as error:
                several[index]
            assert error.type is outcome(lambda index=index: several[index])[0]
