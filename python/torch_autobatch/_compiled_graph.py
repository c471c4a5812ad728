"""The joint graph of a cell's body for n members, and its forward and backward parts.

The joint graph computes forward and backward. ``make_fx`` traces the body's tape on stacked
operands and on the gradients of the results. n is a symbolic size.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from torch_autobatch import _C
from torch_autobatch._compiled_tape import STACKED, WHOLE, Run
from torch_autobatch._compiled_views import UnsupportedError

_MEMBERS = 64  # Inductor optimizes the code for about this number of members

_SHAPES = frozenset({"alias", "detach", "view", "_unsafe_view"})  # they keep elements in order
_VIEWS = _SHAPES | {
    *("as_strided", "expand", "permute", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "t", "transpose", "unbind", "unsqueeze"),
}


# --- the joint graph ---


class Fakes:
    """Fake tensors of n members, without data."""

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
        """Whether ``value`` has a row for each member; None: it depends on n in a different way."""
        open_dims = [d for d, size in enumerate(value.shape) if not isinstance(size, int)]
        if not open_dims:
            return False
        return True if open_dims == [0] and self.is_n(value.shape[0]) else None

    def holds_for(self, n: int) -> bool:
        """Returns whether ``n`` satisfies the assumptions made while tracing."""
        symbol = self.n.node.expr
        return all(bool(guard.expr.subs({symbol: n})) for guard in self._guards)


class Gradient(NamedTuple):
    """How to compute an operand's gradient, or one term of it, from backward's outputs."""

    kind: int
    slot: int
    output: int
    other: int = -1  # index in `Joint.others`; -1: none
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
            raise UnsupportedError(
                "the batching rule of an op works for only one number of members"
            )
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
        self._after = set(self.tangents)  # the tangents, and nodes that depend on tangents
        self._of_forward: set[fx.Node] = set()  # nodes before the first node in `_after`
        for node in nodes:
            if not self._after.isdisjoint(node.all_input_nodes):
                self._after.add(node)
            elif len(self._after) == len(self.tangents):
                self._of_forward.add(node)

    def _run(self, *given: Tensor) -> list[Tensor]:
        """Returns results, other factors and gradients, in this order."""
        operands = self._body.operands
        leaves = [
            tensor.detach().requires_grad_(operand.requires_grad and bool(self._reached))
            for tensor, operand in zip(given, operands, strict=False)
        ]
        run = Run(self._body, bool(self._reached))
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
        run: Run,
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
        # Maps the id of a use's output to an index in `outputs`. A matrix and its bias share the
        # index.
        places: dict[int, int] = {}
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

    # --- the two parts ---

    def saved(self) -> list[fx.Node]:
        """Returns the nodes of forward that backward needs: operands, and results of ops.

        Other nodes are recomputed in backward: views, and values that depend on n but have no row
        for each member.
        """
        found: dict[fx.Node, None] = {}
        for node in self.others:
            if not self._can_save(node):
                raise UnsupportedError(
                    "an operand of a product is neither an input of the cell nor an op's result"
                )
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
        """Returns the graph that computes results and saved tensors from operands."""
        return _part(self.module, self.operands, [*self.results, *saved], {})

    def backward(self, saved: Sequence[fx.Node]) -> fx.GraphModule:
        """Returns the graph that computes gradients of operands.

        Its inputs are the saved tensors and the gradients of the results.
        """
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
    """Skips ops in ``names``: follows their inputs, and returns the first node of another op."""
    while node.op == "call_function" and _name(node) in names:
        node = node.all_input_nodes[0]
    return node


def tanh(x: Any) -> Any:
    """Computes tanh in float32, with an error of at most two units in the last place.

    PyTorch's vectorized tanh is much slower. The polynomial is from Moshier's Cephes library.
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
    """Returns the graph that computes the outputs from the inputs.

    `counts`: maps each node whose value is n to an input that has n rows.
    """
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
            raise UnsupportedError("its backward reads a value that its forward does not save")
        elif _is_tanh(node):
            copies[node] = tanh(fx.Proxy(copies[node.all_input_nodes[0]])).node
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(module, graph)
