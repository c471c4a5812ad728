"""A cell's body as one graph of n members, forward and backward, and the two parts of it.

A body is a tape of ops on one member (csrc/autobatch/body.h). Here its ops are run on tensors of n
members, [n, *sizes], under ``make_fx``, with the gradients of its results, and n is left open.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_autobatch import _C
from torch_autobatch._compiled_views import UnsupportedError, view

# How an operand's gradient comes: CompiledBody::Gradient::Kind (csrc/autobatch/body_compiled.h).
STACKED, WHOLE, PRODUCT, ROWS = range(4)

_MEMBERS = 64  # n is any number; the code is laid out for one like this

# Products with a weight: which arguments are the rows, the matrix and the bias, and whether the
# matrix is [M, K].
_PRODUCTS: dict[str, tuple[int, int, int, bool]] = {
    "aten::linear": (0, 1, 2, True),
    "aten::addmm": (1, 2, 0, False),
    "aten::mm": (0, 1, -1, False),
    "aten::matmul": (0, 1, -1, False),
}

_SHAPES = frozenset({"alias", "detach", "view", "_unsafe_view"})  # all elements in their order
_VIEWS = _SHAPES | {
    *("as_strided", "expand", "permute", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "t", "transpose", "unbind", "unsqueeze"),
}


# --- the tape on all members at once ---


@dataclass
class _Use:
    """A use of a weight whose gradient is made of the output's one and another tensor."""

    kind: int
    slot: int
    output: Tensor
    other: Tensor | None  # the other factor, or the indices
    output_first: bool = True
    skip: int = -1


@dataclass
class _Run:
    """One run of a body's tape on stacked operands."""

    body: _C.Body
    collects: bool  # gradients of weights as `uses`
    values: dict[int, Tensor] = field(default_factory=dict)
    stacked: set[int] = field(default_factory=set)  # values that differ by member
    weights: dict[int, tuple[int, bool]] = field(default_factory=dict)  # slot; transposed
    uses: list[_Use] = field(default_factory=list)

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
            parts = torch.split(of, lengths, lead + dim)  # its gradient is a `cat`
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
        """By functorch's rule for the op."""
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
        """As it is: members' dimensions are the last ones."""
        given = {o: self.values[o] for o in step.operands if o >= 0}
        if not step.is_elementwise or len({x.dtype for x in given.values()}) > 1:
            return None  # a number's type would count where it has a dimension
        rank = max(x.dim() - (o in self.stacked) for o, x in given.items())
        for o, x in given.items():
            if o in self.stacked and x.dim() <= rank:
                given[o] = x.reshape(-1, *[1] * (rank + 1 - x.dim()), *x.shape[1:])
        return self.body.run(step.node, [given.get(o) for o in step.operands])

    def _joined(self, step: _C.BodyStep) -> Sequence[Tensor] | None:
        """functorch's rule takes the number of members for a constant."""
        if step.op not in ("aten::cat", "aten::stack"):
            return None
        dim = self.body.arguments(step.node)[1]
        parts = [self._stacked(o) for o in step.operands]
        join = torch.cat if step.op == "aten::cat" else torch.stack
        return [join(parts, dim + 1 if dim >= 0 else dim)]

    def _cross_entropy(self, step: _C.BodyStep) -> Sequence[Tensor] | None:
        """Of labels, without weights: functorch's rule is for a fixed number as well."""
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
        """All members' rows by a weight: one product, whose bias may join what follows it."""
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
            self.uses.append(_Use(PRODUCT, slot, out, rows, transposed != swapped))
        if b >= 0 and self._wants(slot_b):
            self.uses.append(_Use(PRODUCT, slot_b, out, None))
        return [out.reshape(*left.shape[:-1], right.shape[1])]

    def _embedding(self, step: _C.BodyStep) -> list[Tensor] | None:
        if step.op != "aten::embedding":
            return None
        table, indices = (self._argument(step, position) for position in (0, 1))
        padding, by_frequency, sparse = self.body.arguments(step.node)[2:5]
        slot, swapped = self.weights.get(table, (-1, True))
        if swapped or by_frequency or sparse or indices not in self.stacked:
            raise UnsupportedError("an embedding of this kind")
        found = self.values[indices]
        out = torch.nn.functional.embedding(found, self.values[table].detach())
        if self._wants(slot):
            out = _differentiable(out)
            self.uses.append(_Use(ROWS, slot, out, found.reshape(-1), skip=padding))
        return [out]


