"""Times the layers of PyTorch Geometric, a graph at a time, next to the package's ``Batch``.

python -m benchmarks.real.graph_layers                  all layers, about five minutes
python -m benchmarks.real.graph_layers GCN RGCN GAT     layers whose name contains a word

Each network has two layers of width 64, a mean over the nodes, and a classifier. A minibatch has 64
graphs of 10 to 60 nodes. The layers are called as dynamic cells. ``Batch.from_data_list`` is in the
time of the package's own version. A ratio above 1 means that the library is faster.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import torch_autobatch as ab
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

WIDTH, CLASSES, RELATIONS, EDGE_FEATURES, GRAPHS = 64, 4, 3, 8, 64
DEGREES = torch.tensor([0, 5, 20, 40, 60, 40, 20, 5, 2])

# A layer's constructor, and the attributes of a graph that the layer takes besides the features and
# the edges: the attribute by the name of the layer's argument.
Layer = tuple[Callable[[], nn.Module], dict[str, str]]


def mlp(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def layers() -> dict[str, Layer]:
    w, r, e = WIDTH, RELATIONS, EDGE_FEATURES
    attributes, weights = {"edge_attr": "edge_attr"}, {"edge_weight": "edge_weight"}
    types, position = {"edge_type": "edge_type"}, {"pos": "pos"}
    all_types = {"node_type": "node_type", **types, **attributes}
    return {
        "AGNN": (pyg.AGNNConv, {}),
        "AntiSymmetric": (lambda: pyg.AntiSymmetricConv(w), {}),
        "ARMA": (lambda: pyg.ARMAConv(w, w, num_stacks=2), {}),
        "APPNP": (lambda: pyg.APPNP(5, 0.1), {}),
        "CG": (lambda: pyg.CGConv(w, dim=e), attributes),
        "Cheb": (lambda: pyg.ChebConv(w, w, 3), {}),
        "ClusterGCN": (lambda: pyg.ClusterGCNConv(w, w), {}),
        "Dir": (lambda: pyg.DirGNNConv(pyg.SAGEConv(w, w)), {}),
        "EG": (lambda: pyg.EGConv(w, w, aggregators=["sum", "mean"]), {}),
        "Edge": (lambda: pyg.EdgeConv(mlp(2 * w)), {}),
        "FA": (lambda: pyg.FAConv(w), {"x_0": "x"}),
        "FastRGCN": (lambda: pyg.FastRGCNConv(w, w, r), types),
        "FeaSt": (lambda: pyg.FeaStConv(w, w, heads=4), {}),
        "FiLM": (lambda: pyg.FiLMConv(w, w), {}),
        "FiLM, relations": (lambda: pyg.FiLMConv(w, w, r), types),
        "GAT": (lambda: pyg.GATConv(w, 16, heads=4), {}),
        "GATv2": (lambda: pyg.GATv2Conv(w, 16, heads=4), {}),
        "GATv2, edges": (lambda: pyg.GATv2Conv(w, 16, heads=4, edge_dim=e), attributes),
        "GCN": (lambda: pyg.GCNConv(w, w), {}),
        "GCN, weights": (lambda: pyg.GCNConv(w, w), weights),
        "GCN2": (lambda: pyg.GCN2Conv(w, 0.1), {"x_0": "x"}),
        "GEN": (lambda: pyg.GENConv(w, w), {}),
        "General": (lambda: pyg.GeneralConv(w, w), {}),
        "General, attention": (lambda: pyg.GeneralConv(w, w, attention=True, heads=2), {}),
        "GIN": (lambda: pyg.GINConv(mlp()), {}),
        "GINE": (lambda: pyg.GINEConv(mlp(), edge_dim=e), attributes),
        "GMM": (lambda: pyg.GMMConv(w, w, dim=2, kernel_size=3), {"edge_attr": "coordinates"}),
        "Graph": (lambda: pyg.GraphConv(w, w), {}),
        "Gated": (lambda: pyg.GatedGraphConv(w, 3), {}),
        "HEAT": (lambda: pyg.HEATConv(w, w, r, r, 8, e, 8), all_types),
        "Hypergraph": (lambda: pyg.HypergraphConv(w, w), {}),
        "LE": (lambda: pyg.LEConv(w, w), {}),
        "LG": (pyg.LGConv, {}),
        "MF": (lambda: pyg.MFConv(w, w), {}),
        "MixHop": (lambda: pyg.MixHopConv(w, w // 2, powers=[0, 1]), {}),
        "NN": (lambda: pyg.NNConv(w, w, nn.Linear(e, w * w)), attributes),
        "PDN": (lambda: pyg.PDNConv(w, w, e, 16), attributes),
        "PNA": (lambda: pyg.PNAConv(w, w, ["mean", "max"], ["identity", "linear"], DEGREES), {}),
        "PointNet": (lambda: pyg.PointNetConv(mlp(w + 3)), position),
        "PointTransformer": (lambda: pyg.PointTransformerConv(w, w), position),
        "ResGated": (lambda: pyg.ResGatedGraphConv(w, w), {}),
        "RGAT": (lambda: pyg.RGATConv(w, 16, r, heads=4), types),
        "RGCN": (lambda: pyg.RGCNConv(w, w, r), types),
        "RGCN, bases": (lambda: pyg.RGCNConv(w, w, r, num_bases=2), types),
        "RGCN, blocks": (lambda: pyg.RGCNConv(w, w, r, num_blocks=4), types),
        "SAGE": (lambda: pyg.SAGEConv(w, w), {}),
        "SAGE, max": (lambda: pyg.SAGEConv(w, w, aggr="max"), {}),
        "SG": (lambda: pyg.SGConv(w, w, K=2), {}),
        "SSG": (lambda: pyg.SSGConv(w, w, alpha=0.1, K=2), {}),
        "SuperGAT": (lambda: pyg.SuperGATConv(w, 16, heads=4), {}),
        "TAG": (lambda: pyg.TAGConv(w, w), {}),
        "Transformer": (lambda: pyg.TransformerConv(w, 16, heads=4), {}),
        "Transformer, edges": (lambda: pyg.TransformerConv(w, 16, heads=4, edge_dim=e), attributes),
    }  # fmt: skip


def graph() -> Data:
    """Returns a random graph with four edges a node."""
    nodes = int(torch.randint(10, 61, ()))
    edges = torch.randint(nodes, (2, 4 * nodes))
    return Data(
        x=torch.randn(nodes, WIDTH),
        edge_index=edges,
        y=torch.randint(CLASSES, (1,)),
        edge_attr=torch.randn(4 * nodes, EDGE_FEATURES),
        coordinates=torch.rand(4 * nodes, 2),
        edge_weight=torch.rand(4 * nodes),
        edge_type=torch.randint(RELATIONS, (4 * nodes,)),
        node_type=torch.randint(RELATIONS, (nodes,)),
        pos=torch.randn(nodes, 3),
    )


class Network(nn.Module):
    """Two layers, a mean over the nodes, a classifier."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        make, self.attributes = layer
        self.layers = nn.ModuleList([make() for _ in range(2)])
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, data: Any, call: Callable[..., Tensor] | None = None) -> Tensor:
        given = {name: getattr(data, attribute) for name, attribute in self.attributes.items()}
        first = [given.pop(name) for name in ("x_0", "pos") if name in given]
        h = data.x
        for layer in self.layers:
            h = (call or _call)(layer, h, *first, data.edge_index, **given).relu()
        return self.out(pyg.global_mean_pool(h, data.batch))


