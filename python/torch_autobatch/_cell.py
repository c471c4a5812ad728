"""Cells: functions that are captured as a whole."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch
from torch import nn

from torch_autobatch import _C

_F = TypeVar("_F", bound=Callable[..., Any])

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@overload
def cell(function: _F, *, compile: bool = ...) -> _F: ...


@overload
def cell(*, compile: bool = ...) -> Callable[[_F], _F]: ...


def cell(function: Any = None, *, compile: bool = False) -> Any:
    """Makes a function, a method, a module or a class of modules a cell.

    A promise that a call's result depends only on its tensor arguments, on parameters and buffers
    of modules, and on its other arguments. Inside ``batch()`` the first call of each kind runs as
    ever; another one with the same kinds of tensors (shape, strides, dtype, ``requires_grad``), the
    same parameters and the same other arguments adds the same ops to the graph without running the
    function. Outside a block nothing changes::

        class TreeLSTM(nn.Module):
            @ab.cell
            def node(self, left, right): ...

        expert = ab.cell(nn.Sequential(...))


        @ab.cell
        class Expert(nn.Module): ...

    The unit of Suarez and Zhu's *Efficient Dynamic Batching of Large Datasets with Infinite
    Structures* and of Cavs' vertex functions (Xu et al. 2018, section 3).

    Args:
        function: what to make a cell. Tensors go in and out as they are or in tuples, lists, dicts,
            named tuples and dataclasses; other arguments are compared by value if they are numbers,
            strings or None, else by identity, and must be hashable. Without it: a decorator.
        compile: have PyTorch's Inductor compile what runs a batch of uses, forward and backward,
            when the first such batch runs: seconds, for each kind of use. Values and gradients are
            eager's up to rounding, as without. Batches that it can't compile (no C++ compiler, an
            op that it does not know) run as without, and a ``RuntimeWarning`` says why; so do
            single uses.

    Returns:
        A callable in its place; of a class, the class itself.

    Raises:
        TypeError: for what can't be called; in a call, for an argument that is not hashable.
        RuntimeError: in a call, if the function reads a tensor's value, on which its ops could
            depend. What can't be captured as a whole for another reason (it writes in place, a
            module in it has hooks) runs op by op, and ``report()`` says why.
    """
    if function is None:
        return functools.partial(cell, compile=compile)
    if isinstance(function, type):
        function.__call__ = _wrap(function.__call__, compile)  # type: ignore[method-assign]
        return function
    if not callable(function):
        raise TypeError(f"cell() takes something that can be called, not {type(function).__name__}")
    return _wrap(function, compile)


def _wrap(function: Any, compiles: bool) -> Any:
    wrapped: Any = _C.Cell(function, compiles)
    for name in (*functools.WRAPPER_ASSIGNMENTS, "__isabstractmethod__"):
        if hasattr(function, name):
            setattr(wrapped, name, getattr(function, name))
    return wrapped


def guards(
    modules: Iterable[nn.Module], weights: Iterable[torch.Tensor]
) -> list[tuple[dict[str, Any], str | None, Any]] | None:
    """What of the modules must be found unchanged at a later call: (dict, name, value) each.

    Without a name: a dict that must still be empty. None if one of the modules has hooks, which
    must run in each call.
    """
    used = {id(weight) for weight in weights}
    found: list[tuple[dict[str, Any], str | None, Any]] = []
    seen: set[int] = set()
    for root in modules:
        for module in root.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            hooks = [d for name in _HOOKS if (d := module.__dict__.get(name)) is not None]
            if any(hooks):
                return None
            found.extend((d, None, None) for d in hooks)
            found.append((module.__dict__, "training", module.training))
            found.extend((module._modules, *item) for item in module._modules.items())
            for table in (module._parameters, module._buffers):
                found.extend((table, *item) for item in table.items() if id(item[1]) in used)
    return found
