"""A TorchDispatchMode of the program sees the program's ops, but no ops of the library."""

from __future__ import annotations

from typing import Any

import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(op))
        return op(*args, **(kwargs or {}))


def test_what_is_pending_is_computed_unseen() -> None:
    linear = nn.Linear(4, 4)

    def seen(x: Tensor) -> list[str]:
        y = linear(x)
        with Log() as log:
            z = linear(x).tanh() + y
        z.sum()
        return log.ops

    examples = [torch.randn(2 + i * 3 % 5, 4) for i in range(8)]
    expected = [seen(x) for x in examples]
    for adaptive in (False, True):
        with ab.batch(adaptive=adaptive) as scope:
            assert [seen(x) for x in examples] == expected
        assert scope.report().flushes


def test_reads_under_a_mode() -> None:
    linear = nn.Linear(4, 4)
    examples = [torch.randn(2 + i, 4) for i in range(4)]
    with ab.batch(adaptive=False):
        pending = [linear(x) for x in examples]
        held = [y.data for y in pending]
        with Log() as log:
            values = [y.sum().item() for y in held]
    assert set(log.ops) <= {"aten.sum.default", "aten._local_scalar_dense.default"}
    torch.testing.assert_close(values, [linear(x).sum().item() for x in examples])