def _call(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    return layer(*args, **kwargs)


def ratios(layer: Layer, rounds: int) -> tuple[float, float, str]:
    """Returns the package's time by ours, for inference and for training, and what is wrong."""
    torch.manual_seed(1)
    network = Network(layer)
    graphs = [graph() for _ in range(GRAPHS)]
    cells = {id(layer): ab.cell(layer, dynamic=True) for layer in network.layers}
    fault = ""

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        return cells[id(layer)](*args, **kwargs)

    def own(train: bool) -> Tensor:
        batch = Batch.from_data_list(graphs)
        return finish(F.cross_entropy(network(batch), batch.y, reduction="sum"), train)

    def ours(train: bool) -> Tensor:
        with ab.batch():
            losses = [F.cross_entropy(network(data, call), data.y) for data in graphs]
            return finish(torch.stack(losses).sum(), train)

    def finish(loss: Tensor, train: bool) -> Tensor:
        if train:
            network.zero_grad()
            loss.backward()
        return loss.detach()

    found: list[float] = []
    for train in (False, True):
        with torch.set_grad_enabled(train):
            for _ in range(14):
                result = ours(train)
            expected = own(train)
            if not torch.allclose(result, expected, rtol=1e-3):
                fault = f"differs: {float(result):.5g}, own {float(expected):.5g}"
            found.append(median(pair(own, ours, train) for _ in range(rounds)))
    return found[0], found[1], fault


def pair(own: Callable[[bool], Tensor], ours: Callable[[bool], Tensor], train: bool) -> float:
    seconds = []
    for run in (own, ours):
        for _ in range(2):  # the second one counts
            start = time.perf_counter()
            float(run(train))
            taken = time.perf_counter() - start
        seconds.append(taken)
    return seconds[0] / seconds[1]


def main(words: list[str], rounds: int = 9) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{'layer':22}{'inference':>10}{'training':>10}")
    for name, layer in layers().items():
        if not words or any(word in name for word in words):
            inference, training, fault = ratios(layer, rounds)
            print(f"{name:22}{inference:10.2f}{training:10.2f}  {fault}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
