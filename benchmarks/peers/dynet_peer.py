"""The Python API of DyNet (dyNET38 on PyPI), with autobatching by agenda (1), by depth (2) or
without (0).

DyNet has its own tensors, parameters and autograd. So parameters are copied to DyNet once, and
gradients are copied back after the timing. The kind of autobatching is the same for the whole
process: AUTOBATCH_DYNET=0, 1 or 2 in the environment. The default is 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Step, clock
from benchmarks.workload import Workload

# isort: split
import dynet_config  # must be imported before DyNet, which reads it

KIND = int(os.environ.get("AUTOBATCH_DYNET", "1"))
dynet_config.set(mem="4096", autobatch=KIND, random_seed=1)
import dynet as dy  # noqa: E402

from benchmarks.peers.dynet_models import LOSSES  # noqa: E402


class Parameters:
    """The parameters of a workload in DyNet. Embeddings are lookup parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.collection = dy.ParameterCollection()
        self.made: dict[str, Any] = {}
        self.lookups = {
            f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)
        }
        for name, value in model.named_parameters():
            array = value.detach().numpy()
            if name.endswith("bias_hh"):
                continue  # its sum with the other bias is added below
            if name.endswith("bias_ih"):
                # A cell's two biases are one parameter in DyNet. Otherwise their sum would be a
                # computed value, and DyNet's agenda loses most of the gradient of a computed bias
                # that a batch shares.
                array = array + model.get_parameter(name[:-2] + "hh").detach().numpy()
            if name in self.lookups:
                self.made[name] = self.collection.lookup_parameters_from_numpy(array)
            else:
                self.made[name] = self.collection.parameters_from_numpy(array)

    def clear(self) -> None:
        """Sets the gradients to zero."""
        for parameter in self.made.values():
            parameter.scale_gradient(0)

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns copies of the gradients."""
        found = {name: torch.tensor(p.grad_as_array()) for name, p in self.made.items()}
        both = [name for name in found if name.endswith("bias_ih")]
        return {**found, **{name[:-2] + "hh": found[name] for name in both}}


def variants(workload: Workload) -> dict[str, Callable[..., Step]]:
    """Returns the workload's step if it is implemented here."""
    losses = LOSSES.get(workload.name)
    if losses is None:
        return {}
    parameters = Parameters(workload.model)

    def run(workload: Workload, minibatch: Sequence[Any], backward: bool) -> Step:
        parameters.clear()
        start = clock()
        dy.renew_cg()
        values = losses(workload.model, parameters.made, minibatch)
        total = dy.esum(values)
        built = clock()
        total.forward()
        forward = clock()
        if backward:
            total.backward()
        end = clock()
        stages = {"build": built - start, "forward": forward - built, "backward": end - forward}
        step = Step(end - start, torch.tensor([v.value() for v in values]), {}, stages)
        step.own_gradients = parameters.gradients() if backward else None
        return step

    return {f"dynet (autobatch {KIND})": run}
