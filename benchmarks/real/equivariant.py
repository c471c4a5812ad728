"""e3nn: tensor products of irreducible representations, compared with one merged graph."""

from __future__ import annotations

from collections.abc import Sequence

import e3nn
import torch
from torch import Tensor

e3nn.set_optimization_defaults(jit_script_fx=False)

from e3nn import o3  # noqa: E402
from e3nn.nn.models.v2106.gate_points_networks import SimpleNetwork  # noqa: E402

from benchmarks.real.case import Case, lengths, model  # noqa: E402


@model("spherical harmonics, tensor product")
def product() -> Case:
    features = o3.Irreps("4x0e + 4x1o")
    layer = o3.FullyConnectedTensorProduct(features, "1x0e + 1x1o + 1x2e", "6x0e + 2x1o")
    weights = torch.nn.Linear(12, features.dim)
    network = torch.nn.ModuleList([layer, weights])

    def score(points: Tensor, places: Tensor) -> Tensor:
        harmonics = o3.spherical_harmonics([0, 1, 2], places, True, normalization="component")
        return layer(weights(points), harmonics).square().mean(-1)

    def one(example: Tensor) -> Tensor:
        return score(*example).sum()

    def own(minibatch: Sequence[Tensor]) -> Tensor:
        points, places = (torch.cat(part) for part in zip(*minibatch, strict=True))
        sizes = [len(points) for points, _ in minibatch]
        return torch.stack([part.sum() for part in score(points, places).split(sizes)])

    examples = [(torch.randn(n, 12), torch.randn(n, 3)) for n in lengths(4, 19)]
    return Case(network, examples, one, own)


@model("message passing")
def messages() -> Case:
    network = SimpleNetwork(
        "2x0e", "1x0e", max_radius=2.0, num_neighbors=3.0, num_nodes=8.0, mul=4, layers=1, lmax=1
    )

    def one(example: tuple[Tensor, Tensor]) -> Tensor:
        places, features = example
        return network({"pos": places, "x": features})[0, 0]

    def own(minibatch: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        sizes = torch.tensor([len(places) for places, _ in minibatch])
        places, features = (torch.cat(part) for part in zip(*minibatch, strict=True))
        batch = torch.arange(len(minibatch)).repeat_interleave(sizes)
        return network({"pos": places, "x": features, "batch": batch})[:, 0]

    examples = [(torch.randn(n, 3), torch.randn(n, 2)) for n in lengths(5, 12, 16)]
    return Case(network, examples, one, own)
