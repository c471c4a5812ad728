"""Captures ``torch.autograd.grad`` and ``torch.func.grad`` in an open block, if possible."""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.utils import _pytree

from torch_autobatch import _C

_autograd: Any = torch.autograd
_run_backward = _autograd._engine_run_backward
_grad_and_value = eager_transforms.grad_and_value_impl


def _run_captured(
    outputs: Any, gradients: Any, retain_graph: Any, create_graph: Any, *rest: Any, **options: Any
) -> Any:
    """Replaces PyTorch's function that runs the autograd engine.

    ``torch.autograd.grad`` and ``backward`` call it after they have checked their arguments. If
    possible, a call of ``grad`` is captured.
    """
    if len(rest) == 2 and options == {"accumulate_grad": False}:
        inputs, allow_unused = rest
        found = _C.derive(outputs, gradients, inputs, retain_graph, create_graph, allow_unused)
        if found is not NotImplemented:
            return found
        pending = [x for x in outputs if isinstance(x, torch.Tensor)]
        # One flush computes all outputs.
        _C.compute(pending, "backward() by torch.autograd.grad")
    return _run_backward(outputs, gradients, retain_graph, create_graph, *rest, **options)


# --- torch.func.grad ---

# Number of nested calls of torch.func.grad that are active. Each fiber has a separate context, so
# instances do not share this number.
_depth: ContextVar[int] = ContextVar("torch_autobatch_grad_depth", default=0)


class _Block(threading.local):
    """State that all open blocks of this thread share."""

    def __init__(self) -> None:
        # The key is a depth and the id of a tensor. The value is this tensor, and the leaf that
        # replaces it. All instances share one leaf, because products with different weights can't
        # run as one batch.
        self.leaves: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}


_block = _Block()


class _Argument:
    """A differentiated argument: a tensor with the same values and a separate autograd history.

    Attributes:
        tensor: replaces the argument in the call.
        leaf: the leaf where the history of ``tensor`` begins; None if the argument requires grad.
        key: the key of ``leaf`` in ``_Block.leaves``; None if ``leaf`` is not in it.
    """

    def __init__(self, tensor: torch.Tensor, depth: int) -> None:
        self.leaf: torch.Tensor | None = None
        self.key: tuple[int, int] | None = None
        if tensor.requires_grad:
            self.tensor = tensor.view_as(tensor)
        elif _C.is_pending(tensor):
            # torch.tensor(requires_grad=True) runs eagerly, so the leaf is not captured. Without
            # requires_grad=True, or with another factory, the leaf would be captured.
            options: Any = {"dtype": tensor.dtype, "device": tensor.device}
            self.leaf = torch.tensor(1.0, requires_grad=True, **options)
            self.tensor = tensor * self.leaf
        else:
            self.key = (depth, id(tensor))
            known, leaf = _block.leaves.get(self.key, (None, None))
            if known is not tensor or leaf is None or leaf.data_ptr() != tensor.data_ptr():
                leaf = tensor.detach().requires_grad_()
                _block.leaves[self.key] = (tensor, leaf)
            self.tensor = self.leaf = leaf


def _can_capture(leaves: list[Any]) -> bool:
    kinds = (torch.Tensor, torch.nn.Parameter)
    return (
        _C.captures()
        and not torch.is_inference_mode_enabled()  # in inference mode autograd records nothing
        and len(leaves) > 0
        and all(type(x) in kinds and x.is_floating_point() for x in leaves)
        and not any(x.is_inference() for x in leaves)
    )


def _reaches_others(tensors: list[torch.Tensor], leaves: list[torch.Tensor]) -> bool:
    """Whether gradients of ``tensors`` reach a leaf that is not in ``leaves``."""
    pending = [x for x in tensors if _C.is_pending(x)]
    if pending and _C.depends_on_others(pending, leaves):
        return True
    nodes: list[Any] = [x.grad_fn for x in tensors if not _C.is_pending(x)]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and not any(node.variable is leaf for leaf in leaves):
            return True
        nodes += [next_node for next_node, _ in node.next_functions]
    return False


def _checked_output(output: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    """Returns the scalar and the auxiliary output, or raises the same error as eager mode."""
    aux = None
    if has_aux:
        if not (isinstance(output, tuple) and len(output) == 2):
            raise RuntimeError(
                "grad_and_value(f)(*args): output of function f should be a tuple: "
                "(output, aux) if has_aux is True"
            )
        output, aux = output
    if not isinstance(output, torch.Tensor):
        raise RuntimeError(
            f"grad_and_value(f)(*args): Expected f(*args) to return a Tensor, got {type(output)}"
        )
    if output.dim() != 0:
        raise RuntimeError(
            "grad_and_value(f)(*args): Expected f(*args) to return a scalar Tensor, got tensor "
            f"with {output.dim()} dims. Maybe you wanted to use the vjp or jacrev APIs instead?"
        )
    return output, aux


def _captured_grad_and_value(
    func: Callable[..., Any],
    argnums: Any,
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Replaces ``torch.func.grad_and_value`` and ``grad``. Calls ``autograd.grad`` instead."""
    if not _C.captures():
        return _grad_and_value(func, argnums, has_aux, args, kwargs)
    flat, spec = _pytree.tree_flatten(eager_transforms._slice_argnums(args, argnums, as_tuple=True))
    if not _can_capture(flat):
        return _grad_and_value(func, argnums, has_aux, args, kwargs)
    outer = torch.is_grad_enabled()
    depth = _depth.get()
    with torch.enable_grad():
        arguments = [_Argument(tensor, depth) for tensor in flat]
        inputs = [argument.tensor for argument in arguments]
        given = list(args)
        numbers = (argnums,) if isinstance(argnums, int) else argnums
        for number, value in zip(numbers, _pytree.tree_unflatten(inputs, spec), strict=True):
            given[number] = value
        before = _depth.set(depth + 1)
        try:
            output = func(*given, **kwargs)
        finally:
            _depth.reset(before)
        output, aux = _checked_output(output, has_aux)
        found: Any = [None] * len(inputs)
        if output.requires_grad:
            found = _autograd.grad(output, inputs, create_graph=True, allow_unused=True)
        gradients = [
            torch.zeros_like(x) if gradient is None else gradient
            for x, gradient in zip(flat, found, strict=True)
        ]
    keeps = _keeps_history(outer, arguments, output, gradients)

    def give(x: Any) -> Any:
        return x if keeps or not isinstance(x, torch.Tensor) else x.detach()

    result = _pytree.tree_unflatten([give(x) for x in gradients], spec)
    result = result[0] if isinstance(argnums, int) else result
    if has_aux:
        return result, (give(output), _pytree.tree_map(give, aux))
    return result, give(output)


def _keeps_history(
    outer: bool,
    arguments: list[_Argument],
    output: torch.Tensor,
    gradients: list[torch.Tensor],
) -> bool:
    """Whether the results depend on differentiable tensors that are not arguments."""
    leaves = [argument.leaf for argument in arguments if argument.leaf is not None]
    tensors = [x for x in (output, *gradients) if x.requires_grad]
    if not outer or not tensors or not _reaches_others(tensors, leaves):
        return False
    # The history of the results contains the leaves, so a later call must not reuse these leaves.
    for argument in arguments:
        if argument.key is not None:
            _block.leaves.pop(argument.key, None)
    return True


def end_block() -> None:
    """Drops the leaves. After the block, a leaf stays alive only if the program refers to it."""
    if _block.leaves:
        _block.leaves.clear()


_C.replace(_autograd, "_engine_run_backward", _run_captured)
_C.replace(eager_transforms, "grad_and_value_impl", _captured_grad_and_value)
