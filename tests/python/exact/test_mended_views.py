"""Regression tests of views: programs found by fuzzing that once differed from eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from exactly import Blocks, rand, same, weight
from torch import Tensor, nn


def write_to_no_element(block: Blocks) -> Any:
    """A value that is written to no element still has a gradient, which is zero."""
    w, rows = weight(1, 4), weight(4)
    with block():
        h = F.embedding(torch.zeros(1, dtype=torch.long), w)
        h[:-1].add_(rows[1:2])
        loss = h.square().sum()
    loss.backward()
    return loss, w, rows


def view_that_an_error_makes_real(block: Blocks) -> Any:
    """The view's base becomes real together with the view, so the base gets the gradient."""
    w = weight(4)
    with block():
        held = w[1:3]
        seen = held.reshape(-1)
        with pytest.raises(RuntimeError):
            torch.cat([seen, weight(2, 2)])
    seen.sum().backward(inputs=[held])
    return held, seen, w


def views_of_an_expanded_tensor_that_is_read(block: Blocks) -> Any:
    """The view that is used only after the read also has elements that share memory."""
    w, cell, state = weight(4), nn.GRUCell(4, 4).double(), torch.zeros(4, 4).double()
    with block():
        held = torch.meshgrid(w, w, indexing="ij")[0]
        new = cell(held, state)
        seen = held.view_as(state)
        read = copy.deepcopy(new.detach())
    return held, new, seen, read


def view_of_an_expanded_tensor_that_is_read(block: Blocks) -> Any:
    """The expanded tensor is read through a held view, which has another order of elements."""
    w, matrix = weight(1, 4), rand(2, 3)
    with block():
        held = w.broadcast_to(2, 4).t()
        read = torch.allclose(held.unsqueeze(1), held.unsqueeze(1))
        result = held[1:] @ matrix
    (result * rand(3, 3)).sum().backward(inputs=[held, w])
    return held, read, result, w


def pieces_of_a_leaf_one_with_a_hook(block: Blocks) -> Any:
    """The pieces are results of one node. So a hook of one is called for gradients of others."""
    w, seen = weight(4), []
    with block():
        _, hooked, _, last = w.unbind(0)
        hooked.register_hook(seen.append)
        last.backward()
    return seen, w


def views_of_an_expanded_tensor_over_two_reads(block: Blocks) -> Any:
    """The first read leaves some views pending. The second read divides these views again."""
    w = weight(1, 4)
    with block():
        held = w.broadcast_to(2, 4)
        views = [held.t()[i].unsqueeze(0) for i in range(3)]
        first = (views[0] * 2).tanh()
        hooked = first.sum()
        hooked.register_hook(lambda g: g * 2)
        second = (views[1] * w.t()).exp()
        hooked_too = second.sum()
        hooked_too.register_hook(lambda g: g * 3)
        last = (views[2] + hooked).sum() + hooked_too
    last.backward(inputs=[held, w])
    return held, views, last, w


def data_of_an_inference_tensor(block: Blocks) -> Any:
    """After the assignment it is an ordinary tensor, but it still has no version counter."""
    w, x = weight(4, 4), rand(4)
    with block(), torch.inference_mode():
        scores = F.log_softmax(rand(4, 4), 1)
    scores.data = rand(4, 4)
    with block():
        result = (x @ scores + w).sum()
    result.backward()
    return result, w


def view_without_gradient_of_what_gets_one(block: Blocks) -> Any:
    """The view is made under no_grad, and its base is freed. A write to another view changes it."""
    w, x = weight(4), rand(4)
    with block():
        h = x.cummax(-1)[0] * 2
        with torch.no_grad():
            quiet = h.squeeze()
        other = h.permute(0)
        del h
        other.sub_(w * 3)
    asked = quiet.requires_grad
    other.sum().backward()
    return quiet.detach(), asked, other, w


def piece_of_a_split_whose_whole_was_written(block: Blocks) -> Any:
    """A cell computes gradients only for arguments on which its results' gradients depend."""
    w = weight(4, 4)

    def finite(piece: Tensor, x: Tensor) -> Tensor:
        return torch.where(piece.isnan(), x * 2, x.tanh())

    called = ab.cell(finite) if block.enabled else finite
    with block():
        whole = w * 2
        piece, *_ = whole.split(2, 0)
        whole += 1
        result = called(piece, w[:2] * 1)
    result.sum().backward()
    return result, w


PROGRAMS = [
    write_to_no_element, view_that_an_error_makes_real, views_of_an_expanded_tensor_that_is_read,
    view_of_an_expanded_tensor_that_is_read, pieces_of_a_leaf_one_with_a_hook,
    views_of_an_expanded_tensor_over_two_reads, data_of_an_inference_tensor,
    view_without_gradient_of_what_gets_one, piece_of_a_split_whose_whole_was_written,
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_mended_views(program: Callable[[Blocks], Any]) -> None:
    """The program behaves as in eager mode."""
    same(program)
