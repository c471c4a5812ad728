"""``torch.autograd.grad`` in a block is captured. It gives eager's results without a flush."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_gradients import DOUBLE, agree, rows, same, tensor
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F

pytestmark = pytest.mark.own_thread


@pytest.mark.parametrize("create_graph", [True, False])
def test_maml(create_graph: bool) -> None:
    w1, b1, w2 = (p.requires_grad_() for p in (tensor(4, 3), tensor(4), tensor(1, 4)))

    def loss(ws: Any, x: Tensor) -> Tensor:
        return F.mse_loss(F.linear(torch.tanh(F.linear(x, ws[0], ws[1])), ws[2]), x[:, :1])

    def adapt(x: Tensor) -> Tensor:
        fast = [w1, b1, w2]
        for _ in range(2):
            gs = grad(loss(fast, x), fast, create_graph=create_graph)
            fast = [w - 0.1 * g for w, g in zip(fast, gs, strict=True)]
        return loss(fast, x.flip(0))

    report = agree(adapt, rows(), [w1, b1, w2], captured=2)
    assert report.launches < report.nodes / 3


def test_gradient_penalty() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 1)).double()

    def penalty(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (g,) = grad(net(x).sum(), x, create_graph=True)
        return (g.norm(2, dim=1) - 1).square().mean()

    agree(penalty, rows(), list(net.parameters()))


def test_gradient_of_each_example() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    weights = list(net.parameters())

    def clipped(x: Tensor) -> list[Tensor]:
        gs = grad(F.cross_entropy(net(x), torch.tensor([1, 2])), weights)
        norm = torch.stack([g.norm() for g in gs]).norm()
        return [g / norm for g in gs]

    agree(clipped, rows(), weights, captured=1)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda h: h.view(-1) * 2,
    "transpose": lambda h: h.t() @ h,
    "select": lambda h: h[1] * h[0],
    "column": lambda h: h[:, 2].exp(),
    "slice": lambda h: h[:, 1:3] * h[:, :2],
    "step": lambda h: h[:, ::2].sin(),
    "chunk": lambda h: torch.cat([c.tanh() for c in h.chunk(2, dim=1)], 1),
    "unbind": lambda h: h.unbind(0)[0] * h.unbind(0)[1],
    "expand": lambda h: h[0].expand(3, 4).cos(),
    "unsqueeze": lambda h: h.unsqueeze(1) + h.unsqueeze(0),
    "diagonal": lambda h: h.diagonal().exp(),
    "part of a transpose": lambda h: h.t()[1:3].exp(),
    "view of a view": lambda h: h[1:].view(-1)[1:].exp(),
    "detached": lambda h: h.detach() * h,
    "permuted": lambda h: h.view(2, 2, 2).permute(2, 0, 1).exp(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_through_views(name: str) -> None:
    w = tensor(3, 4).requires_grad_()

    def function(x: Tensor) -> list[Tensor]:
        h = x @ w
        y = VIEWS[name](h).square().sum()
        return [y, *grad(y, [w, h], create_graph=True)]

    agree(function, rows(), [w], captured=None if name == "diagonal" else 1)


OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, w: x @ w * w[0],
    "div": lambda x, w: (x @ w) / (w[1] ** 2 + 1),
    "same operand twice": lambda x, w: (x @ w) * (x @ w),
    "pow": lambda x, w: (x @ w).abs() ** 2.5,
    "softmax": lambda x, w: torch.softmax(x @ w, 1),
    "log_softmax": lambda x, w: F.log_softmax(x @ w, -1),
    "layer_norm": lambda x, w: F.layer_norm(x @ w, (4,), w[0], w[1]),
    "gelu": lambda x, w: F.gelu(x @ w),
    "relu": lambda x, w: F.relu(x @ w),
    "max": lambda x, w: (x @ w).max(1).values,
    "amax": lambda x, w: (x @ w).amax(1),
    "logsumexp": lambda x, w: torch.logsumexp(x @ w, 1),
    "cat": lambda x, w: torch.cat([x @ w, w]),
    "stack": lambda x, w: torch.stack([x @ w, (x @ w).exp()]),
    "index": lambda x, w: (x @ w)[torch.tensor([1, 0, 1])],
    "gather": lambda x, w: (x @ w).gather(1, torch.tensor([[0, 2], [1, 1]])),
    "embedding": lambda x, w: F.embedding(torch.tensor([2, 0, 2]), w) * x.sum(),
    "where": lambda x, w: torch.where(x @ w > 0, x @ w, w[0]),
    "clamp": lambda x, w: (x @ w).clamp(-0.5, 0.5),
    "cumsum": lambda x, w: (x @ w).cumsum(1),
    "bmm": lambda x, w: torch.bmm((x @ w).view(2, 2, 2), w.view(3, 2, 2)[:2]),
    "einsum": lambda x, w: torch.einsum("ij,jk->k", x, w),
    "in place": lambda x, w: (x @ w).mul(2).add_(w[0]).relu_(),
    "written in parts": lambda x, w: torch.zeros(2, 4, dtype=DOUBLE).index_copy(
        0, torch.tensor([1]), (x @ w)[:1]
    ),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, torch.tensor([3, 1])),
    "smooth_l1": lambda x, w: F.smooth_l1_loss(x @ w, w[:2]),
    "conv1d": lambda x, w: F.conv1d((x @ w)[None], w.view(1, 2, 6)[:, :, :3], padding=1),
    "lstm_cell": lambda x, w: torch.lstm_cell(
        x, (x[:, :1], x[:, 1:2]), w.t(), w.view(-1)[:4].view(4, 1)
    )[0],
    "norm": lambda x, w: (x @ w).norm(dim=1),
    "var": lambda x, w: (x @ w).var(1),
    "prod": lambda x, w: (x @ w).prod(1),
    "silu": lambda x, w: F.silu(x @ w),
    "mish": lambda x, w: F.mish(x @ w),
    "group_norm": lambda x, w: F.group_norm(x @ w, 2, w[0], w[1]),
    "instance_norm": lambda x, w: F.instance_norm((x @ w)[None]),
    "batch_norm": lambda x, w: F.batch_norm(x @ w, tensor(4), tensor(4).square() + 1, w[0], w[1]),
    "batch_norm in training": lambda x, w: F.batch_norm(x @ w, None, None, training=True),
    "cholesky": lambda x, w: torch.linalg.cholesky(x @ w @ w.t() @ x.t() + 3 * torch.eye(2)),
    "inv": lambda x, w: torch.linalg.inv((x @ w)[:, :2] + 9 * torch.eye(2)),
    "solve": lambda x, w: torch.linalg.solve((x @ w)[:, :2] + 9 * torch.eye(2), x),
    "eigh": lambda x, w: torch.linalg.eigvalsh(x @ w @ w.t() @ x.t() + torch.arange(2).diag()),
}


@pytest.mark.parametrize("name", OPS)
def test_through_ops(name: str) -> None:
    """Also tests second-order gradients, because `agree` differentiates the gradient."""
    w = tensor(3, 4).requires_grad_()

    def function(x: Tensor) -> Tensor:
        (g,) = grad(OPS[name](x, w).square().sum(), w, create_graph=True)
        return g

    agree(function, rows(), [w])


CAPTURED = [
    "mul", "div", "same operand twice", "pow", "softmax", "log_softmax", "layer_norm", "gelu",
    "relu", "cat", "stack", "gather", "embedding", "where", "clamp", "cumsum", "bmm", "einsum",
    "cross_entropy", "smooth_l1", "in place", "norm", "silu", "mish", "group_norm",
    "batch_norm", "cholesky", "inv", "solve",
]  # fmt: skip


@pytest.mark.parametrize("name", CAPTURED)
def test_no_flush(name: str) -> None:
    w = tensor(3, 4).requires_grad_()
    with ab.batch() as scope:
        for x in rows():
            grad(OPS[name](x, w).square().sum(), w, create_graph=True)
        assert scope.report().gradients == 5
        assert not scope.report().flushes


def test_third_order() -> None:
    w = tensor(3).requires_grad_()

    def function(x: Tensor) -> Tensor:
        y = (x * w).sin().sum()
        for _ in range(3):
            (g,) = grad(y, w, create_graph=True)
            y = g.exp().sum()
        return y

    agree(function, rows(4, 3), [w], captured=3)


def test_inputs_on_the_way() -> None:
    w = tensor(3, 4).requires_grad_()

    def function(x: Tensor) -> list[Tensor]:
        h = (x @ w).tanh()
        part = h[:, 1:3]
        y = (part.exp() * 2).sum() + h.square().sum()
        return list(grad(y, [h, part, w, h], create_graph=True))

    agree(function, rows(), [w], captured=1)


@pytest.mark.parametrize("of", ["c", "c and x"])
def test_a_result_that_another_result_depends_on(of: str) -> None:
    """nn.LSTMCell computes h' from c'."""
    cell = nn.LSTMCell(3, 4).to(DOUBLE)

    def function(x: Tensor) -> list[Tensor]:
        h, c = cell(x)
        inputs = [c] if of == "c" else [c, x]
        return list(grad(h.exp().sum(), inputs, create_graph=True, allow_unused=True))

    agree(function, [x.requires_grad_() for x in rows()], list(cell.parameters()))


def test_outputs_and_their_gradients() -> None:
    w = tensor(3, 4).requires_grad_()

    def function(x: Tensor) -> list[Tensor]:
        a, b = (x @ w).tanh(), (x @ w).exp()
        v = torch.ones_like(a).mul_(2).requires_grad_()
        (g,) = grad([a, b], [w], [v, a.detach()], create_graph=True)
        (h,) = grad(g.sum(), [v], retain_graph=True)  # second derivative by the factor
        return [g, h]

    agree(function, rows(), [w])


def test_the_output_itself() -> None:
    w = tensor(3, 4).requires_grad_()

    def function(x: Tensor) -> list[Tensor]:
        y = (x @ w).sum()
        return list(grad(y, [y, w], create_graph=True))

    agree(function, rows(), [w], captured=1)


def test_unused_inputs() -> None:
    w, other = tensor(3, 4).requires_grad_(), tensor(2).requires_grad_()

    def function(x: Tensor) -> list[Any]:
        y = (x @ w).sum()
        found = grad(y, [w, other], allow_unused=True, retain_graph=True)
        zeros = grad(y, [w, other], materialize_grads=True, retain_graph=True)
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            grad(y, [w, other], retain_graph=True)
        return [found[0], found[1] is None, *zeros]

    agree(function, rows(), [w, other])


def test_a_second_time() -> None:
    w = tensor(3, 4).requires_grad_()

    def function(x: Tensor) -> list[Tensor]:
        y = (x @ w).tanh().sum()
        kept = grad(y, w, retain_graph=True)
        last = grad(y, w)
        with pytest.raises(RuntimeError, match="second time"):
            grad(y, w)
        return [*kept, *last]

    agree(function, rows(), [w])


def test_a_second_time_by_backward() -> None:
    w = tensor(3, 4).requires_grad_()
    with ab.batch() as scope:
        losses = [(x @ w).tanh().sum() for x in rows()]
        grad(losses[2], w)
    assert scope.report().gradients == 1
    losses[1].backward()
    with pytest.raises(RuntimeError, match="second time"):
        losses[2].backward()
    losses[3].backward()


def test_hooks_are_called() -> None:
    w = tensor(3, 4).requires_grad_()
    seen: list[Tensor] = []

    def function(x: Tensor) -> list[Tensor]:
        h = x @ w
        h.register_hook(lambda g: seen.append(g) or g * 2)
        return list(grad(h.tanh().sum(), w, create_graph=True))

    agree(function, rows(), [w])
    assert len(seen) == 5 * 3 * 2  # each backward of the gradients runs it once more


def test_hooks_of_a_leaf_are_called() -> None:
    w = tensor(3, 4).requires_grad_()
    handle = w.register_hook(lambda g: g * 3)

    def function(x: Tensor) -> list[Tensor]:
        return list(grad((x @ w).tanh().sum(), w))

    agree(function, rows(), [w])
    handle.remove()


def test_history_before_the_block() -> None:
    """The path to the input passes through an ordinary tensor, so autograd runs."""
    v = tensor(3, 4).requires_grad_()
    w = v + 1

    def function(x: Tensor) -> list[Tensor]:
        return list(grad((x @ w).tanh().sum(), [v, w], create_graph=True))

    agree(function, rows(), [v])


def test_after_a_read() -> None:
    w = tensor(3, 4).requires_grad_()

    def function(x: Tensor) -> list[Any]:
        y = (x @ w).tanh().square().sum()
        value = y.item()
        (g,) = grad(y if value > 1 else y * 2, w, create_graph=True)
        norm = g.norm()
        return [value, norm, *grad(norm * norm.item(), w, create_graph=True)]

    agree(function, rows(), [w])


def test_overwritten_values() -> None:
    """A saved tensor was overwritten, so eager's error is raised."""
    w = tensor(4).requires_grad_()

    def function(x: Tensor) -> bool:
        h = (x * w).exp()
        y = h.sum()
        h.mul_(2)
        with pytest.raises(RuntimeError, match="inplace"):
            grad(y, w)
        return True

    agree(function, rows(3, 4), [w])


