"""Row "Contexts", third part: data loaders, optimizers, distributed data parallel."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import DOUBLE, Blocks, differentiate, inputs, rand, same
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


# --- data loaders ---


class Items(Dataset[Tensor]):
    """A dataset of items of different lengths, which are computed on access."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        return (torch.arange(3.0 * (i % 3 + 1)) * (i + 1)).view(-1, 3).double() / 10


class Stream(IterableDataset[Tensor]):
    """The same items as an iterable dataset."""

    def __iter__(self) -> Any:
        return iter([Items()[i] for i in range(6)])


LOADERS: dict[str, Callable[[], Any]] = {
    "items": lambda: DataLoader(Items(), batch_size=None),
    "lists": lambda: DataLoader(Items(), batch_size=2, collate_fn=list),
    "collated": lambda: DataLoader(TensorDataset(torch.ones(6, 3).double()), batch_size=2),
    "shuffled": lambda: DataLoader(Items(), 2, shuffle=True, collate_fn=list),
    "stream": lambda: DataLoader(Stream(), batch_size=2, collate_fn=list),
    "workers": lambda: DataLoader(Items(), 2, num_workers=1, collate_fn=list),
}


def flatten(items: Any) -> list[Tensor]:
    return [items] if isinstance(items, Tensor) else [t for item in items for t in flatten(item)]


@pytest.mark.parametrize("place", ["block_around", "block_inside", "in_the_middle"])
@pytest.mark.parametrize("name", LOADERS)
def test_context_data_loader(name: str, place: str) -> None:
    """Iterates inside and around the block, and forks workers while values are pending."""

    def program(block: Blocks) -> Any:
        model, results = make_model(), []
        if place == "block_inside":
            for items in LOADERS[name]():
                with block():
                    results += [model(x) for x in flatten(items)]
        else:
            with block():
                if place == "in_the_middle":
                    results.append(model(rand(1, 3)))
                for items in LOADERS[name]():
                    results += [model(x) for x in flatten(items)]
        differentiate(results)
        return results, list(model.parameters())

    same(program)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs CUDA")
def test_context_data_loader_pinned_memory() -> None:
    """Copies pinned batches to the device in the block, without waiting."""

    def program(block: Blocks) -> Any:
        model, results = make_model().cuda(), []
        with block():
            for items in DataLoader(Items(), 2, collate_fn=list, pin_memory=True):
                results += [model(x.to("cuda", non_blocking=True)) for x in items]
        differentiate(results)
        return results, list(model.parameters())

    same(program)


# --- optimizers ---

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "sgd_for_loop": lambda p: torch.optim.SGD(p, 0.1, foreach=False),
    "sgd_fused": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    "adam": lambda p: torch.optim.Adam(p, 0.1),
    "adam_fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "adam_for_loop": lambda p: torch.optim.Adam(p, 0.1, foreach=False, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
}


@pytest.mark.parametrize("place", ["outside", "inside", "step_only_inside"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_context_optimizer(name: str, place: str) -> None:
    """Runs three steps, and compares the weights after each step with eager mode."""

    def program(block: Blocks) -> Any:
        model, xs, seen = make_model(), inputs(), []
        optimizer = OPTIMIZERS[name](model.parameters())

        def losses() -> Tensor:
            return torch.stack([model(x).square().sum() for x in xs]).mean()

        for _ in range(3):
            optimizer.zero_grad()
            if place == "inside":
                with block():
                    before = model(xs[0])
                    loss = losses()
                    loss.backward()
                    optimizer.step()
                    seen += [before, loss, losses()]
            else:
                with block():
                    loss = losses()
                loss.backward()
                if place == "step_only_inside":
                    with block():
                        before = model(xs[0])
                        optimizer.step()
                        seen += [before, model(xs[0])]
                else:
                    optimizer.step()
                seen.append(loss)
            seen += [p.detach().clone() for p in model.parameters()]
        return seen

    same(program)


def test_context_optimizer_lbfgs() -> None:
    """The step calls a closure several times, and the closure opens the block."""

    def program(block: Blocks) -> Any:
        model, xs = make_model(), inputs()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            with block():
                loss = torch.stack([model(x).square().sum() for x in xs]).sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(2)]
        return losses, list(model.parameters())

    same(program, tolerance=1e-6)


@pytest.mark.parametrize("inside", [False, True])
def test_context_optimizer_with_its_company(inside: bool) -> None:
    """Tests clipping, schedulers, accumulation over two blocks, averaged models, state_dict."""

    def program(block: Blocks) -> Any:
        model, xs, norms = make_model(), inputs(), []
        average = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)

        def finish() -> None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            nn.utils.clip_grad_value_(model.parameters(), 0.2)
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            optimizer.zero_grad()

        for _ in range(3):
            for half in (xs[:2], xs[2:]):
                with block() as scope:
                    loss = torch.stack([model(x).square().sum() for x in half]).sum()
                    if inside:
                        loss.backward()
                        if half is not xs[:2]:
                            finish()
                if not inside:
                    loss.backward()
                del scope
            if not inside:
                finish()
        state = copy.deepcopy(optimizer.state_dict())["state"]
        return norms, list(model.parameters()), list(average.parameters()), state

    same(program)


