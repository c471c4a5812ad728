"""Blocks, maps and cells on the simulated device: results of the CPU, without synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from bilstm_tagger import BiLSTMTagger
from binary_tree_lstm import BinaryTreeLSTM
from child_sum_tree_lstm import ChildSumTreeLSTM
from conftest import Synthetic
from torch import Tensor, nn

from tests.device import sim
from tests.device.move import moved

SIZES = Synthetic.vocabulary, Synthetic.classes, 5, 7


class Experts(nn.Module):
    """The example selects an expert, so that batches have different weights."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, example: tuple[int, Tensor]) -> Tensor:
        expert, x = example
        return self.experts[expert](x).relu().softmax(-1).log().mean(0)[0]


class Ragged(nn.Module):
    """Segments of any length: sums, maxima, softmax, rearranged rows, attention and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(9, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, example: tuple[Tensor, Tensor]) -> Tensor:
        words, label = example
        states = self.layer(self.word(words)[None])[0]
        scores = self.out(torch.cat([states.max(0).values, states.mean(0)]).view(2, 8).sum(0))
        weights = states.sum(1).softmax(0)
        loss = nn.functional.cross_entropy(scores[None], label)
        return loss + (weights[:, None] * states.roll(1, 0) * states.flip(0)).sum()


def ragged() -> tuple[nn.Module, list[Any]]:
    lengths = (1, 4, 2, 7, 2, 3)
    return Ragged(), [(torch.randint(9, (n,)), torch.tensor([n % 3])) for n in lengths]


class Graphs(nn.Module):
    """A product with the example's sparse matrix, normalizations, and a triangle of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.stored = nn.BatchNorm1d(6).eval()
        self.groups = nn.GroupNorm(2, 6)

    def forward(self, example: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        indices, values, x = example
        h = self.layer(x).tanh()
        h = self.stored(torch.ops.autobatch.sparse_product(indices, values, h, len(x)))
        images = self.groups(self.stored(h.t().contiguous()[None]))[0]
        return (images.t() @ images).tril().sum() + self.groups(h).tanh().sum()


def graphs() -> tuple[nn.Module, list[Any]]:
    with ab.batch():  # the first block registers the library's ops
        pass
    instances = []
    for n in (3, 5, 2, 5, 4):
        ends = torch.arange(2 * n)
        indices = torch.stack([ends % n, ends * ends % n])
        instances.append((indices, torch.randn(2 * n).double(), torch.randn(n, 6).double()))
    return Graphs(), instances


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {
    "child_sum": lambda: (ChildSumTreeLSTM(*SIZES), Synthetic().syntax_trees(9)),
    "binary": lambda: (BinaryTreeLSTM(*SIZES), Synthetic().binary_trees(7)),
    "bilstm": lambda: (BiLSTMTagger(*SIZES, tagger_hidden=6), Synthetic().sentences(6)),
    "experts": lambda: (Experts(), [(k % 4, torch.randn(k % 3 + 1, 6).double()) for k in range(9)]),
    "ragged": ragged,
    "graphs": graphs,
}


def in_block(model: nn.Module, instances: Sequence[Any]) -> list[Tensor]:
    with ab.batch():
        return [model(instance) for instance in instances]


def in_map(model: nn.Module, instances: Sequence[Any]) -> list[Tensor]:
    with ab.batch():
        return list(ab.map(model, instances))


def as_dynamic_cell(model: nn.Module, instances: Sequence[Any]) -> list[Tensor]:
    return in_block(ab.cell(model, dynamic=True), instances)


Run = Callable[[nn.Module, Sequence[Any]], list[Tensor]]


def one_by_one(model: nn.Module, instances: Sequence[Any]) -> list[Tensor]:
    return [model(instance) for instance in instances]


def step(run: Run, model: nn.Module, data: list[Any]) -> list[Tensor]:
    """Returns the losses and the gradients of the parameters."""
    model.zero_grad()
    losses = torch.stack(run(model, data))
    losses.sum().backward()
    return [losses.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def launches_of(run: Run, model: nn.Module, data: list[Any]) -> tuple[int, list[Tensor]]:
    """Returns the launches and results of a second step, which must not synchronize."""
    step(run, model, data)
    with sim.counting() as counts, sim.no_synchronisation():
        found = step(run, model, data)
    return counts["launches"], [t.cpu() for t in found]


@pytest.mark.parametrize("kernels", ["region kernels", "ATen"])
@pytest.mark.parametrize("run", [in_block, in_map, as_dynamic_cell])
@pytest.mark.parametrize("name", MODELS)
def test_nobody_waits_and_the_answers_are_the_cpus(name: str, run: Run, kernels: str) -> None:
    torch.manual_seed(0)
    model, data = MODELS[name]()
    model.double()
    expected = step(one_by_one, model, data)
    model, data = moved((model, data))
    most, on_device = launches_of(one_by_one, model, data)
    torch.testing.assert_close(on_device, expected)
    with sim.region_kernels(kernels == "region kernels"):
        launches, found = launches_of(run, model, data)
    torch.testing.assert_close(found, expected)
    assert launches < most


@pytest.mark.parametrize("computed", [True, False])
@pytest.mark.parametrize("function", [nn.functional.linear, torch.matmul, torch.add])
def test_operands_on_two_devices_are_eagers_error(function: Any, computed: bool) -> None:
    """The error is raised at the op's line, not at the flush."""
    weight = torch.randn(4, 4, device="sim").requires_grad_()
    with ab.batch():
        x = torch.randn(1, 4, device="sim").to("cpu") if computed else torch.randn(1, 4) * 1
        with pytest.raises(RuntimeError, match="same device"):
            function(x, weight)


def gates(linear: nn.Module, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, o, u = linear(x + h).chunk(4, 1)
    c = i.sigmoid() * u.tanh() + f.sigmoid() * c
    return o.sigmoid() * c.tanh(), c


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_elementwise_ops_of_a_cell_are_one_launch(dtype: torch.dtype, kernel: bool) -> None:
    """In forward and backward, with CUDA's kernel. Without the kernel, each op is a launch."""
    width = 8 if kernel else 12  # different widths, because the choice of kernels is cached
    linear = nn.Linear(width, 4 * width).to("sim", dtype)
    xs = torch.randn(12, 1, width).to("sim", dtype).requires_grad_()
    cell = ab.cell(lambda x, h, c: gates(linear, x, h, c))

    def program(batched: bool) -> list[Tensor]:
        with ab.batch(enabled=batched, adaptive=False):
            losses = []
            for steps in ((0, 1, 2), (3, 4), (5, 6, 7), (8, 9), (10, 11)):
                h, c = torch.zeros(2, 1, width, dtype=dtype, device="sim")
                for step in steps:
                    h, c = cell(xs[step], h, c)
                losses.append((h * c).sum())
            stacked = torch.stack(losses)
        return [stacked, *torch.autograd.grad(stacked.sum(), [xs])]

    with sim.elementwise_kernel(kernel):
        program(True)
        sim.clear_counts()
        found = program(True)
        counts = sim.counts_by_op()
    passes = counts.get("launches autobatch::elementwise", 0)
    singly = counts.get("launches aten::sigmoid", 0) + counts.get("launches aten::tanh", 0)
    # The first step is captured op by op, because its states need no gradient.
    assert (passes, singly) == ((9, 3) if kernel else (0, 18)), counts
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 3e-2
    for a, b in zip(found, program(False), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=tolerance, atol=tolerance)


def test_results_that_are_held_and_read_take_no_launches_of_their_own() -> None:
    """A few calls copy all losses and pass all gradients through them."""
    linear = nn.Linear(4, 1).to("sim")

    def step(count: int) -> tuple[int, int]:
        xs = torch.randn(count, 4).to("sim")
        sim.clear_counts()
        with ab.batch(adaptive=False):
            losses = [linear(x).sum() for x in xs]
            total = torch.stack(losses).sum()
        forward = sim.counts()["launches"]
        sim.clear_counts()
        total.backward()
        backward = sim.counts()["launches"]
        for x, loss in zip(xs, losses, strict=True):
            torch.testing.assert_close(loss.cpu(), linear(x).sum().cpu())
        return forward, backward

    step(4)
    few, many = step(4), step(40)
    assert many[0] <= few[0] + 2, (few, many)
    assert many[1] <= few[1] + 2, (few, many)


def test_held_results_of_several_dtypes_that_are_reached_in_part() -> None:
    """A result that no gradient reaches has no gradient. Hooks of other results get gradients."""
    w, v = torch.randn(3).to("sim").requires_grad_(), torch.randn(3).double().to("sim")
    v.requires_grad_()
    seen: list[Tensor] = []

    def program(batched: bool) -> list[Tensor | None]:
        seen.clear()
        with ab.batch(enabled=batched, adaptive=False):
            held = [(w * k).sum() for k in range(1, 5)] + [(v * k).sum() for k in range(1, 5)]
            held[1].register_hook(seen.append)
            held[2].register_hook(seen.append)
            some = held[0] * 2 + held[1] * held[1] + held[4].float() * held[5].float()
        first = torch.autograd.grad(some, [w, v, *held], allow_unused=True, retain_graph=True)
        return [*first, *torch.autograd.grad(some, [w, held[1]]), *seen]

    expected, found = program(False), program(True)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype
            torch.testing.assert_close(a.cpu(), b.cpu())
