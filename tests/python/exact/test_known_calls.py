"""Cached calls: the lookup distinguishes the weights of the calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exactly import Blocks, inputs, rand, same, weight
from torch import nn


def frozen_halves(block: Blocks) -> Any:
    """Two weights of one shape, each a new tensor object in every instance."""
    w, layer = rand(6, 3), nn.Linear(3, 3).double()
    with block():
        results = []
        for x in inputs():
            h = layer(x)
            results += [F.linear(h, w[:3]), F.linear(h, w[3:]), h @ w[:3].t(), h @ w[3:].t()]
    return results


def frozen_projections(block: Blocks) -> Any:
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double().requires_grad_(False)
    layer = nn.Linear(4, 4).double()
    with block():
        results = []
        for rows in (3, 4, 5):
            q = layer(rand(1, rows, 4))
            results.append(attention(q, q * 2, q * 3)[0])
    return results


def one_matrix_in_two_shapes(block: Blocks) -> Any:
    """A later block multiplies by its own matrix, and not by the matrix of an earlier block."""
    w, x, y, z = weight(2, 2), rand(2, 4), rand(2, 4) + 1, rand(2, 4) + 2
    with block():
        first = [w @ x, w @ x.view(2, 4), w @ x[:2], w @ x.detach()]
    with block():
        second = [w @ y, w @ z]
    return first, second


@pytest.mark.parametrize("program", [frozen_halves, frozen_projections, one_matrix_in_two_shapes])
def test_known_calls_know_their_weights(program: Any) -> None:
    same(program)


def test_column_major_values_written_twice() -> None:
    """A captured write does not change values that were read before, so a batch can run again."""

    def program(block: Blocks) -> Any:
        b, xs = weight(4), [rand(3, 4).requires_grad_() for _ in range(3)]
        with block():
            results = []
            for x in xs:
                y = x.t().clone(memory_format=torch.contiguous_format).t() * 1.5
                y += b
                y.mul_(2)
                results.append(y)
        results[0].sum().backward()
        results[2].square().sum().backward()
        return results, b, xs

    same(program)
