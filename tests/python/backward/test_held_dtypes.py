"""Gradients through held results of several dtypes, in few calls forward and backward."""

import torch
import torch_autobatch as ab
from torch import Tensor


def test_held_results_of_several_dtypes_feed_one() -> None:
    x = torch.randn(4, requires_grad=True)
    wide = torch.randn(4, dtype=torch.float64, requires_grad=True)

    def program(batched: bool) -> list[Tensor | None]:
        with ab.batch(enabled=batched, adaptive=False):
            held: list[Tensor] = []
            results = []
            for k in range(5):
                narrow, double = x * (k + 1), wide * (k + 2)
                held += [narrow, double]
                results.append(torch.tanh(narrow + double).sum())
            total = torch.stack(results[:4]).sum()
        inputs = [x, wide, *held]
        found = torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=True)
        return [*found, *torch.autograd.grad(total, [held[0], held[1]])]

    expected, found = program(False), program(True)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(b, a)


def test_a_module_may_be_made_in_a_block() -> None:
    """The module reads `grad_fn` of its parameters, which needs no value."""
    with ab.batch(adaptive=False) as scope:
        pending = torch.zeros(3)
        parameter = torch.nn.Parameter(torch.zeros(3))
        module = torch.nn.Module()
        module.register_parameter("p", parameter)
        assert parameter.grad_fn is None
        assert pending.grad_fn is None
        assert (pending * torch.ones(3, requires_grad=True)).is_leaf is False
        assert len(scope.report().flushes) == 0
    assert parameter.grad_fn is None
    parameter.sum().backward()
    assert parameter.grad is not None


def test_prelu_of_empty_rows() -> None:
    prelu = torch.nn.PReLU()
    xs = [torch.zeros(1, 0, 3, requires_grad=True) for _ in range(2)]
    with ab.batch(adaptive=False):
        total = torch.stack([prelu(x * 2).sum() for x in xs]).sum()
    total.backward()
    assert prelu.weight.grad is not None
    assert prelu.weight.grad.tolist() == [0]
