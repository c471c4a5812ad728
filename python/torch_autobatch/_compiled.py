"""Compiles the bodies of cells with PyTorch's Inductor, for ``cell(compile=True)``.

The forward part and the backward part of a body's graph are compiled separately. No autograd node
connects them. So the library can run backward only on the members that gradients reach, and can
collect the weights' gradients over batches. Inductor and its dependencies are imported at the first
use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_autobatch import _C
from torch_autobatch._compiled_tape import PRODUCT, ROWS

# (kind, slot, left, right, skip). See CompiledSubgraph::Gradient (compiled_subgraph.h).
_Part: TypeAlias = tuple[int, int, Tensor, Tensor | None, int]

_MOST_MASKS = 16  # maximum number of sets of results that can have gradients
# Tolerances as fractions of the largest magnitude.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-3}  # for other dtypes: 5e-2
_SAMPLE = 2  # number of members that are compared with eager mode

_known: dict[Any, Code | None] = {}


def compile_body(body: _C.Body, operands: Sequence[Tensor]) -> Code | None:
    """Returns the code for batches of this body, with any number of members.

    Returns None, after a ``RuntimeWarning``, if the body can't be compiled.

    Args:
        body: the tape of one member.
        operands: the operands of some members, stacked to [n, *sizes], and the weights.
    """
    key = _key(body)
    if key not in _known:
        try:
            pairs = zip(operands, body.operands, strict=True)
            _known[key] = Code(body, [t if o.is_weight else t[:_SAMPLE] for t, o in pairs])
        except Exception as error:  # an error of Inductor, the C++ compiler or a rule
            _known[key] = None
            _warn(f"the cell with the ops {body.names()}", error)
    return _known[key]


def _warn(what: str, error: Exception) -> None:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = f"cell(compile=True): {what} is not compiled: {type(error).__name__}: {reason}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def _key(body: _C.Body) -> tuple[Any, ...]:
    """Returns a key that is equal for bodies of the same ops, even if their weights differ."""

    def value(v: _C.BodyValue) -> tuple[Any, ...]:
        sizes, strides = tuple(v.sizes), tuple(v.strides)
        return v.value, sizes, strides, v.dtype, v.device, v.requires_grad, v.is_weight, v.is_saved

    def step(s: _C.BodyStep) -> tuple[Any, ...]:
        lists = s.operands, s.places, s.results, s.requires_grad, s.sizes, s.strides, s.from_strides
        arguments = repr(body.arguments(s.node)) if s.op else ""
        return s.op, arguments, s.offset, repr(lists)

    values = (tuple(map(value, body.operands)), tuple(map(value, body.results)))
    return (*values, tuple(map(step, body.steps)), torch.get_default_dtype())


class Code:
    """The compiled forward and backward parts of a body."""

    def __init__(self, body: _C.Body, sample: Sequence[Tensor]) -> None:
        from torch_autobatch._compiled_graph import Fakes, Joint
        from torch_autobatch._compiled_views import UnsupportedError

        self._fakes = Fakes(body)
        self._num_results = len(body.results)
        joints = {
            mask: Joint(body, self._fakes, [k for k in range(self._num_results) if mask >> k & 1])
            for mask in _masks(body)
        }
        whole = joints[max(joints)]
        # Each node of the forward part has one name, which is equal in all joint graphs.
        names = {node.name for joint in joints.values() for node in joint.saved()}
        saved = [node for node in whole.module.graph.nodes if node.name in names]
        if len(saved) < len(names):
            raise UnsupportedError(
                "the tensors that its backward reads depend on which results have gradients"
            )
        places = {node: (False, k) for k, node in enumerate(whole.results)}
        extra: list[Any] = []
        for node in saved:
            if node.op == "placeholder":
                slot = whole.operands.index(node)
                places[node] = (True, slot)
                if body.operands[slot].is_weight and not body.operands[slot].is_saved:
                    raise UnsupportedError(
                        "its backward reads a weight that eager's backward does not read"
                    )
            elif node not in places:
                places[node] = (False, self._num_results + len(extra))
                extra.append(node)
        # For each saved tensor: (true, slot of the operand) or (false, index of the output of
        # forward).
        self._saved = [places[node] for node in saved]
        self._stacked = [bool(self._fakes.rows(node.meta["val"])) for node in saved]
        order = [node.name for node in saved]
        self._backwards = {
            m: _Backward(joint, order, self.runs) for m, joint in joints.items() if m
        }
        forward = whole.forward(extra)
        self._forward: Callable[..., Any] = forward
        _check(body, self, sample)
        self._forward = _compile(forward, self._fakes.operands)
        _check(body, self, sample)

    def runs(self, members: int) -> bool:
        """Returns whether the compiled code is valid for this number of members."""
        return self._fakes.holds_for(members)

    def forward(self, operands: list[Tensor]) -> tuple[Sequence[Tensor], list[Tensor], list[bool]]:
        """Returns the results, and the tensors that backward needs.

        The last list contains, for each of these tensors, whether it has a row for each member.
        """
        with torch.no_grad():
            out = self._forward(*operands)
        saved = [operands[at] if given else out[at] for given, at in self._saved]
        return out[: self._num_results], saved, self._stacked

    def backward(
        self, reached: int, saved: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> list[_Part]:
        """Returns the parts of the operands' gradients.

        ``reached`` is the set of the results that have gradients, as bits.
        """
        return self._backwards[reached].run(saved, gradients)

    def backward_as_traced(
        self, reached: int, saved: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> list[_Part]:
        """Computes the parts that ``backward`` returns, op by op and without compiled code."""
        return self._backwards[reached].run_traced(saved, gradients)

    def masks(self) -> list[int]:
        """Returns the values of ``reached`` that `backward` accepts."""
        return list(self._backwards)


class _Backward:
    """Backward from the gradients of one set of results. It is compiled when it first runs."""

    def __init__(self, joint: Any, order: Sequence[str], runs: Callable[[int], bool]) -> None:
        own = joint.saved()
        self._used = [order.index(node.name) for node in own]
        self._module = joint.backward(own)
        self._fakes = [node.meta["val"] for node in (*own, *joint.tangents)]
        self._gradients = joint.gradients
        self._others = [order.index(node.name) for node in joint.others]
        self._runs = runs
        self._compiled: Callable[..., Any] | None = None
        self._failed = False

    def run(self, saved: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[_Part]:
        """See ``Code.backward``."""
        given = [*(saved[i] for i in self._used), *gradients]
        if self._compiled is None and not self._failed:
            self._compile(given)
        if self._compiled is None or not self._runs(gradients[0].shape[0]):
            return self.run_traced(saved, gradients)
        with torch.no_grad():
            return self._parts(self._compiled(*given), saved)

    def run_traced(self, saved: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[_Part]:
        """See ``Code.backward_as_traced``."""
        with torch.no_grad():
            return self._parts(self._module(*(saved[i] for i in self._used), *gradients), saved)

    def _compile(self, given: Sequence[Tensor]) -> None:
        try:
            compiled = _compile(self._module, self._fakes)
            with torch.no_grad():
                pairs = zip(compiled(*given), self._module(*given), strict=True)
                _compare("a gradient", pairs)
            self._compiled = compiled
        except Exception as error:  # the same errors as in compile_body
            self._failed = True
            _warn("the backward of a cell", error)

    def _parts(self, outputs: Sequence[Tensor], saved: Sequence[Tensor]) -> list[_Part]:
        found: list[_Part] = []
        for kind, slot, at, other, output_first, skip in self._gradients:
            left = outputs[at]
            right = None
            if other >= 0:
                right = saved[self._others[other]]
                right = right.reshape(left.shape[0], -1) if kind == PRODUCT else right.reshape(-1)
                if not output_first:
                    left, right = right, left
            found.append((kind, slot, left, right, skip))
        return found


def _compile(module: Any, fakes: Sequence[Tensor]) -> Callable[..., Any]:
    import torch._inductor

    with torch.inference_mode(False), torch.no_grad():
        return torch._inductor.compile(module, list(fakes))  # type: ignore[no-any-return]


def _masks(body: _C.Body) -> list[int]:
    """Returns the sets of results that can have gradients, as bit sets.

    A set also includes the results through which these gradients pass (``Body.closure``).
    """
    masks = {0}
    for k, result in enumerate(body.results):
        if result.requires_grad:
            masks |= {body.closure(mask | 1 << k) for mask in masks}
    if len(masks) > _MOST_MASKS:
        raise NotImplementedError("it has too many results that require grad")
    return sorted(masks - {0}) or [0]


# --- comparison with eager ---


def _check(body: _C.Body, code: Code, sample: Sequence[Tensor]) -> None:
    """Compares the code with eager ops, on members of the batch. Raises an error if they differ."""
    results, saved, _ = code.forward(list(sample))
    with torch.enable_grad(), torch.inference_mode(False):
        leaves = [
            [_leaf(t if o.is_weight else t[m], o.requires_grad) for m in range(_SAMPLE)]
            for t, o in zip(sample, body.operands, strict=True)
        ]
        expected = [body.run_member([leaf[m] for leaf in leaves]) for m in range(_SAMPLE)]
    for out, *each in zip(results, *expected, strict=True):
        _compare("a result", [(out, torch.stack(each).detach())])
    for mask in code.masks():
        roots = [k for k in range(len(results)) if mask >> k & 1]
        tangents = [_some_numbers(results[k]) for k in roots]
        found = _whole_gradients(code.backward_as_traced(mask, saved, tangents), body, _SAMPLE)
        wanted = [slot for slot, o in enumerate(body.operands) if o.requires_grad]
        each = [
            torch.autograd.grad(
                [expected[m][k] for k in roots],
                [leaves[slot][m] for slot in wanted],
                [tangent[m] for tangent in tangents],
                retain_graph=True,
                allow_unused=True,
            )
            for m in range(_SAMPLE)
        ]
        for slot, grads in zip(wanted, zip(*each, strict=True), strict=True):
            if any(g is None for g in grads) != (slot not in found):
                raise RuntimeError("the set of operands with gradients differs from eager mode")
            if slot in found:
                whole = torch.stack(grads)
                whole = whole.sum(0) if body.operands[slot].is_weight else whole
                _compare("a gradient", [(found[slot], whole)])


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().clone().requires_grad_(requires_grad)


def _some_numbers(like: Tensor) -> Tensor:
    """Returns a tensor like ``like`` with fixed numbers. Uses no random number generator."""
    line = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return (line * 1.7 + 0.3).cos().to(like.dtype).reshape(like.shape)


def _whole_gradients(parts: Sequence[_Part], body: _C.Body, members: int) -> dict[int, Tensor]:
    """Returns the gradient of each operand. Combines the parts as the C++ code does."""
    found: dict[int, Tensor] = {}
    for kind, slot, left, right, skip in parts:
        grad = left
        if kind == PRODUCT:
            grad = left.sum(0) if right is None else left.t() @ right
        elif kind == ROWS:
            assert right is not None
            kept = right != skip
            grad = left.new_zeros(body.operands[slot].sizes)
            grad.index_add_(0, right[kept], left[kept])
        found[slot] = found[slot] + grad if slot in found else grad
    return found


def _compare(what: str, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for out, expected in pairs:
        if out.shape != expected.shape or out.dtype != expected.dtype:
            raise RuntimeError(f"{what} differs from eager mode in shape or dtype")
        scale = expected.abs().nan_to_num(0, 0, 0).max().item() if expected.numel() else 0.0
        tolerance = _TOLERANCES.get(expected.dtype, 5e-2)
        if not torch.allclose(out, expected, tolerance, tolerance * scale, equal_nan=True):
            raise RuntimeError(f"{what} differs from eager mode in value")
