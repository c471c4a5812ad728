"""Gradients inside instances: compares ``ab.map`` and a ``batch()`` block with the eager loop.

python -m benchmarks.gradients [NAME ...]

Each program is written for one instance, and computes gradients inside the instance: MAML with and
without ``create_graph``, a gradient penalty, clipped gradients of each example, and ``torch.func``.
Before the timing, the results and the gradients of the outer loss are compared with eager mode.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

INSTANCES, HIDDEN, ROUNDS = 32, 40, 5
GOAL = 1.5

Run = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]
Step = Callable[[Run], list[Tensor]]


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Returns a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(),
        nn.Linear(HIDDEN, outputs),
    )  # fmt: skip


def outer(run: Run, one: Callable[[Any], Tensor], data: Sequence[Any], model: nn.Module) -> Any:
    """Runs a training step on the mean of the losses. Returns losses and gradients."""
    model.zero_grad()
    losses = run(one, data)
    torch.stack(losses).mean().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach() for loss in losses] + gradients


def maml(create_graph: bool) -> Step:
    """MAML: each instance takes three gradient steps on its own task, then computes its loss."""
    model = network(1, 1)

    def predict(ws: Sequence[Tensor], x: Tensor) -> Tensor:
        for i in range(0, len(ws) - 2, 2):
            x = torch.tanh(F.linear(x, ws[i], ws[i + 1]))
        return F.linear(x, ws[-2], ws[-1])

    def one(task: Sequence[Tensor]) -> Tensor:
        x, y, x_query, y_query = task
        fast = list(model.parameters())
        for _ in range(3):
            loss = F.mse_loss(predict(fast, x), y)
            gradients = torch.autograd.grad(loss, fast, create_graph=create_graph)
            fast = [w - 0.05 * g for w, g in zip(fast, gradients, strict=True)]
        return F.mse_loss(predict(fast, x_query), y_query)

    tasks = [[torch.randn(10, 1) for _ in range(4)] for _ in range(INSTANCES)]
    return lambda run: outer(run, one, tasks, model)


def gradient_penalty() -> Step:
    """Penalty on the norm of a critic's input gradient, as in a Wasserstein GAN."""
    critic = network(16, 1)

    def one(x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        score = critic(x)
        (g,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + 10 * (g.norm(2, dim=1) - 1).square().mean()

    data = [torch.randn(8, 16) for _ in range(INSTANCES)]
    return lambda run: outer(run, one, data, critic)


def examples() -> list[tuple[Tensor, Tensor]]:
    """Returns random inputs of shape [1, 16], with targets of five classes."""
    return [(torch.randn(1, 16), torch.tensor([i % 5])) for i in range(INSTANCES)]


def gradients_of_examples() -> Step:
    """Gradients of each example, clipped as for differential privacy, then summed."""
    model = network(16, 5)

    def one(example: tuple[Tensor, Tensor]) -> list[Tensor]:
        x, y = example
        found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        norm = torch.stack([g.square().sum() for g in found]).sum().sqrt()
        return [g * torch.clamp(1 / norm, max=1.0) for g in found]

    data = examples()
    return lambda run: [torch.stack(gs).sum(0) for gs in zip(*run(one, data), strict=True)]


def func_grad() -> Step:
    """Gradients of each example by ``torch.func.grad``, summed."""
    model = network(16, 5)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(ps: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, ps, (x,)), y)

    def one(example: tuple[Tensor, Tensor]) -> list[Tensor]:
        return list(grad(loss)(parameters, *example).values())

    data = examples()
    return lambda run: [torch.stack(gs).sum(0) for gs in zip(*run(one, data), strict=True)]


def func_vmap() -> Step:
    """A ``vmap`` over pending tensors."""
    w = torch.randn(16, HIDDEN)

    def one(x: Tensor) -> Tensor:
        return vmap(lambda row: torch.dot(row, row).sqrt())((x @ w).tanh()).sum()

    data = [torch.randn(6, 16) for _ in range(INSTANCES)]
    return lambda run: run(one, data)


PROGRAMS: dict[str, Callable[[], Step]] = {
    "MAML": lambda: maml(create_graph=True),
    "MAML, first order": lambda: maml(create_graph=False),
    "gradient penalty": gradient_penalty,
    "gradients of examples": gradients_of_examples,
    "torch.func.grad": func_grad,
    "vmap": func_vmap,
}


def eager(function: Callable[[Any], Any], instances: Sequence[Any]) -> list[Any]:
    """Runs the instances in a loop."""
    return [function(x) for x in instances]


def block(function: Callable[[Any], Any], instances: Sequence[Any]) -> list[Any]:
    """Runs the loop in a block."""
    with ab.batch():
        return [function(x) for x in instances]


def seconds(step: Step, run: Run) -> float:
    """Returns the median seconds of a step, after two steps of warm-up."""
    times = []
    for _ in range(ROUNDS + 2):
        start = time.perf_counter()
        step(run)
        times.append(time.perf_counter() - start)
    return median(times[2:])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="programs; all of them by default")
    names = parser.parse_args().names or list(PROGRAMS)
    torch.set_num_threads(1)
    print("| program | eager, ms | map | block |\n| --- | ---: | ---: | ---: |")
    for name in names:
        torch.manual_seed(0)
        step = PROGRAMS[name]()
        expected = step(eager)
        for run in (ab.map, block):
            torch.testing.assert_close(step(run), expected, rtol=1e-4, atol=1e-5)
        loop = seconds(step, eager)
        print(
            f"| {name} | {1e3 * loop:.1f} | {loop / seconds(step, ab.map):.2f} "
            f"| {loop / seconds(step, block):.2f} |"
        )


if __name__ == "__main__":
    main()
