"""Code that the tests of mutation share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Write = Callable[[Tensor, Tensor], Any]  # arguments: a target, and a value of its shape


def setitem(index: Any, value: Any = None) -> Write:
    """Returns the write ``t[index] = value``, by default with elements of the given tensor."""

    def write(t: Tensor, v: Tensor) -> None:
        t[index] = v[index] if value is None else value

    return write


def iadd(t: Tensor, v: Tensor) -> None:
    t += v


def isub(t: Tensor, v: Tensor) -> None:
    t -= v


def imul(t: Tensor, v: Tensor) -> None:
    t *= 2


def itruediv(t: Tensor, v: Tensor) -> None:
    t /= 2


def mask(t: Tensor) -> Tensor:
    """Returns a mask that is the same for all tensors of one shape."""
    return (torch.arange(t.numel()) % 2 == 0).view(t.shape)


def first(t: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.long)


WRITES: dict[str, Write] = {
    # in-place ops
    "add_": lambda t, v: t.add_(v),
    "add_scalar": lambda t, v: t.add_(1),
    "add_alpha": lambda t, v: t.add_(v, alpha=3),
    "sub_": lambda t, v: t.sub_(v),
    "mul_": lambda t, v: t.mul_(3),
    "div_": lambda t, v: t.div_(2),
    "neg_": lambda t, v: t.neg_(),
    "zero_": lambda t, v: t.zero_(),
    "fill_": lambda t, v: t.fill_(5),
    "fill_tensor": lambda t, v: t.fill_(v.sum()),
    "clamp_": lambda t, v: t.clamp_(-0.5, 0.5),
    "relu_": lambda t, v: t.relu_(),
    "tanh_": lambda t, v: t.tanh_(),
    "exp_": lambda t, v: t.exp_(),
    "square_": lambda t, v: t.clone().square_(),
    "lerp_": lambda t, v: t.lerp_(v, 0.25),
    "addcmul_": lambda t, v: t.addcmul_(v, torch.ones_like(v), value=2),
    "cumsum_": lambda t, v: t.cumsum_(0),
    "masked_fill_": lambda t, v: t.masked_fill_(mask(t), 7.0),
    "masked_fill_pending_mask": lambda t, v: t.masked_fill_(v > 0, 7.0),
    "masked_scatter_": lambda t, v: t.masked_scatter_(mask(t), v),
    "index_fill_": lambda t, v: t.index_fill_(0, first(t), 7.0),
    "index_add_": lambda t, v: t.index_add_(0, first(t), v[:1]),
    "index_copy_": lambda t, v: t.index_copy_(0, first(t), v[:1]),
    "index_put_": lambda t, v: t.index_put_((first(t),), v[:1]),
    "index_put_accumulate": lambda t, v: t.index_put_((first(t),), v[:1], accumulate=True),
    "scatter_": lambda t, v: t.scatter_(0, torch.zeros(t.shape, dtype=torch.long)[:1], v[:1]),
    "scatter_add_": lambda t, v: t.scatter_add_(0, torch.zeros(v.shape, dtype=torch.long), v),
    "functional_inplace": lambda t, v: F.relu(t, inplace=True),
    "foreach_add_": lambda t, v: torch._foreach_add_([t], [v]),
    "detached": lambda t, v: t.detach().add_(v.detach()),
    "data": lambda t, v: t.data.add_(v.data),
    # copy_
    "copy_": lambda t, v: t.copy_(v),
    "copy_broadcast": lambda t, v: t.copy_(v[:1]),
    "copy_of_another_type": lambda t, v: t.copy_(v.float()),
    "copy_of_an_ordinary_tensor": lambda t, v: t.copy_(torch.ones(t.shape)),
    "copy_of_itself": lambda t, v: t.copy_(t.flip(0)),
    # x[i] = y
    "setitem_int": setitem(0),
    "setitem_negative": setitem(-1),
    "setitem_slice": setitem(slice(1)),
    "setitem_number": setitem(0, 3.0),
    "setitem_everything": setitem(slice(None)),
    "setitem_ellipsis": setitem(...),
    "setitem_list": setitem([0]),
    "setitem_tensor": setitem(torch.tensor([0])),
    "setitem_mask": lambda t, v: t.__setitem__(mask(t), 4.0),
    "setitem_pending_mask": lambda t, v: t.__setitem__(v > 0, 4.0),
    # +=
    "iadd": iadd,
    "isub": isub,
    "imul": imul,
    "itruediv": itruediv,
    # out=, with detached tensors, because autograd rejects other tensors
    "out": lambda t, v: torch.add(v.detach(), 1, out=t.detach()),
    "out_of_a_product": lambda t, v: torch.mul(v.detach(), v.detach(), out=t.detach()),
    "out_of_stack": lambda t, v: torch.stack(list(v.detach()), out=t.detach()),
    "out_with_grad": lambda t, v: torch.add(v, 1, out=t),
}


def attempt(action: Callable[[], Any]) -> str:
    """Returns the result or the error, so that errors are compared like values."""
    try:
        action()
    except RuntimeError as error:
        return type(error).__name__ + (" view" if "is a view" in str(error) else "")
    return "fine"
