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
SINGLE = 1e-5  # tolerance for packages that partly compute in single precision


@dataclass
class Case(Workload):
    """One model, as a user of its package writes it for one example."""

    model: nn.Module
    examples: Sequence[Any]
    one: Callable[[Any], Tensor]  # returns the loss of an example, or another result
    # Returns the stacked results of all examples, batched by the package. Includes collation.
    own: Callable[[Sequence[Any]], Tensor] | None = None
    trains: bool = True  # False: the result can't be differentiated
    infers: bool = True  # False: the package needs grad mode
    # Tolerance in double precision, or SINGLE if the package computes in single precision.
    tolerance: float = 1e-9
    # Tolerance for the package's own batching, if its computation differs (one step size for all).
    own_tolerance: float = 0.0

    # The modules that become cells (`ab.cell(module, dynamic=True)`), in one variant only. They
    # take tensors, and neither read values nor use objects that hold tensors.
    cells: Sequence[nn.Module] = ()

    # Both a map and a block are measured, whether the model reads values or not.
    reads = True

    def loss(self, example: Any) -> Tensor:
        return self.one(example)

    def collate(self, minibatch: Sequence[Any]) -> Any:
        return minibatch

    def hand(self, plan: Any) -> Tensor:
        assert self.own is not None
        return self.own(plan)


Maker = Callable[[], Case]
_makers: dict[str, dict[str, Maker]] = {}  # makers of models, by module


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
    """Returns the sizes of examples: all sizes of the range, in random order."""
    span = largest - smallest + 1
    return [smallest + (7 * i + 3 * (i // span)) % span for i in range(count)]


def padded(rows: Sequence[Tensor], value: float = 0.0) -> tuple[Tensor, Tensor]:
    """Pads examples of different lengths to one tensor. Also returns the mask of real elements."""
    tensor = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
    sizes = torch.tensor([len(row) for row in rows])
    return tensor, torch.arange(tensor.size(1)) < sizes[:, None]