def test_dropout() -> None:
    w = tensor(4).requires_grad_()
    with ab.batch() as scope:
        pairs = []
        for x in rows(6, 4):
            h = x * w
            y = F.dropout(h, 0.5)
            pairs.append((x, h, y, *grad(y.sum(), [h, w], create_graph=True)))
    assert scope.report().gradients == 6
    for x, h, y, g, gw in pairs:
        torch.testing.assert_close(g, (y / h).detach())
        torch.testing.assert_close(gw, (y / h * x).detach())


def test_sizes_that_are_all_different() -> None:
    """Finding a formula for each size costs less than a flush."""
    w = tensor(3, 4).requires_grad_()

    def function(x: Tensor) -> Tensor:
        (g,) = grad((x @ w).tanh().sum(), w, create_graph=True)
        return g

    agree(function, [tensor(n + 1, 3) for n in range(32)], [w], captured=1)


def test_the_report_says_that_a_gradient_was_not_captured() -> None:
    w = tensor(3).requires_grad_()
    with ab.batch(adaptive=False) as scope:
        h = w * 2
        h.register_hook(lambda g: g * 2)
        (g,) = grad(h.sum(), w)
    torch.testing.assert_close(g, torch.full_like(w, 4))
    report = scope.report()
    assert report.gradients == 0
    assert "backward() by torch.autograd.grad" in [flush.reason for flush in report.flushes]


