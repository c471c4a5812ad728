"""Runs a cell's body on tensors of n members, [n, *sizes].

A body is a tape of ops on one member (csrc/autobatch/subgraph/subgraph.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_autobatch import _C
from torch_autobatch._compiled_views import UnsupportedError, view

# Kinds of operands' gradients. See CompiledSubgraph::Gradient::Kind (compiled_subgraph.h).
STACKED, WHOLE, PRODUCT, ROWS = range(4)

# For each product with a weight: the positions of three arguments (the rows, the matrix [K, M], and
# the bias; -1: no bias), and whether the matrix is transposed, [M, K].
_PRODUCTS: dict[str, tuple[int, int, int, bool]] = {
    "aten::linear": (0, 1, 2, True),
    "aten::addmm": (1, 2, 0, False),
    "aten::mm": (0, 1, -1, False),
    "aten::matmul": (0, 1, -1, False),
}


@dataclass
class Use:
    """A use of a weight. The output's gradient and another tensor give the weight's gradient."""

    kind: int
    slot: int
    output: Tensor
    other: Tensor | None  # the other factor of the gradient, or the indices of the rows
    output_first: bool = True
    skip: int = -1


@dataclass
class Run:
    """One run of a body's tape on stacked operands."""

    body: _C.Body
    collects: bool  # whether gradients of weights are collected as `uses`
    values: dict[int, Tensor] = field(default_factory=dict)
    stacked: set[int] = field(default_factory=set)  # values whose first dimension counts members
    # Maps a weight's value to its slot and to whether the weight is transposed.
    weights: dict[int, tuple[int, bool]] = field(default_factory=dict)
    uses: list[Use] = field(default_factory=list)

    def run(self, operands: Sequence[Tensor]) -> list[Tensor]:
        self.operands = self.body.operands
        for slot, (operand, tensor) in enumerate(zip(self.operands, operands, strict=True)):
            self.values[operand.value] = tensor
            if operand.is_weight:
                self.weights[operand.value] = (slot, False)
            else:
                self.stacked.add(operand.value)
                self.count = tensor.shape[0]
        self.pieces = pieces_of(self.body)
        for step in self.body.steps:
            if step.op:
                self._call(step)
            else:
                self._view(step)
        return [self._stacked(result.value) for result in self.body.results]

    def _view(self, step: _C.BodyStep) -> None:
        (parent,), (result,) = step.operands, step.results
        of = self.values[parent]
        lead = int(parent in self.stacked)
        if result in self.pieces and result not in self.values:
            dim, values, lengths = self.pieces[result]
            parts = torch.split(of, lengths, lead + dim)  # the backward of `split` is one `cat`
            self.values |= dict(zip(values, parts, strict=True))
        made = self.values.get(result)
        if made is None:
            made = view(of, lead, step.from_strides, step.sizes, step.strides, step.offset)
        self.values[result] = made if step.requires_grad[0] else made.detach()
        if lead:
            self.stacked.add(result)
        known = self.weights.get(parent)
        if known is None or of.dim() != 2 or min(of.shape) < 2:
            return
        if made.shape == of.shape[::-1] and step.strides == step.from_strides[::-1]:
            self.weights[result] = (known[0], not known[1])

    def _call(self, step: _C.BodyStep) -> None:
        ways = (
            self._product,
            self._embedding,
            self._joined,
            self._cross_entropy,
            self._elementwise,
        )
        out = next((out for way in ways if (out := way(step))), None) or self._batched(step)
        is_stacked = any(o in self.stacked for o in step.operands)
        for result, tensor, grad in zip(step.results, out, step.requires_grad, strict=False):
            self.values[result] = tensor if grad else tensor.detach()
            if is_stacked:
                self.stacked.add(result)

    def _batched(self, step: _C.BodyStep) -> Sequence[Tensor]:
        """Runs an op with functorch's batching rule."""
        given = [o for o in step.operands if o >= 0]

        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            rest = iter(tensors)
            return tuple(
                self.body.run(step.node, [next(rest) if o >= 0 else None for o in step.operands])
            )

        dims = tuple(0 if o in self.stacked else None for o in given)
        if any(d == 0 for d in dims):
            call = torch.func.vmap(call, in_dims=dims)
        return call(*(self.values[o] for o in given))

    def _stacked(self, value: int) -> Tensor:
        out = self.values[value]
        return out if value in self.stacked else out.expand(self.count, *out.shape)

    def _elementwise(self, step: _C.BodyStep) -> Sequence[Tensor] | None:
        """Runs an elementwise op on stacked tensors, aligned at the last dimension of a member."""
        given = {o: self.values[o] for o in step.operands if o >= 0}
        if not step.is_elementwise or len({x.dtype for x in given.values()}) > 1:
            return None  # type promotion treats 0-dim tensors differently
        rank = max(x.dim() - (o in self.stacked) for o, x in given.items())
        for o, x in given.items():
            if o in self.stacked and x.dim() <= rank:
                given[o] = x.reshape(-1, *[1] * (rank + 1 - x.dim()), *x.shape[1:])
        return self.body.run(step.node, [given.get(o) for o in step.operands])

    def _joined(self, step: _C.BodyStep) -> Sequence[Tensor] | None:
        """Runs `cat` or `stack`. functorch's rule would make the number of members a constant."""
        if step.op not in ("aten::cat", "aten::stack"):
            return None
        dim = self.body.arguments(step.node)[1]
        parts = [self._stacked(o) for o in step.operands]
        join = torch.cat if step.op == "aten::cat" else torch.stack
        return [join(parts, dim + 1 if dim >= 0 else dim)]

    def _cross_entropy(self, step: _C.BodyStep) -> Sequence[Tensor] | None:
        """Computes cross entropy of labels, without class weights.

        functorch's rule would make the number of members a constant.
        """
        if step.op != "aten::cross_entropy_loss":
            return None
        x, labels, weight = (self._argument(step, position) for position in (0, 1, 2))
        reduction, ignored, smoothing = self.body.arguments(step.node)[3:6]
        if weight >= 0 or smoothing != 0 or x not in self.stacked or labels not in self.stacked:
            return None
        logits, targets = self.values[x], self.values[labels]
        if targets.is_floating_point() or logits.dim() > 3:
            return None
        rows = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            targets.reshape(-1),
            ignore_index=ignored,
            reduction="none",
        ).reshape(targets.shape)
        if reduction == 0 or targets.dim() == 1:
            return [rows]
        total = rows.sum(1)
        return [total if reduction == 2 else total / (targets != ignored).sum(1)]

    def _argument(self, step: _C.BodyStep, position: int) -> int:
        return step.operands[step.places.index(position)] if position in step.places else -1

    def _wants(self, slot: int) -> bool:
        return self.collects and bool(self.operands[slot].requires_grad)

    def _product(self, step: _C.BodyStep) -> list[Tensor] | None:
        """Multiplies all members' rows by a weight, in one product.

        A separate op adds the bias, so that it can be fused with the ops that follow.
        """
        if step.op not in _PRODUCTS:
            return None
        at, matrix, bias, transposed = _PRODUCTS[step.op]
        x, w, b = (self._argument(step, position) for position in (at, matrix, bias))
        if x not in self.stacked or w not in self.weights or self.values[w].dim() != 2:
            return None
        if b >= 0 and (b not in self.weights or self.values[b].dim() != 1):
            return None
        if any(scale not in (None, 1) for scale in self.body.arguments(step.node)[3:]):
            return None
        left, right = self.values[x], self.values[w].detach()
        right = right.t() if transposed else right
        rows = left.reshape(-1, right.shape[0]).contiguous()
        out = torch.mm(rows, right)
        if b >= 0:
            out = out + self.values[b].detach()
        slot, swapped = self.weights[w]
        slot_b = self.weights[b][0] if b >= 0 else -1
        if self._wants(slot) or (b >= 0 and self._wants(slot_b)):
            out = _differentiable(out)
        if self._wants(slot):
            self.uses.append(Use(PRODUCT, slot, out, rows, transposed != swapped))
        if b >= 0 and self._wants(slot_b):
            self.uses.append(Use(PRODUCT, slot_b, out, None))
        return [out.reshape(*left.shape[:-1], right.shape[1])]

    def _embedding(self, step: _C.BodyStep) -> list[Tensor] | None:
        if step.op != "aten::embedding":
            return None
        table, indices = (self._argument(step, position) for position in (0, 1))
        padding, by_frequency, sparse = self.body.arguments(step.node)[2:5]
        slot, swapped = self.weights.get(table, (-1, True))
        if swapped or by_frequency or sparse or indices not in self.stacked:
            raise UnsupportedError("an embedding with these arguments is not supported")
        found = self.values[indices]
        out = torch.nn.functional.embedding(found, self.values[table].detach())
        if self._wants(slot):
            out = _differentiable(out)
            self.uses.append(Use(ROWS, slot, out, found.reshape(-1), skip=padding))
        return [out]


