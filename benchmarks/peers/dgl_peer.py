"""DGL 1.1.3: Tree-LSTMs by message passing over the nodes of a batched graph, level by level.

The user rewrites the model as message, reduce and apply functions (DGL's own tree_lstm example).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

os.environ.setdefault("DGLBACKEND", "pytorch")
import dgl

from benchmarks import collate
from benchmarks.measure import Step, timed_losses
from benchmarks.workload import Workload

_graphs: dict[int, Any] = {}  # one for each tree, made with the data as in DGL's loaders


def _graph(tree: Any) -> Any:
    """Returns the edges from children to parents, in order."""
    if id(tree) not in _graphs:
        child, parent = tree.links
        _graphs[id(tree)] = graph = dgl.graph(
            (torch.from_numpy(child), torch.from_numpy(parent)), num_nodes=len(tree.children)
        )
        graph.ndata["symbol"] = torch.from_numpy(tree.symbol_ids)
        graph.ndata["leaf"] = torch.from_numpy(tree.is_leaf)
        if len(tree.target_ids) == len(tree.children):
            graph.ndata["target"] = torch.from_numpy(tree.target_ids)
        graph.ndata["root"] = torch.zeros(len(tree.children), dtype=torch.bool)
        graph.ndata["root"][-1] = True
        _graphs[id(tree)] = (graph, tree)  # the tree is kept alive, so that its id stays unique
    return _graphs[id(tree)][0]


def _copy_states(edges: Any) -> dict[str, Tensor]:
    return {"h": edges.src["h"], "c": edges.src["c"]}


def _trees_of(graph: Any, size: int) -> Tensor:
    return torch.repeat_interleave(torch.arange(size, device=graph.device), graph.batch_num_nodes())


def binary_trees(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    model: Any = workload.model
    graph = dgl.batch([_graph(tree) for tree in minibatch]).to(workload.device)
    hidden = model.classifier.in_features
    leaf = graph.ndata["leaf"]
    iou = model.embedding.weight.new_zeros(graph.num_nodes(), 3 * hidden)
    rows = leaf.nonzero().squeeze(1)
    words = model.embedding(graph.ndata["symbol"].index_select(0, rows))
    graph.ndata["iou"] = iou.index_copy(0, rows, model.w(words))
    graph.ndata["h"] = graph.ndata["c"] = iou[:, :hidden]

    def reduce(nodes: Any) -> dict[str, Tensor]:
        h = nodes.mailbox["h"].flatten(1)
        iou, f = model.u(h).split([3 * hidden, 2 * hidden], dim=-1)
        c = nodes.mailbox["c"]
        return {"iou": iou, "c": (f.sigmoid().view_as(c) * c).sum(1)}

    def apply(nodes: Any) -> dict[str, Tensor]:
        i, o, u = nodes.data["iou"].chunk(3, dim=-1)
        c = i.sigmoid() * u.tanh() + nodes.data["c"]
        return {"h": o.sigmoid() * c.tanh(), "c": c}

    dgl.prop_nodes_topo(graph, _copy_states, reduce, apply_node_func=apply)
    scores = model.classifier(graph.ndata["h"])
    losses = F.cross_entropy(scores, graph.ndata["target"], reduction="none")
    return collate.sum_by(_trees_of(graph, len(minibatch)), losses, len(minibatch))


def sentence_pairs(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    model: Any = workload.model
    encoder = model.encoder
    trees = [pair.left for pair in minibatch] + [pair.right for pair in minibatch]
    graph = dgl.batch([_graph(tree) for tree in trees]).to(workload.device)
    x = encoder.embedding(graph.ndata["symbol"])
    hidden = encoder.u_f.in_features
    graph.ndata["iou"] = encoder.w_iou(x)
    graph.ndata["f"] = encoder.w_f(x)
    graph.ndata["h"] = graph.ndata["c"] = graph.ndata["sum"] = x.new_zeros(len(x), hidden)

    def reduce(nodes: Any) -> dict[str, Tensor]:
        h, c = nodes.mailbox["h"], nodes.mailbox["c"]
        f = (nodes.data["f"].unsqueeze(1) + encoder.u_f(h)).sigmoid()
        return {"iou": nodes.data["iou"] + encoder.u_iou(h.sum(1)), "sum": (f * c).sum(1)}

    def apply(nodes: Any) -> dict[str, Tensor]:
        i, o, u = nodes.data["iou"].chunk(3, dim=-1)
        c = i.sigmoid() * u.tanh() + nodes.data["sum"]
        return {"h": o.sigmoid() * c.tanh(), "c": c}

    dgl.prop_nodes_topo(graph, _copy_states, reduce, apply_node_func=apply)
    roots = graph.ndata["h"][graph.ndata["root"]]
    scores = model.log_probabilities(*roots.chunk(2))
    targets = torch.cat([pair.target for pair in minibatch])
    return F.kl_div(scores, targets, reduction="none").sum(-1)


LOSSES: dict[str, Callable[[Workload, Sequence[Any]], Tensor]] = {
    "binary-tree-lstm": binary_trees,
    "child-sum-pairs": sentence_pairs,
}


def variants(workload: Workload) -> dict[str, Callable[..., Step]]:
    """Returns the workload's step if it can be written as message passing."""
    losses = LOSSES.get(workload.name)
    return {} if losses is None else {"dgl": timed_losses(losses)}
