"""Measures the time of a read, depending on the number of other pending nodes.

python -m benchmarks.reads                 from 10^2 to 10^6 pending nodes
python -m benchmarks.reads --most 100000

Chains of one op stay pending. In addition, a chain of another op is read at each step. A read runs
two nodes, so its time should not depend on the number of pending nodes. "number" is ``item()`` with
gradients on, "no gradient" is ``item()`` under ``no_grad``, and "tensor" is a read of a value that
requires grad and becomes a tensor with a ``grad_fn``. The first read of a block visits all captured
nodes. A separate column shows its time, divided by the number of pending nodes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch_autobatch as ab
from torch import Tensor, nn

READS, CHAINS = 64, 10


def read_number(value: Tensor) -> None:
    """Reads the value as a number, which does not create a tensor for it."""
    value.sum().item()


def read_tensor(value: Tensor) -> None:
    """Creates a tensor with a ``grad_fn``, as other reads do."""
    assert value.grad_fn is not None


def times_of_reads(pending: int, read: Callable[[Tensor], None]) -> tuple[float, float]:
    """Returns microseconds of a read with ``pending`` nodes, and nanoseconds a node of the first.

    The second number is the time of the block's first read divided by ``pending``.
    """
    weight = nn.Parameter(torch.randn(3, 3))
    times = []
    # The chains begin with products, because products are captured even without gradients.
    with ab.batch(adaptive=False):
        chains = [weight @ weight for _ in range(CHAINS)]
        for _ in range(pending // CHAINS):
            chains = [chain.tanh() for chain in chains]
        value = weight @ weight
        for _ in range(READS + 1):
            value = value.sigmoid()
            start = time.perf_counter()
            read(value)
            times.append(time.perf_counter() - start)
        del chains  # the nodes must not run at the end of the block
    return median(times[1:]) * 1e6, times[0] / pending * 1e9


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--most", type=int, default=1_000_000, help="pending nodes")
    most = parser.parse_args().most
    torch.set_num_threads(1)
    times_of_reads(100, read_number)
    print("| pending | number, µs | no gradient, µs | tensor, µs | first read, ns a node |")
    print("| --: | --: | --: | --: | --: |")
    pending = 100
    while pending <= most:
        number, first = times_of_reads(pending, read_number)
        with torch.no_grad():
            without, _ = times_of_reads(pending, read_number)
        tensor, _ = times_of_reads(pending, read_tensor)
        print(f"| {pending} | {number:.0f} | {without:.0f} | {tensor:.0f} | {first:.0f} |")
        pending *= 10


if __name__ == "__main__":
    main()
