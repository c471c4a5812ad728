"""All ops of PyTorch's operator database, in a block and eagerly.

Uses float32 and two samples per op; `make sweep` checks all dtypes and samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import op_check
import op_sweep
from op_check import Outcome

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    """Checks all ops in separate processes."""
    return op_sweep.sweep(["float32"], samples=2, each=False, jobs=1)


def test_breadth_no_op_is_wrong(outcomes: list[Outcome]) -> None:
    """Values, metadata, aliasing and gradients of every op match eager mode."""
    assert len(outcomes) > 600
    assert op_sweep.wrong(outcomes) == []


def test_breadth_no_op_fell_to_a_worse_class(outcomes: list[Outcome]) -> None:
    """Ops that docs/ops.md lists as batched are batched, with the same version of PyTorch."""
    promised = op_sweep.read_table()
    if not promised and f"PyTorch {op_sweep.VERSION}'s" not in op_sweep.TABLE.read_text():
        pytest.skip(f"docs/ops.md is not about PyTorch {op_sweep.VERSION}")
    assert sum((o.name, o.dtype) in promised for o in outcomes) > 600
    assert op_sweep.fallen(outcomes) == []


class _Op:
    """An entry like those of the database, with one sample, a vector."""

    name = "made_up"
    variant_test_name = ""
    supports_autograd = True
    inplace_variant = None

    def __init__(self, function: Callable[..., Any]) -> None:
        self.op = function

    def supported_backward_dtypes(self, device: str) -> set[torch.dtype]:
        return {torch.float32}

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> list[Any]:
        x = torch.randn(3, dtype=dtype, requires_grad=requires_grad)
        return [op_check.common_methods_invocations.SampleInput(x)]


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "values": lambda x: x.exp() * (2 if op_check.is_pending(x) else 1),
    "dtype": lambda x: x.double() if op_check.is_pending(x) else x * 1,
    "shape": lambda x: x[:2] * 1 if op_check.is_pending(x) else x * 1,
    "strides": lambda x: torch.stack([x, x], dim=1 if op_check.is_pending(x) else 0).reshape(2, 3),
    "requires_grad": lambda x: (x * 1).detach() if op_check.is_pending(x) else x * 1,
    "gradient": lambda x: x.detach() * x if op_check.is_pending(x) else x * x,
    "memory": lambda x: x.clone() if op_check.is_pending(x) else x.view(3),
    "distribution": lambda x: torch.rand(999) / (2 if op_check.is_pending(x) else 1) + 0 * x[0],
}


@pytest.mark.parametrize("what", WRONG)
def test_the_sweep_sees_what_is_wrong(what: str) -> None:
    """A made-up op that gives a different result inside a block is reported."""
    (outcome,) = op_check.check(_Op(WRONG[what]), torch.float32, 1)
    assert outcome.problems


def test_the_sweep_passes_what_is_right() -> None:
    """A made-up op that matches eager mode passes, with the class of its worst part."""
    (outcome,) = op_check.check(_Op(lambda x: x.tanh()[1:].sort().values), torch.float32, 1)
    assert outcome.problems == []
    assert outcome.kind == "functorch"
    (outcome,) = op_check.check(_Op(lambda x: x * x.sum().item()), torch.float32, 1)
    assert outcome.problems == []
    assert outcome.kind == "eager"


def test_a_crash_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that crashes its process is reported, and the next op is checked."""
    worker = op_sweep.Worker(["--dtypes", "float32", "--samples", "1"])
    monkeypatch.setattr(worker, "command", [sys.executable, "-c", "import os; os.abort()"])
    (outcome,) = worker.check(0)
    assert "crashed" in outcome.problems[0]
    worker.command = [sys.executable, op_sweep.__file__, "--worker", *("--samples", "1")]
    assert worker.check(0)[0].samples > 0
    worker.close()