def pieces_of(body: _C.Body) -> dict[int, tuple[int, list[int], list[int]]]:
    """Views that together are all of a value (its `chunk`): dimension, all of them, lengths."""
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


# --- one graph of both directions ---


class Fakes:
    """Tensors without data, of n members."""

    def __init__(self, body: _C.Body) -> None:
        env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=env)
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        members = torch.empty(_MEMBERS)
        source = ConstantSource("n")
        line = self.mode.from_tensor(members, symbolic_context=context, source=source)
        self.n: Any = line.shape[0]
        self._guards = env.guards
        self.operands = [self._fake(o, o.is_weight) for o in body.operands]
        self.gradients = [self._fake(r, False) for r in body.results]

    def _fake(self, value: _C.BodyValue, is_weight: bool) -> Tensor:
        with self.mode, torch.inference_mode(False):
            if is_weight:
                sizes = tuple(value.sizes)
                return torch.empty_strided(
                    sizes, tuple(value.strides), dtype=value.dtype, device=value.device
                )
            return torch.empty((self.n, *value.sizes), dtype=value.dtype, device=value.device)

    def is_n(self, size: Any) -> bool:
        return not isinstance(size, int) and size.node.expr == self.n.node.expr

    def rows(self, value: Tensor) -> bool | None:
        """Whether its rows are members'; None if it depends on n in another way."""
        open_dims = [d for d, size in enumerate(value.shape) if not isinstance(size, int)]
        if not open_dims:
            return False
        return True if open_dims == [0] and self.is_n(value.shape[0]) else None

    def holds_for(self, n: int) -> bool:
        """Whether what was assumed of n is true of this one."""
        symbol = self.n.node.expr
        return all(bool(guard.expr.subs({symbol: n})) for guard in self._guards)


class Gradient(NamedTuple):
    """How an operand's gradient is made of backward's outputs."""

    kind: int
    slot: int
    output: int
    other: int = -1  # among the other factors
    output_first: bool = True
    skip: int = -1


