"""PyTorch Geometric, without compiled extensions: graphs, compared with the package's ``Batch``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import (
    GatedGraphConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    PNAConv,
    RGCNConv,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import AttentionalAggregation

from benchmarks.real.case import Case, lengths, model

FEATURES, HIDDEN, CLASSES, RELATIONS = 16, 32, 5, 4


def graph(nodes: int) -> Data:
    """Makes a random graph that has a few more edges than a tree."""
    edges = torch.randint(nodes, (2, 2 * nodes))
    return Data(
        x=torch.randn(nodes, FEATURES),
        edge_index=torch.cat([edges, edges.flip(0)], dim=1),
        edge_type=torch.randint(RELATIONS, (4 * nodes,)),
        y=torch.randint(CLASSES, (1,)),
    )


class Network(nn.Module):
    """Two layers, a pooling layer and a classifier."""

    def __init__(
        self,
        layer: Callable[[int, int], nn.Module],
        pool: Callable[..., Tensor] = global_mean_pool,
        typed: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList([layer(FEATURES, HIDDEN), layer(HIDDEN, HIDDEN)])
        self.pool, self.typed = pool, typed
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, data: Any) -> Tensor:
        h = data.x
        types = (data.edge_type,) if self.typed else ()
        for layer in self.layers:
            h = layer(h, data.edge_index, *types).relu()
        return self.out(self.pool(h, data.batch))


def case(network: Network) -> Case:
    def one(data: Data) -> Tensor:
        return F.cross_entropy(network(data), data.y)

    def own(graphs: Sequence[Data]) -> Tensor:
        batch = Batch.from_data_list(list(graphs))
        return F.cross_entropy(network(batch), batch.y, reduction="none")

    examples = [graph(n) for n in lengths(5, 24)]
    return Case(network, examples, one, own, cells=[*network.layers])


@model("GCN")
def gcn() -> Case:
    return case(Network(GCNConv))


@model("RGCN")
def rgcn() -> Case:
    return case(Network(lambda n, m: RGCNConv(n, m, RELATIONS, num_bases=2), typed=True))


@model("GATv2")
def gat() -> Case:
    return case(Network(lambda n, m: GATv2Conv(n, m // 4, heads=4)))


@model("GIN with batch norm")
def gin() -> Case:
    def layer(n: int, m: int) -> nn.Module:
        mlp = nn.Sequential(nn.Linear(n, m), nn.BatchNorm1d(m), nn.ReLU(), nn.Linear(m, m))
        return GINConv(mlp, train_eps=True)

    made = case(Network(layer, global_add_pool))
    made.own = None  # in its batches, batch norm uses the statistics of all graphs
    return made


@model("GraphSAGE")
def sage() -> Case:
    return case(Network(lambda n, m: SAGEConv(n, m, normalize=True), global_max_pool))


@model("PNA")
def pna() -> Case:
    def layer(n: int, m: int) -> nn.Module:
        return PNAConv(
            n, m, ["mean", "min", "max", "std"], ["identity", "amplification"],
            deg=torch.tensor([0, 2, 4, 8, 8, 4, 2]),
        )  # fmt: skip

    return case(Network(layer))


@model("gated graph network")
def gated() -> Case:
    pool = AttentionalAggregation(nn.Linear(HIDDEN, 1))
    return case(Network(lambda n, m: GatedGraphConv(m, num_layers=3), pool))
