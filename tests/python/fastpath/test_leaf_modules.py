"""The fast path for PyTorch's leaf modules behaves like nn.Module.__call__ in unusual cases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, parametrize


def rows(k: int) -> Tensor:
    return torch.sin(torch.arange(8.0) + k).view(2, 4)


def flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def run(module: nn.Module, calls: list[tuple[Any, ...]], enabled: bool) -> list[Tensor]:
    """Returns the results of all calls in a block, and the gradients of the parameters."""
    torch.manual_seed(0)
    module.zero_grad()
    with ab.batch(enabled=enabled):
        results = [tensor for call in calls for tensor in flat(module(*call))]
        total = sum((r * r).sum() for r in results)
    if total.requires_grad:
        total.backward()
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return results + grads


def check(module: nn.Module, calls: list[tuple[Any, ...]]) -> None:
    for ours, eager in zip(run(module, calls, True), run(module, calls, False), strict=True):
        torch.testing.assert_close(ours, eager)
        assert ours.requires_grad == eager.requires_grad
        assert ours.shape == eager.shape


MATRICES = [(rows(k),) for k in range(3)]
VECTORS = [(rows(k)[0],) for k in range(3)]
STATES = [(rows(k), (rows(k + 5)[:, :3], rows(k + 9)[:, :3])) for k in range(3)]
STATE_VECTORS = [(x[0], (h[0], c[0])) for x, (h, c) in STATES]
WORDS = [(torch.tensor([k, 1]),) for k in range(3)]


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        (nn.Linear(4, 3), MATRICES + VECTORS),
        (nn.Linear(4, 3, bias=False), MATRICES),
        (nn.LSTMCell(4, 3), STATES),
        (nn.LSTMCell(4, 3), STATE_VECTORS),
        (nn.LSTMCell(4, 3, bias=False), MATRICES + VECTORS),
        (nn.LSTMCell(4, 3), [(x, None) for (x,) in MATRICES]),
        (nn.GRUCell(4, 3), [(x, h) for x, (h, _) in STATES]),
        (nn.GRUCell(4, 3), [(x, h) for x, (h, _) in STATE_VECTORS] + VECTORS),
        (nn.Embedding(5, 3), WORDS),
        (nn.Embedding(5, 3, padding_idx=1), WORDS),
        (nn.Embedding(5, 3, padding_idx=-1), WORDS),
        (nn.Embedding(5, 3, max_norm=0.5), WORDS),
        (nn.LayerNorm(4), MATRICES),
        (nn.LayerNorm(4, bias=False), MATRICES),
        (nn.LayerNorm((2, 4), elementwise_affine=False), MATRICES),
        (nn.Dropout(0.5).eval(), MATRICES),
        (nn.ReLU(), MATRICES),
        (nn.SiLU(), MATRICES),
        (nn.GELU(), MATRICES),
        (nn.GELU(approximate="tanh"), MATRICES),
        (nn.Tanh(), MATRICES),
        (nn.Sigmoid(), MATRICES),
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 2))), MATRICES),
        (nn.Sequential(), MATRICES),
    ],
    ids=str,
)
def test_leaf_modules_are_eagers(module: nn.Module, calls: list[tuple[Any, ...]]) -> None:
    check(module, calls)
    if not isinstance(module, nn.Embedding):
        before = nn.Linear(4, 4)
        check(nn.Sequential(before), [(c[0],) for c in calls])
        stacked = [(nn.Parameter(call[0]), *call[1:]) for call in calls]
        check(module, stacked)


def test_the_classes_look_as_ever() -> None:
    with ab.batch():
        assert nn.Linear.__call__ is nn.Module.__call__
        assert "__call__" not in nn.Linear.__dict__
        late = type("Late", (nn.Linear,), {"forward": lambda self, x: x + 1})(4, 3)
        torch.testing.assert_close(late(rows(0)), rows(0) + 1)
    torch.testing.assert_close(late(rows(0)), rows(0) + 1)


@pytest.mark.parametrize("before", [True, False])
def test_compiled_modules(before: bool) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Tanh())
    compiled = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
    if before:
        compiled(rows(0))
    with ab.batch():
        results = [compiled(rows(k)) for k in range(3)]
    for k, result in enumerate(results):
        torch.testing.assert_close(result, model(rows(k)) + 1)


def hooked(change: Callable[[nn.Linear, list[Any]], Any]) -> None:
    """After the change, the module's call is an ordinary call, and behaves as in eager mode."""
    seen: dict[bool, list[Any]] = {}
    for enabled in (False, True):
        torch.manual_seed(0)
        module, log = nn.Linear(4, 3), []
        undo = change(module, log)
        try:
            with ab.batch(enabled=enabled):
                results = [module(x) for (x,) in MATRICES]
            torch.stack(results).square().sum().backward()
        finally:
            if undo is not None:
                undo.remove()
        weight = getattr(module, "weight", None)
        grad = weight.grad if isinstance(weight, nn.Parameter) else None
        seen[enabled] = [*log, *[r.detach() for r in results], grad]
    assert len(seen[True]) == len(seen[False])
    for ours, eager in zip(seen[True], seen[False], strict=True):
        if isinstance(eager, Tensor):
            torch.testing.assert_close(ours, eager)
        else:
            assert ours == eager


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def test_hooks_run() -> None:
    hooked(lambda m, log: m.register_forward_hook(lambda *_: log.append("after")))
    hooked(lambda m, log: m.register_forward_pre_hook(lambda *_: log.append("before")))
    hooked(lambda m, log: m.register_forward_hook(lambda _m, _x, y: y * 3))
    hooked(lambda m, log: m.register_full_backward_hook(lambda *_: log.append("backward")))


