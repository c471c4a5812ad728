"""Trains a Tree-LSTM in several processes, with DistributedDataParallel. Each has its own trees.

    torchrun --nproc-per-node 2 examples/ddp_tree_lstm.py
    torchrun --nproc-per-node 2 examples/ddp_tree_lstm.py --check

Runs on CPUs (gloo), or on GPUs if there is one for each process (nccl). The ranks' minibatches have
different structures and numbers of ops. Nevertheless, a step is one forward and one backward for
DistributedDataParallel. `--check` compares the gradients of the first step with a single process.
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

TOLERANCE = 1e-6  # relative to the largest gradient
MODULES = "argparse ast asyncio.base_events"


class Minibatch(nn.Module):
    """Computes the sum of the losses of several trees in one call.

    The block is inside ``forward``. So DistributedDataParallel wraps one forward for all trees,
    whose results are computed. Its hooks then get the whole gradient of each parameter once.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, trees: Sequence[Example]) -> Tensor:
        with ab.batch():
            return torch.stack([self.model(tree) for tree in trees]).sum()


def to_device(dataset: Dataset, device: torch.device) -> list[Example]:
    moved: dict[int, Tensor] = {}  # by id(): each shared tensor is moved once

    def move(ids: list[Tensor]) -> list[Tensor]:
        return [moved.setdefault(id(x), x.to(device)) for x in ids]

    return [Example(move(e.symbols), e.children, move(e.targets)) for e in dataset.train]


def share(trees: list[Example], step: int, minibatch: int, ranks: int) -> list[list[Example]]:
    """Returns each rank's trees for a step. The ranks' trees and their numbers differ."""
    first = step * minibatch % len(trees)
    taken = (trees + trees)[first : first + minibatch]
    cuts = [minibatch * rank * (rank + 3) // (ranks * (ranks + 3)) for rank in range(ranks)]
    return [taken[a:b] for a, b in zip(cuts, [*cuts[1:], minibatch], strict=True)]


def check(model: nn.Module, shares: list[list[Example]]) -> float:
    """Compares the current gradients with the gradients of a single process.

    Returns the largest difference, relative to the largest gradient. Keeps the current gradients.
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
        # DistributedDataParallel averages gradients over the ranks. So each rank contributes its
        # part of the mean, times the number of ranks.
        loss = wrapped(shares[rank]) * (ranks / options.minibatch)
        optimizer.zero_grad()
        loss.backward()
        if options.check and step == 0:
            difference = check(model, shares)
            sys.stdout.write(  # one write, because the ranks write at the same time
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
