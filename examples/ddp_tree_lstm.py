"""A Tree-LSTM on several processes, each with trees of its own: DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/ddp_tree_lstm.py
    torchrun --nproc-per-node 2 examples/ddp_tree_lstm.py --check

On CPUs (gloo), or on as many GPUs as there are processes (nccl). Every rank's minibatch has other
structures and another number of ops; what DistributedDataParallel sees is one forward and one
backward a step. `--check` compares the gradients of the first step with those of one process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch_autobatch as ab
from child_sum_tree_lstm import ChildSumTreeLSTM
from data import Dataset, Example, read_functions, split_and_encode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

TOLERANCE = 1e-6  # of the largest gradient
MODULES = "argparse ast asyncio.base_events"


class Minibatch(nn.Module):
    """The sum of the losses of some trees, as one call.

    The block is inside it, so that DistributedDataParallel wraps one forward with real results, not
    one for each tree, and its hooks see each parameter's whole gradient once.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, trees: Sequence[Example]) -> Tensor:
        with ab.batch():
            return torch.stack([self.model(tree) for tree in trees]).sum()


def to_device(dataset: Dataset, device: torch.device) -> list[Example]:
    moved: dict[int, Tensor] = {}  # an id is one object, here and there

    def move(ids: list[Tensor]) -> list[Tensor]:
        return [moved.setdefault(id(x), x.to(device)) for x in ids]

    return [Example(move(e.symbols), e.children, move(e.targets)) for e in dataset.train]


def share(trees: list[Example], step: int, minibatch: int, ranks: int) -> list[list[Example]]:
    """A step's trees, for each rank. The shares differ in their trees and in their sizes."""
    first = step * minibatch % len(trees)
    taken = (trees + trees)[first : first + minibatch]
    cuts = [minibatch * rank * (rank + 3) // (ranks * (ranks + 3)) for rank in range(ranks)]
    return [taken[a:b] for a, b in zip(cuts, [*cuts[1:], minibatch], strict=True)]


def check(model: nn.Module, shares: list[list[Example]]) -> float:
    """The largest difference between the gradients there are and those of one process, relative to
    the largest gradient.
    """
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    alone = Minibatch(model)
    model.zero_grad()
    (alone([tree for trees in shares for tree in trees]) / sum(map(len, shares))).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    largest = max(g.abs().max().item() for g in expected)
    differences = [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]
    for parameter, gradient in zip(model.parameters(), found, strict=True):
        parameter.grad = gradient
    return max(differences) / largest


def train(options: argparse.Namespace, device: torch.device) -> bool:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = split_and_encode(read_functions(modules=MODULES), seed=0, min_count=2)
    trees = to_device(dataset, device)
    model = ChildSumTreeLSTM(dataset.vocabulary, dataset.classes, hidden=options.hidden)
    model.to(device=device, dtype=torch.float64 if options.check else torch.float32)
    ids = [device.index] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(Minibatch(model), device_ids=ids, bucket_cap_mb=0.1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        shares = share(trees, step, options.minibatch, ranks)
        # Gradients are averaged over the ranks, so that each gives its part of the mean's times
        # their number.
        loss = wrapped(shares[rank]) * (ranks / options.minibatch)
        optimizer.zero_grad()
        loss.backward()
        if options.check and step == 0:
            difference = check(model, shares)
            sys.stdout.write(  # in one piece: the ranks write at the same time
                f"rank {rank}: {len(shares[rank])} of {options.minibatch} trees, gradients differ "
                f"from those of one process by {difference:.1e} of the largest\n"
            )
            sys.stdout.flush()
            if not difference < TOLERANCE:
                return False
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % max(1, options.steps // 5) == 0:
            print(f"step {step + 1}: loss {mean.item() / ranks:.3f}", flush=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--minibatch", type=int, default=32, help="trees a step, of all ranks")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--check", action="store_true", help="compare gradients with one process")
    options = parser.parse_args(arguments)
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        return 0 if train(options, device) else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