def test_global_hooks_run() -> None:
    register = nn.modules.module.register_module_forward_hook
    hooked(lambda m, log: register(lambda *_: log.append("after")))
    register_pre = nn.modules.module.register_module_forward_pre_hook
    hooked(lambda m, log: register_pre(lambda *_: log.append("before")))


def test_a_forward_of_the_instances_own_is_called() -> None:
    def change(module: nn.Linear, log: list[Any]) -> None:
        module.forward = lambda x: log.append("mine") or F.linear(x, module.weight)  # type: ignore

    hooked(change)


def test_parametrized_modules_are_ordinary() -> None:
    hooked(lambda m, log: parametrize.register_parametrization(m, "weight", Halved()) and None)
    hooked(lambda m, log: parametrizations.weight_norm(m) and None)


def test_subclasses_are_ordinary() -> None:
    torch.manual_seed(0)
    check(Doubled(4, 3), MATRICES)


def test_a_replaced_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", lambda x, w, b: x @ w.t())
    check(nn.Linear(4, 3), MATRICES)


def test_a_replaced_forward_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(4, 3)
    with ab.batch():
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x + 100)
        result = module(rows(0))
    torch.testing.assert_close(result, rows(0) + 100)


def test_what_is_replaced_inside_a_block_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.Linear(4, 3), rows(0)
    expected = module(x) * 10
    with ab.batch():
        module(x)
        linear = F.linear
        monkeypatch.setattr(F, "linear", lambda x, w, b=None: linear(x, w, b) * 10)
        result = module(x)
        monkeypatch.undo()
        call = nn.Module._call_impl
        monkeypatch.setattr(nn.Module, "_call_impl", lambda *a, **k: call(*a, **k) * 10)
        other = module(x)
    monkeypatch.undo()
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(other, expected)


def test_what_changes_between_calls_is_seen() -> None:
    """Cached attributes of a module are read again after any write to the module."""

    def other(k: int, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.cos(torch.arange(12.0) * k).view(shape))

    def new_class(module: nn.Linear) -> None:
        module.__class__ = Doubled

    def new_dict(module: nn.Linear) -> None:
        module.__dict__ = module.__dict__ | {
            "_parameters": {"weight": other(5, 3, 4), "bias": None}
        }

    changes: list[Callable[[nn.Linear], Any]] = [
        lambda module: None,
        lambda module: setattr(module, "weight", other(2, 3, 4)),
        lambda module: module._parameters.update(weight=other(3, 3, 4)),
        lambda module: setattr(module, "bias", None),
        lambda module: module.register_forward_hook(lambda _m, _x, y: y * 3),
        lambda module: module._forward_hooks.clear(),
        lambda module: setattr(module, "_parameters", {"weight": other(4, 3, 4), "bias": None}),
        new_dict,
        new_class,
    ]

    def outputs(enabled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = nn.Linear(4, 3)
        results = []
        with ab.batch(enabled=enabled):
            for change in changes:
                module(rows(0))
                change(module)
                results.append(module(rows(1)))
        return results

    for ours, eager in zip(outputs(True), outputs(False), strict=True):
        torch.testing.assert_close(ours, eager)


def test_modules_that_take_each_others_place() -> None:
    """A module at the address of a freed module does not get its cached attributes."""
    with ab.batch():
        for k in range(2000):
            module = (nn.ReLU(), nn.Dropout(1.0), nn.Dropout(0.0), nn.Dropout(1.0).eval())[k % 4]
            assert float(module(torch.ones(1) * 1.0)) == (0.0 if k % 4 == 1 else 1.0)


def test_keywords_and_wrong_calls() -> None:
    module = nn.Linear(4, 3)
    with ab.batch():
        named = module(input=rows(0))
        with pytest.raises(TypeError, match="positional"):
            module()
        with pytest.raises(TypeError, match="positional"):
            module(rows(0), rows(1))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            module(rows(0)[:, :3])
    torch.testing.assert_close(named, module(rows(0)))


def test_tracers_see_the_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    with ab.batch():
        traced = fx.symbolic_trace(model)
        scripted = torch.jit.trace(model, rows(0))
    assert [node.op for node in traced.graph.nodes].count("call_module") == 2
    torch.testing.assert_close(scripted(rows(1)), model(rows(1)))


def test_torch_function_modes_see_the_calls() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore
            names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    with ab.batch(), Mode():
        nn.Linear(4, 3)(rows(0))
    assert "linear" in names


def test_other_threads_stay_exact() -> None:
    module, results = nn.Linear(4, 3), []
    with ab.batch():
        thread = threading.Thread(target=lambda: results.append(module(rows(0))))
        thread.start()
        thread.join()
    assert results[0].grad_fn.name() == "AddmmBackward0"
    torch.testing.assert_close(results[0], module(rows(0)))
