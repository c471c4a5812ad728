"""kornia: losses and warps of images of different sizes."""

from __future__ import annotations

from collections.abc import Callable

import kornia
import torch
from torch import Tensor, nn

from benchmarks.real.case import Case, lengths, model

COUNT = 16


def images(channels: int, unit: int = 4) -> list[Tensor]:
    sizes = zip(lengths(4, 7, COUNT), lengths(5, 7, COUNT), strict=True)
    return [torch.rand(channels, unit * height, unit * width) for height, width in sizes]


def case(network: nn.Module, score: Callable[[Tensor], Tensor], channels: int) -> Case:
    """Makes a case. The package can't batch images of different sizes."""
    return Case(network, images(channels), lambda image: score(image[None]))


@model("denoising, SSIM loss")
def denoising() -> Case:
    network = nn.Conv2d(1, 1, 3, padding=1)

    def score(image: Tensor) -> Tensor:
        blurred = kornia.filters.gaussian_blur2d(image, (5, 5), (1.0, 1.0))
        return kornia.losses.ssim_loss(network(blurred), image, window_size=5)

    return case(network, score, 1)


@model("edges, total variation")
def edges() -> Case:
    network = nn.Conv2d(3, 3, 3, padding=1)

    def score(image: Tensor) -> Tensor:
        gray = kornia.color.rgb_to_grayscale(network(image).sigmoid())
        smooth = kornia.losses.total_variation(gray, reduction="mean").sum()
        return smooth - kornia.filters.sobel(gray).mean()

    return case(network, score, 3)


@model("registration by an affine map")
def registration() -> Case:
    network = nn.Linear(2, 6)

    def score(image: Tensor) -> Tensor:
        statistics = torch.stack([image.mean(), image.std()])
        matrix = torch.eye(2, 3) + 0.1 * network(statistics).view(2, 3)
        warped = kornia.geometry.warp_affine(image, matrix[None], image.shape[-2:])
        return (warped - image.flip(-1)).square().mean()

    return case(network, score, 1)
