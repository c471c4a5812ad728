"""Defines a case: one model of a package, its examples, and the package's own batching."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor, nn

from benchmarks.workload import Workload

EXAMPLES = 32
SINGLE = 1e-5  # what to allow where a package does part of its work in single precision


@dataclass
class Case(Workload):
    """One model, as a user of its package writes it for one example."""

    model: nn.Module
    examples: Sequence[Any]
    one: Callable[[Any], Tensor]  # the loss of an example, or what else is asked of it
    # The same of all examples, stacked, as the package batches them; collation is part of it.
    own: Callable[[Sequence[Any]], Tensor] | None = None
    trains: bool = True  # False: there is nothing to differentiate
    infers: bool = True  # False: the package needs grad mode
    # In double precision; SINGLE where the package does not keep it.
    tolerance: float = 1e-9
    # Of the package's own batching, where it isn't the same computation (a step size for all).
    own_tolerance: float = 0.0

    # Which of its modules `ab.cell(module, dynamic=True)` is for: what takes tensors, and leaves
    # reading and objects that hold tensors to others. They are cells in one variant alone.
    cells: Sequence[nn.Module] = ()

    # A map is measured as well as the block, whether the model reads values or not.
    reads = True

    def loss(self, example: Any) -> Tensor:
        return self.one(example)

    def collate(self, minibatch: Sequence[Any]) -> Any:
        return minibatch

    def hand(self, plan: Any) -> Tensor:
        assert self.own is not None
        return self.own(plan)


Maker = Callable[[], Case]
_makers: dict[str, dict[str, Maker]] = {}  # by module


def model(name: str) -> Callable[[Maker], Maker]:
    """Registers a function that makes a case, as a model of the file's package."""

    def register(make: Maker) -> Maker:
        _makers.setdefault(make.__module__, {})[name] = make
        return make

    return register


def makers_of(module: str) -> dict[str, Maker]:
    return _makers[module]


@contextlib.contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Sets the default dtype, which packages use for their tensors."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def build(make: Maker, dtype: torch.dtype) -> Case:
    """Makes the case with its usual seed, in a dtype."""
    with precision(dtype):
        torch.manual_seed(0)
        case = make()
    for module in case.cells:
        ab.cell(module, dynamic=True)
    return case


def lengths(smallest: int, largest: int, count: int = EXAMPLES) -> list[int]:
    """Returns sizes of examples: all sizes of the range, in random order."""
    span = largest - smallest + 1
    return [smallest + (7 * i + 3 * (i // span)) % span for i in range(count)]


def padded(rows: Sequence[Tensor], value: float = 0.0) -> tuple[Tensor, Tensor]:
    """Pads examples of different lengths to one tensor. Returns also the mask of real elements."""
    tensor = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
    sizes = torch.tensor([len(row) for row in rows])
    return tensor, torch.arange(tensor.size(1)) < sizes[:, None]