class Joint:
    """The graph of a body with the gradients of some of its results."""

    def __init__(self, body: _C.Body, fakes: Fakes, reached: Sequence[int]) -> None:
        self._body, self._fakes, self._reached = body, fakes, reached
        self.gradients: list[Gradient] = []
        self._count = len(body.operands)
        given = [*fakes.operands, *(fakes.gradients[k] for k in reached)]
        with torch.inference_mode(False), torch.enable_grad(), fakes.mode:
            self.module = make_fx(self._run)(*given)
        if fakes.n.node.maybe_as_int() is not None:
            raise UnsupportedError("an op's batching rule is for a fixed number of members")
        self.module.graph.eliminate_dead_code()
        nodes = list(self.module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.operands = placeholders[: self._count]
        self.tangents = placeholders[self._count :]
        outputs = list(nodes[-1].args[0])
        ends = len(body.results), len(body.results) + self._num_others
        self.results = [_stripped(n, {"alias", "detach"}) for n in outputs[: ends[0]]]
        self.others = [_stripped(n, _SHAPES) for n in outputs[ends[0] : ends[1]]]
        self.outputs = outputs[ends[1] :]
        self._after = set(self.tangents)  # what is computed from them
        self._of_forward: set[fx.Node] = set()  # what was before that
        for node in nodes:
            if not self._after.isdisjoint(node.all_input_nodes):
                self._after.add(node)
            elif len(self._after) == len(self.tangents):
                self._of_forward.add(node)

    def _run(self, *given: Tensor) -> list[Tensor]:
        """Results, other factors, gradients."""
        operands = self._body.operands
        leaves = [
            tensor.detach().requires_grad_(operand.requires_grad and bool(self._reached))
            for tensor, operand in zip(given, operands, strict=False)
        ]
        run = _Run(self._body, bool(self._reached))
        results = run.run(leaves)
        others: list[Tensor] = []
        outputs: list[Tensor] = []
        if self._reached:
            self._differentiate(given[self._count :], leaves, run, results, others, outputs)
        self._num_others = len(others)
        return [t.detach() for t in (*results, *others, *outputs)]

    def _differentiate(
        self,
        tangents: Sequence[Tensor],
        leaves: Sequence[Tensor],
        run: _Run,
        results: Sequence[Tensor],
        others: list[Tensor],
        outputs: list[Tensor],
    ) -> None:
        slots = [slot for slot, leaf in enumerate(leaves) if leaf.requires_grad]
        targets = [leaves[slot] for slot in slots] + [use.output for use in run.uses]
        roots = [results[k] for k in self._reached]
        found = torch.autograd.grad(roots, targets, list(tangents), allow_unused=True)
        for slot, grad in zip(slots, found, strict=False):
            if grad is not None:
                kind = WHOLE if self._body.operands[slot].is_weight else STACKED
                self.gradients.append(Gradient(kind, slot, len(outputs)))
                outputs.append(grad)
        places: dict[int, int] = {}  # a matrix and its bias have one output
        for use, grad in zip(run.uses, found[len(slots) :], strict=True):
            if grad is None:
                continue
            at = places.setdefault(id(use.output), len(outputs))
            if at == len(outputs):
                outputs.append(grad.reshape(-1, grad.shape[-1]))
            other = -1 if use.other is None else len(others)
            if use.other is not None:
                others.append(use.other)
            self.gradients.append(
                Gradient(use.kind, use.slot, at, other, use.output_first, use.skip)
            )

    # --- its two parts ---

    def saved(self) -> list[fx.Node]:
        """What backward needs of forward: operands, and results of ops.

        Views and what has not a row for each member are computed again.
        """
        found: dict[fx.Node, None] = {}
        for node in self.others:
            if not self._can_save(node):
                raise UnsupportedError("a product of what no op has made")
            found[node] = None
        seen: set[fx.Node] = set()
        stack = list(self.outputs)
        while stack:
            node = stack.pop()
            if node in seen or node in self.tangents or self._is_count(node):
                continue
            seen.add(node)
            if node not in self._after and self._can_save(node):
                found[node] = None
            else:
                stack.extend(node.all_input_nodes)
        place = {node: i for i, node in enumerate(self.module.graph.nodes)}
        return sorted(found, key=place.__getitem__)

    def _can_save(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or self._fakes.rows(value) is None:
            return False
        if node.op == "placeholder":
            return node not in self.tangents
        is_made = node.op == "call_function" and len(node.all_input_nodes) > 0
        return node in self._of_forward and is_made and not _is_view(node) and value.is_contiguous()

    def _is_count(self, node: fx.Node) -> bool:
        return self._fakes.is_n(node.meta["val"]) if _is_size(node) else False

    def forward(self, saved: Sequence[fx.Node]) -> fx.GraphModule:
        """Operands to results and what is saved."""
        return _part(self.module, self.operands, [*self.results, *saved], {})

    def backward(self, saved: Sequence[fx.Node]) -> fx.GraphModule:
        """What is saved, and gradients of results, to gradients."""
        counts = [node for node in self.module.graph.nodes if self._is_count(node)]
        return _part(
            self.module,
            [*saved, *self.tangents],
            self.outputs,
            dict.fromkeys(counts, self.tangents[0] if self.tangents else None),
        )


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.aten.sym_size.int


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return _is_view(node.all_input_nodes[0])
    return _name(node) in _VIEWS


def _stripped(node: fx.Node, names: Iterable[str]) -> fx.Node:
    """What it is the same as but for these."""
    while node.op == "call_function" and _name(node) in names:
        node = node.all_input_nodes[0]
    return node


def tanh(x: Any) -> Any:
    """In float32, to two units in the last place; PyTorch's vectorized one takes far longer.

    The polynomial is that of Moshier's Cephes library.
    """
    z = x * x
    p = (2.06390887954e-2 - 5.70498872745e-3 * z) * z - 5.37397155531e-2
    p = (p * z + 1.33314422036e-1) * z - 3.33332819422e-1
    return torch.where(torch.abs(x) < 0.625, x * (1 + z * p), 1 - 2 / (torch.exp(2 * x) + 1))


def _is_tanh(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        node.target is torch.ops.aten.tanh.default
        and isinstance(value, Tensor)
        and value.dtype is torch.float32
        and value.device.type == "cpu"
    )


def _part(
    module: fx.GraphModule,
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    counts: dict[fx.Node, fx.Node | None],
) -> fx.GraphModule:
    """What computes the outputs from the inputs; `counts` are the number of rows of an input."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    needed, stack = set(copies), list(outputs)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend([] if node in counts else node.all_input_nodes)
    for node in module.graph.nodes:
        if node not in needed or node in copies:
            continue
        of = counts.get(node)
        if of is not None:
            copies[node] = graph.call_function(torch.ops.aten.sym_size.int, (copies[of], 0))
            copies[node].meta = dict(node.meta)
        elif node.op == "placeholder":
            raise UnsupportedError("its backward reads more than forward keeps")
        elif _is_tanh(node):
            copies[node] = tanh(fx.Proxy(copies[node.all_input_nodes[0]])).node
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(module, graph)
