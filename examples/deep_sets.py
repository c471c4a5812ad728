"""Deep sets, a function of sets of any size: Zaheer et al. 2017 (arXiv:1703.06114), section 3.

    python examples/deep_sets.py [--steps N]

learns the median of a set of numbers. The model is written for one set, [n, 1]. In a block, the
sets of a minibatch run as one call for each layer, independent of their sizes, without padding or
masks. The script compares loss and gradients of a step with eager mode, trains, and times both
modes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

TOLERANCE = 1e-4

Sets = Sequence[tuple[Tensor, Tensor]]  # numbers [n, 1] and target [1]


class DeepSet(nn.Module):
    """Computes rho(pool(phi(x))) of one set, pooled by mean, maximum and weighted sum."""

    def __init__(self, hidden: int = 128):
        super().__init__()
        self.phi = nn.Sequential(
            nn.Linear(1, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, hidden)
        )
        # An equivariant layer: combines each element with the mean of its set.
        self.own = nn.Linear(hidden, hidden)
        self.common = nn.Linear(hidden, hidden, bias=False)
        self.rho = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, elements: Tensor) -> Tensor:
        """Computes a result of shape [1] from the elements of a set, [n, 1]."""
        x = self.phi(elements)
        x = F.relu(self.own(x) - self.common(x.mean(0, keepdim=True)))
        weights = x.softmax(0)
        pooled = torch.cat([x.mean(0), x.amax(0), (weights * x).sum(0)])
        return self.rho(pooled)


def make_sets(count: int, largest: int = 40) -> Sets:
    """Makes sets of 1 to `largest` numbers, each around a random centre, and their medians."""
    sets = []
    for size in torch.randint(1, largest + 1, (count,)).tolist():
        numbers = torch.randn(size, 1) + torch.randn(1)
        sets.append((numbers, numbers.median(0).values))
    return sets


def mean_loss(model: DeepSet, sets: Sets, enabled: bool = True) -> Tensor:
    """Returns the mean loss. Runs one set after the other, without a batch dimension."""
    with ab.batch(enabled=enabled):
        total = torch.zeros(())
        for elements, target in sets:
            total = total + F.mse_loss(model(elements), target)
        return total / len(sets)


def step(model: DeepSet, sets: Sets, enabled: bool) -> tuple[float, list[Tensor]]:
    """Runs forward and backward. Returns the seconds, and the loss with the gradients."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    loss = mean_loss(model, sets, enabled)
    torch.autograd.backward(loss)
    seconds = time.perf_counter() - start
    return seconds, [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, times and trains. Returns 1 if results differ from eager mode."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="of timing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model = DeepSet(options.hidden)

    times: dict[bool, list[float]] = {True: [], False: []}
    difference = 0.0
    for turn in range(options.rounds + 1):
        sets = make_sets(options.minibatch)
        results = {}
        for enabled in times:
            seconds, results[enabled] = step(model, sets, enabled)
            if turn > 0:  # the first turn is the warm-up
                times[enabled].append(seconds)
        largest = max(t.abs().max().item() for t in results[False])
        for a, b in zip(results[True], results[False], strict=True):
            difference = max(difference, (a - b).abs().max().item() / largest)
    print(f"differs from eager by {difference:.1e} of the largest gradient")
    for enabled, seconds in times.items():
        rate = options.minibatch / median(seconds)
        print(f"  {'torch_autobatch' if enabled else 'eager':<16}{rate:8.0f} sets/s")

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for number in range(1, options.steps + 1):
        _, (loss, *_) = step(model, make_sets(options.minibatch), True)
        optimizer.step()
        if number % 100 == 0 or number == options.steps:
            print(f"  step {number:4d}: mean squared error {loss.item():.4f}")
    return int(not difference <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