def test_no_state_is_left() -> None:
    before = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    w = tensor(3, 4).requires_grad_()

    def fails() -> None:
        grad((tensor(2, 3) @ w).sum(), w)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ab.batch():
        fails()
    assert torch.autograd._engine_run_backward is before  # type: ignore[attr-defined]


def test_verified() -> None:
    w = tensor(3, 4).requires_grad_()
    with ab.batch(verify=True) as scope:
        found = [grad((x @ w).tanh().sum(), w, create_graph=True)[0] for x in rows()]
    assert scope.report().gradients == 5
    same(found, [grad((x @ w).tanh().sum(), w)[0] for x in rows()])


def test_within_a_cell() -> None:
    w = tensor(3, 3).requires_grad_()
    step = ab.cell(lambda x: torch.tanh(x @ w))

    def function(x: Tensor) -> Tensor:
        (g,) = grad(step(step(x)).sum(), w, create_graph=True)
        return g

    agree(function, rows(), [w])


def test_errors_of_one_instance() -> None:
    w = tensor(3, 4).requires_grad_()

    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        y = (x @ w).tanh().sum()
        if i == 2:
            grad(y, tensor(1))  # requires no gradient
        return grad(y, w, create_graph=True)

    found = ab.map(function, list(enumerate(rows())), return_exceptions=True)
    assert isinstance(found[2], RuntimeError)
    for i, x in enumerate(rows()):
        if i != 2:
            same(list(found[i]), list(grad((x @ w).tanh().sum(), w)))


def test_a_factory_that_reads_the_shape_first_takes_no_gradient_away() -> None:
    """Backward recomputes the factory without gradients, and the view behind it with gradients."""
    w = tensor(3, 3).requires_grad_()
    found = []
    for enabled in (False, True):
        with ab.batch(enabled=enabled):
            transposed = (torch.ones(3, 3, dtype=torch.float64) @ w).t()
            v = torch.ones_like(transposed)[0, :2] + transposed.diagonal(-1)
            (gradient,) = grad((v * v).sum(), w, create_graph=True)
        found.append(gradient.detach())
    torch.testing.assert_close(*found)
