"""In-place ops whose checks or gradients differ from the out-of-place variant of the op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import Blocks, differentiate, same, weight
from torch import Tensor

WRONG_FILLS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x.fill_(x),
    "a vector": lambda x: x.fill_(torch.ones(3).double()),
    "one element": lambda x: x.fill_(x[:1]),
}


@pytest.mark.parametrize("value", WRONG_FILLS)
def test_fill_with_more_than_a_number(value: str) -> None:
    """fill_ also accepts a tensor without dimensions."""

    def program(block: Blocks) -> Any:
        with block():
            return WRONG_FILLS[value](weight(3) * 1)

    same(program, raises=RuntimeError)


IN_PLACE: dict[str, tuple[Callable[[Tensor], Any], type[Exception] | None]] = {
    "acosh_": (lambda x: x.acosh_(), NotImplementedError),
    "asinh_": (lambda x: x.asinh_(), NotImplementedError),
    "atanh_": (lambda x: x.atanh_(), NotImplementedError),
    "leaky_relu_": (lambda x: F.leaky_relu_(x, -0.5), RuntimeError),
    "elu_": (lambda x: F.elu_(x, -0.5), RuntimeError),
    "celu_": (lambda x: torch.celu_(x, -0.5), RuntimeError),
    "leaky_relu_, positive": (lambda x: F.leaky_relu_(x, 0.5), None),
    "elu_, positive": (lambda x: F.elu_(x, 0.5), None),
    "celu_, positive": (lambda x: torch.celu_(x, 0.5), None),
    "selu_": (lambda x: torch.selu_(x), None),
}


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place_op_without_its_functional_gradient(op: str) -> None:
    """Some in-place ops have different derivative formulas than their functional forms, or none."""
    function, error = IN_PLACE[op]

    def program(block: Blocks) -> Any:
        w = torch.tensor([1.5, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
        with block():
            results = []
            for i in range(1, 3):
                x = w * i - (0 if error is NotImplementedError else 4)
                function(x)
                results.append(x)
        values = [x.detach().clone() for x in results]
        differentiate(results)
        return values, w

    same(program, raises=error)
