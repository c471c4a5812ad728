"""escnn: steerable convolutions on images of different sizes."""

from __future__ import annotations

import torch
from escnn import gspaces
from escnn import nn as enn
from torch import Tensor, nn

from benchmarks.real.case import Case, lengths, model


class Network(nn.Module):
    """Two convolutions that rotations by 90 degrees commute with, and a pooling."""

    def __init__(self) -> None:
        super().__init__()
        space = gspaces.rot2dOnR2(4)
        self.image = enn.FieldType(space, [space.trivial_repr])
        hidden = enn.FieldType(space, 3 * [space.regular_repr])
        self.layers = enn.SequentialModule(
            enn.R2Conv(self.image, hidden, kernel_size=3, padding=1),
            enn.ReLU(hidden),
            enn.R2Conv(hidden, hidden, kernel_size=3, padding=1),
            enn.ReLU(hidden),
            enn.GroupPooling(hidden),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(enn.GeometricTensor(image, self.image)).tensor.mean((2, 3))


@model("rotations by 90 degrees")
def rotations() -> Case:
    network = Network()
    sizes = zip(lengths(9, 16, 16), lengths(9, 14, 16), strict=True)
    examples = [torch.randn(1, height, width) for height, width in sizes]
    return Case(network, examples, lambda image: network(image[None]).square().sum())
