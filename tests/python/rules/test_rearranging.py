"""Padding, windows, pixel shuffles and upsampling of instances of different sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_ragged import WIDTH, Case, check_lengths
from helpers_rules import check_strides, rand
from torch import Tensor

W = WIDTH


def image(n: int) -> Tensor:
    return rand(1, W, n + 2, 6)


CASES: dict[str, Case] = {
    # Constant padding of either sign, of any layout, and on either side to one length.
    "shift": Case(lambda x: F.pad(x.tanh(), (0, 0, 1, -1)), empty=False),
    "shift_back": Case(lambda x: F.pad(x.tanh(), (0, 0, -1, 1), value=2.0), empty=False),
    "crop": Case(lambda x: F.pad(x.tanh(), (-1, -2))),
    "crop_and_pad": Case(lambda x: F.pad(x.tanh(), (-1, 2, 1, 0)), lambda n: rand(2, n, W)),
    "pad_left_to_length": Case(lambda x: F.pad(x.tanh(), (0, 0, 12 - len(x), 0))),
    "causal": Case(
        lambda x: F.pad(x.tanh().transpose(1, 2), (2, 0)), lambda n: rand(1, n, W), empty=False
    ),
    "pad_expanded": Case(lambda x: F.pad(x.sum(1).unsqueeze(1).expand(-1, 3), (1, 1))),
    # Padding with elements of the tensor.
    "reflect": Case(
        lambda x: F.pad(x.tanh(), (2, 1), mode="reflect"), lambda n: rand(1, W, n + 2), empty=False
    ),
    "replicate": Case(
        lambda x: F.pad(x.tanh().transpose(1, 2), (0, 3), mode="replicate"),
        lambda n: rand(1, n + 1, W),
        empty=False,
    ),
    "circular": Case(
        lambda x: F.pad(x.tanh(), (1, 1, 2, 0), mode="circular"), image, empty=False
    ),
    "roll": Case(lambda x: x.tanh().roll(2, 0), lambda n: rand(n + 2, W), empty=False),
    "windows": Case(
        lambda x: F.unfold(x.tanh(), (3, 2), padding=1, stride=2), image, empty=False
    ),
    "windows_of_transposed": Case(
        lambda x: F.unfold(x.tanh().transpose(1, 2).unsqueeze(2), (1, 3), padding=(0, 1)),
        lambda n: rand(1, n + 1, W),
        empty=False,
    ),
    "pixel_shuffle": Case(lambda x: F.pixel_shuffle(x.tanh(), 2), image, empty=False),
    "pixel_unshuffle": Case(
        lambda x: F.pixel_unshuffle(x.tanh(), 2), lambda n: rand(1, 3, 2 * n + 2, 6), empty=False
    ),
    "upsample": Case(
        lambda x: F.interpolate(x.tanh(), scale_factor=2), lambda n: rand(1, W, n + 1), empty=False
    ),
    "upsample_image": Case(
        lambda x: F.interpolate(x.tanh(), scale_factor=(2, 3)), image, empty=False
    ),
    "upsample_to_size": Case(
        lambda x: F.interpolate(x.tanh(), size=3 * x.size(2)),
        lambda n: rand(1, W, n + 1),
        empty=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sizes_do_not_add_batches(name: str) -> None:
    check_lengths(CASES[name])


PADDINGS = [(1, 0), (0, 2), (-1, 1), (2, -1), (-1, -1), (0, 0), (1, 1, -1, 0), (0, 1, 0, 0, -1, 2)]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row_major": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "gaps": lambda x: x[..., ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1),
}


OF_ELEMENTS = [(1, 0, 0, 0), (0, 2, 0, 0), (1, 1, 2, 0), (0, 0, 0, 0)]
CALLS = [("constant", padding) for padding in PADDINGS] + [
    (mode, padding) for mode in ("reflect", "replicate", "circular") for padding in OF_ELEMENTS
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("mode", "padding"), CALLS)
def test_padding_is_eagers(mode: str, padding: tuple[int, ...], layout: str) -> None:

    def one(x: Tensor) -> Tensor:
        return F.pad(LAYOUTS[layout](x * 2), padding, mode=mode)

    check_strides(one, [rand(2, 3, n, 5).requires_grad_() for n in (4, 5, 4)])


def test_factors_that_float_arithmetic_does_not_hit() -> None:
    """Eager computes positions in single precision, so some factors do not repeat evenly."""
    for factor in range(1, 64):
        instances = [rand(1, 1, n).requires_grad_() for n in (3, 7)]
        with ab.batch(adaptive=False):
            found = [F.interpolate(x * 2, scale_factor=factor) for x in instances]
        for result, x in zip(found, instances, strict=True):
            torch.testing.assert_close(result, F.interpolate(x * 2, scale_factor=factor))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.pad(x, (-3, -3)),
        lambda x: F.pad(x, (1,)),
        lambda x: F.pad(x, (5, 0), mode="reflect"),
        lambda x: F.pad(x, (5, 0), mode="circular"),
        lambda x: F.pixel_shuffle(x[None], 2),
        lambda x: F.unfold(x[None, None], (9, 1)),
        lambda x: F.interpolate(x[None], size=0),
        lambda x: x.roll(1, 5),
    ],
)
def test_errors_are_eagers(call: Callable[[Tensor], Tensor]) -> None:
    x = rand(3, W).requires_grad_()
    with pytest.raises((RuntimeError, IndexError, ValueError)) as expected:
        call(x * 2)
    with pytest.raises(type(expected.value)) as found, ab.batch(adaptive=False):
        call(x * 2)
    assert str(found.value).startswith(str(expected.value).split("\n")[0][:40])