def test_context_optimizer_in_backward() -> None:
    """A post-accumulate hook of each parameter runs a step and frees the gradient."""

    def program(block: Blocks) -> Any:
        model, xs, steps = make_model(), inputs(), []
        optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

        def hook(p: Tensor) -> None:
            steps.append(tuple(p.shape))
            optimizers[p].step()
            optimizers[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        results = []
        for _ in range(2):
            with block():
                loss = torch.stack([model(x).square().sum() for x in xs]).sum()
            loss.backward()
            results.append(loss)
        return results, list(model.parameters()), sorted(steps)

    same(program)


def test_context_grad_scaler() -> None:
    """Tests GradScaler around a block under autocast."""

    def program(block: Blocks) -> Any:
        model = make_model().float()
        xs = [rand(2, 3, dtype=torch.float32) for _ in range(3)]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        losses = []
        for _ in range(2):
            with block(), torch.autocast("cpu", torch.bfloat16):
                loss = torch.stack([model(x).float().square().sum() for x in xs]).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss)
        return losses, list(model.parameters()), scaler.get_scale()

    same(program, tolerance=3e-2)


# --- distributed data parallel: this file is also the program of each process ---


def replica(rank: int, enabled: bool, place: str) -> list[Tensor]:
    """Runs two steps of one process. Returns its losses, gradients and weights."""
    from torch.nn.parallel import DistributedDataParallel

    blocks = Blocks(enabled)
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1 + rank)
    seen: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        x = rand(2, 3)
        if place == "forward_inside":
            with blocks():
                loss = model(x).square().sum()
            loss.backward()
        elif place == "backward_inside":
            with blocks():
                pending = model.module(rand(1, 3))
                loss = model(x).square().sum() + pending.sum() * 0
                loss.backward()
        elif place == "wrapped_outside":
            with blocks():
                hidden = [F.linear(r, torch.eye(3, dtype=DOUBLE)) * 1 for r in x[:, None]]
                joined = torch.cat(hidden)
            loss = model(joined).square().sum()
            loss.backward()
        elif place == "no_sync":
            with model.no_sync() if step == 1 else contextlib.nullcontext(), blocks():
                loss = model(x).square().sum()
                loss.backward()
        seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return seen + [p.detach().clone() for p in model.parameters()]


PLACES = ["forward_inside", "backward_inside", "wrapped_outside", "no_sync"]


def run_replica(rank: int, port: int) -> None:
    """One of two processes. Results of blocks at every place must match eager mode."""
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for place in PLACES:
        expected = replica(rank, False, place)
        result = replica(rank, True, place)
        for value, other in zip(result, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-9, atol=1e-9)
        print(place, "agrees", flush=True)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def replicas() -> list[str]:
    """Runs two processes, and returns their output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__]
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    texts = []
    for process in processes:
        try:
            texts.append(process.communicate(timeout=60)[0])
        except subprocess.TimeoutExpired:
            process.kill()
            texts.append(process.communicate()[0] + "\ntimed out")
    return texts


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)
@pytest.mark.parametrize("place", PLACES)
def test_context_distributed_data_parallel(place: str, replicas: list[str]) -> None:
    """Two gloo processes run forward, backward and all-reduce inside and outside the block."""
    for text in replicas:
        assert f"{place} agrees" in text, text[-1500:]


if __name__ == "__main__":
    run_replica(int(sys.argv[1]), int(sys.argv[2]))