def pieces_of(body: _C.Body) -> dict[int, tuple[int, list[int], list[int]]]:
    """Finds views that together cover a value, as the results of `chunk` do.

    Returns, for each view: the dimension, all views of the value, and their lengths in this
    dimension.
    """
    views: dict[tuple[int, int], list[_C.BodyStep]] = {}
    wholes: dict[int, tuple[list[int], list[int]]] = {}
    sizes = {o.value: o.sizes for o in body.operands}
    for step in body.steps:
        if step.op:
            sizes |= dict(zip(step.results, step.sizes_of_results, strict=True))
            continue
        (parent,), (result,) = step.operands, step.results
        sizes[result] = step.sizes
        whole = sizes[parent]
        wholes[parent] = whole, step.from_strides
        shorter = [d for d in range(len(whole)) if step.sizes[d : d + 1] != whole[d : d + 1]]
        same = len(step.sizes) == len(whole) and step.strides == step.from_strides
        if same and len(shorter) == 1 and all(step.requires_grad):
            views.setdefault((parent, shorter[0]), []).append(step)
    found = {}
    for (parent, dim), steps in views.items():
        whole, strides = wholes[parent]
        steps.sort(key=lambda step: step.offset)
        at = 0
        for step in steps:
            at = at + step.sizes[dim] if step.offset == at * strides[dim] else -1
            if at < 0:
                break
        if at == whole[dim]:
            values = [step.results[0] for step in steps]
            for value in values:
                found[value] = dim, values, [step.sizes[dim] for step in steps]
    return found


def _differentiable(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()
