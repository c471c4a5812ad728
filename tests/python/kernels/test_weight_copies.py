"""Copies of weights that a scope keeps for its later flushes: writes to a weight are noticed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn

WIDTH, ROWS = 64, 200  # enough rows for a copy at the second product


def assign(w: Tensor) -> None:
    w.data = w.data * 0.5


def write_by_numpy(w: Tensor) -> None:
    w.detach().numpy()[:] *= 0.5


def step_optimizer(w: Tensor) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.01).step()


def write_in_eager(w: Tensor) -> None:
    with ab.batch(enabled=False):
        w.data.mul_(0.5)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda w: w.mul_(0.5),
    "row": lambda w: w[3].zero_(),
    "data": lambda w: w.data.mul_(0.5),
    "detached": lambda w: w.detach().mul_(0.5),
    "transposed": lambda w: w.t().mul_(0.5),
    "copy": lambda w: w.copy_(w * 0.5),
    "assignment": assign,
    "numpy": write_by_numpy,
    "foreach": lambda w: torch._foreach_mul_([w], 0.5),
    "optimizer": step_optimizer,
    "eager region": write_in_eager,
}


def run(write: Callable[[Tensor], object], block: bool) -> list[Tensor]:
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    results = []
    with torch.no_grad(), ab.batch(enabled=block, adaptive=False):
        for step in range(8):
            x = layer(x).tanh() + 0.1
            results.append(torch.tensor(x.sum().item()))
            if step == 4:
                write(layer.weight)
    return [*results, x]


@pytest.mark.parametrize("name", WRITES)
def test_a_write_between_flushes_counts(name: str) -> None:
    torch.testing.assert_close(run(WRITES[name], True), run(WRITES[name], False))


def test_another_weight_at_the_same_place() -> None:
    """A weight that was freed must not give its copy to the weight that takes its memory."""
    torch.manual_seed(0)
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad(), ab.batch(adaptive=False):
        for _ in range(6):
            w = torch.randn(WIDTH, WIDTH)
            for _ in range(3):
                y = nn.functional.linear(x, w)
                total = y.sum().item()
            assert total == pytest.approx((x @ w.t()).double().sum().item(), rel=1e-3, abs=1e-2)
            del w, y


def test_update_of_an_engine() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH).eval()
    xs = [torch.randn(ROWS, WIDTH) for _ in range(8)]

    def serve(x: Tensor) -> Tensor:
        for _ in range(3):
            x = layer(x).tanh()
        return x

    with ab.Engine(serve, max_live=4) as engine:
        before = list(engine.map(xs))
        torch.testing.assert_close(before, [serve(x).detach() for x in xs])
        changed = {name: 0.5 * value for name, value in layer.state_dict().items()}
        engine.update(changed)
        after = list(engine.map(xs))
    layer.load_state_dict(changed)
    torch.testing.assert_close(after, [serve(x).detach() for x in xs])
