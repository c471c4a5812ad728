"""Calls of TorchScript functions, methods and traced modules on pending tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_capture import DOUBLE, rand
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def plain(x: Tensor, factor: float = 0.5) -> Tensor:
    y = x.tanh() * factor
    return y.square().sum(-1) + x.mean(-1)


def with_branch(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        x = x * 2
    return x.tanh().sum(-1)


def with_loop(xs: list[Tensor]) -> tuple[Tensor, int]:
    total = xs[0]
    for x in xs:
        total = total + x.sigmoid()
    return total.sum(-1), len(xs)


def with_assertion(x: Tensor) -> Tensor:
    assert x.dim() == 3, "three dimensions"
    return x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.inner(x).relu() * scale


def warmed(function: Any, *arguments: Any) -> Any:
    """TorchScript optimizes a function after its first calls."""
    for _ in range(4):
        out = function(*arguments)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return function


def trained() -> Tensor:
    return rand(3, 4).requires_grad_()


def functions() -> dict[str, Callable[[Tensor], Tensor]]:
    torch.manual_seed(1)
    scripted = warmed(torch.jit.script(plain), trained())
    branch = warmed(torch.jit.script(with_branch), trained())
    loop = warmed(torch.jit.script(with_loop), [trained(), trained()])
    layer = torch.jit.script(Layer())
    warmed(layer, trained())
    traced = torch.jit.trace(plain, (rand(3, 4),))
    traced_layer = torch.jit.trace(Layer(), (rand(3, 4),))
    return {
        "function": lambda h: scripted(h),
        "named": lambda h: scripted(x=h, factor=2.0),
        "branch": branch,
        "list": lambda h: loop([h, h * 2])[0] * loop([h])[1],
        "module": lambda h: layer(h, 0.5).sum(-1),
        "method": lambda h: layer.forward(h).sum(-1),
        "traced": traced,
        "traced module": lambda h: traced_layer(h).sum(-1),
    }


FUNCTIONS = ["function", "named", "branch", "list", "module", "method", "traced", "traced module"]


def run(name: str, *, enabled: bool, mapped: bool, train: bool) -> tuple[list[Any], ab.batch]:
    function = functions()[name]
    weight = (torch.arange(16, dtype=DOUBLE).view(4, 4) / 16).requires_grad_()
    given = [rand(2 + i, 4) for i in range(5)]
    with torch.set_grad_enabled(train), ab.batch(enabled=enabled, adaptive=False) as scope:
        if mapped:
            results = ab.map(lambda x: function(x @ weight), given)
        else:
            results = [function(x @ weight) for x in given]
    if train:
        torch.cat(results).square().sum().backward()
    return [*results, weight.grad], scope


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_results_and_no_flush(name: str, mapped: bool, train: bool) -> None:
    torch.manual_seed(0)
    expected, _ = run(name, enabled=False, mapped=mapped, train=train)
    torch.manual_seed(0)
    ours, scope = run(name, enabled=True, mapped=mapped, train=train)
    torch.testing.assert_close(ours, expected)
    if name != "branch":
        assert len(scope.report().flushes) == 1
        assert not scope.report().at_once


def test_parameters_of_a_scripted_module_get_gradients() -> None:
    layer = torch.jit.script(Layer())
    given = [rand(2 + i, 4) for i in range(5)]
    gradients = []
    for enabled in (False, True):
        layer.zero_grad()
        with ab.batch(enabled=enabled, adaptive=False) as scope:
            losses = [layer(x).sum() for x in given]
        torch.stack(losses).sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert sum(row.batches for row in scope.report().signatures) < 5


def test_errors_are_those_of_torchscript() -> None:
    checked = torch.jit.script(with_assertion)
    errors = []
    for enabled in (False, True):
        weight = trained()
        with ab.batch(enabled=enabled), pytest.raises(torch.jit.Error) as caught:
            checked(weight.tanh())
        errors.append(str(caught.value))
    assert "three dimensions" in errors[0]
    assert errors[1] == errors[0]
    with ab.batch(), pytest.raises(RuntimeError, match="factor"):
        torch.jit.script(plain)(trained().tanh(), 1.0, 2.0)
