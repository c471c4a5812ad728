"""All modules of PyTorch's module database with their samples, in a block and eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from exactly import Blocks, differentiate, same
from torch import Tensor
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils._pytree import tree_map_only

INSTANCES = 3
MOST = 10  # samples per module; some modules have hundreds


def programs(info: ModuleInfo, training: bool) -> Iterator[Any]:
    """Yields a program per sample. It applies a module to instances with different values."""
    torch.manual_seed(0)
    samples = list(
        info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
        )
    )
    for sample in samples[:: -(-len(samples) // MOST)]:
        made = sample.constructor_input
        given = (sample.forward_input.args, sample.forward_input.kwargs)

        def program(block: Blocks, made: Any = made, given: Any = given) -> Any:
            module = info.module_cls(*made.args, **made.kwargs).double().train(training)
            inputs = [
                tree_map_only(Tensor, lambda t, k=k: copied(t, k), given) for k in range(INSTANCES)
            ]
            with block():
                results = []
                for each in inputs:
                    args, kwargs = tree_map_only(Tensor, pending, each)
                    results.append(module(*args, **kwargs))
            differentiate(results)
            return results, inputs, module.state_dict(keep_vars=True)

        yield program


def copied(t: Tensor, k: int) -> Tensor:
    """Returns the value of another instance, from the same domain."""
    if not t.is_floating_point():
        return t.clone()
    return (t.detach() * (1 - 0.1 * k)).requires_grad_(t.requires_grad)


def pending(t: Tensor) -> Tensor:
    return t * 1 if t.requires_grad else t


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_module(info: ModuleInfo, training: bool) -> None:
    for program in programs(info, training):
        same(program)
