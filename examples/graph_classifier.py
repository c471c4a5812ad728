"""A graph network on the syntax graphs of Python's standard library.

    python examples/graph_classifier.py [--steps N]

predicts the module of a function from its syntax tree. A graph has a node for each node of the
tree, and edges to its children and to the next sibling. Message passing is plain torch code for one
graph of any size: it gathers the rows at the edges' sources and adds them at their targets. In a
block, the graphs of a minibatch run as one call for each op, as if they were concatenated into one
graph with offsets added to the edges. The script compares loss and gradients of a step with eager
mode, trains, and times both modes.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

TOLERANCE = 1e-4
MODULES = ["argparse", "ast", "asyncio.events", "calendar", "decimal", "doctest", "fractions",
           "inspect", "logging", "pathlib", "pickle", "tarfile", "threading", "typing"]  # fmt: skip
PURE = {"decimal": "_pydecimal"}  # modules whose Python source is in another module
SMALLEST, LARGEST = 10, 200  # number of nodes of a graph

KINDS = sorted(
    name for name, kind in vars(ast).items() if isinstance(kind, type) and issubclass(kind, ast.AST)
)


@dataclass(frozen=True)
class Graph:
    """Node kinds [n], edges [2, e] (source row, target row), and the class [1]."""

    kinds: Tensor
    edges: Tensor
    target: Tensor


class GraphClassifier(nn.Module):
    """Layers of mean aggregation (GraphSAGE) in both directions, then mean and maximum pooling."""

    def __init__(self, hidden: int = 64, layers: int = 3):
        super().__init__()
        self.embedding = nn.Embedding(len(KINDS), hidden)
        self.own = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
        self.out = nn.Linear(2 * hidden, len(MODULES))

    def forward(self, graph: Graph) -> Tensor:
        """Returns the scores of the modules, of shape [1, number of modules]."""
        h = self.embedding(graph.kinds)
        begin, end = graph.edges
        for own, down, up in zip(self.own, self.down, self.up, strict=True):
            messages = neighbours(down(h), begin, end) + neighbours(up(h), end, begin)
            h = F.relu(own(h) + messages)
        return self.out(torch.cat([h.mean(0, keepdim=True), h.amax(0, keepdim=True)], dim=1))


def neighbours(x: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    """Returns, for each node, the mean of x [n, d] over the sources of its incoming edges.

    The mean is zero for a node without incoming edges.
    """
    total = torch.zeros_like(x).index_add(0, end, x[begin])
    degree = x.new_zeros(len(x)).index_add(0, end, x.new_ones(len(end)))
    return total / degree.clamp(min=1).unsqueeze(1)


def syntax_graph(function: ast.AST, target: int) -> Graph:
    nodes = list(ast.walk(function))
    number = {node: i for i, node in enumerate(nodes)}
    edges = []
    for node in nodes:
        children = [number[child] for child in ast.iter_child_nodes(node)]
        edges += [(number[node], child) for child in children]
        edges += list(pairwise(children))
    kinds = [KINDS.index(type(node).__name__) for node in nodes]
    return Graph(torch.tensor(kinds), torch.tensor(edges).t(), torch.tensor([target]))


def functions(module: str) -> Iterator[ast.AST]:
    source = inspect.getsource(importlib.import_module(PURE.get(module, module)))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield node


def load_graphs() -> list[Graph]:
    """Returns the graphs of all functions with SMALLEST to LARGEST nodes."""
    graphs = [
        syntax_graph(function, target)
        for target, module in enumerate(MODULES)
        for function in functions(module)
    ]
    return [graph for graph in graphs if SMALLEST <= len(graph.kinds) <= LARGEST]


def mean_loss(model: GraphClassifier, graphs: Sequence[Graph], enabled: bool = True) -> Tensor:
    """Returns the mean loss. Runs one graph after the other, without a batch dimension."""
    with ab.batch(enabled=enabled):
        losses = [F.cross_entropy(model(graph), graph.target) for graph in graphs]
        return torch.stack(losses).mean()


def step(
    model: GraphClassifier, graphs: Sequence[Graph], enabled: bool
) -> tuple[float, list[Tensor]]:
    """Runs forward and backward. Returns the seconds, and the loss with the gradients."""
    model.zero_grad(set_to_none=True)
    start = time.perf_counter()
    loss = mean_loss(model, graphs, enabled)
    torch.autograd.backward(loss)
    seconds = time.perf_counter() - start
    return seconds, [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]


def accuracy(model: GraphClassifier, graphs: Sequence[Graph]) -> float:
    with torch.no_grad(), ab.batch():
        chosen = torch.cat([model(graph).argmax(1) for graph in graphs])
    return (chosen == torch.cat([graph.target for graph in graphs])).float().mean().item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, times and trains. Returns 1 if results differ from eager mode."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="of timing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    graphs = load_graphs()
    draw.shuffle(graphs)
    held_out, graphs = graphs[:200], graphs[200:]
    model = GraphClassifier(options.hidden)

    times: dict[bool, list[float]] = {True: [], False: []}
    difference = 0.0
    for turn in range(options.rounds + 1):
        minibatch = draw.sample(graphs, options.minibatch)
        results = {}
        for enabled in times:
            seconds, results[enabled] = step(model, minibatch, enabled)
            if turn > 0:  # the first turn is the warm-up
                times[enabled].append(seconds)
        largest = max(t.abs().max().item() for t in results[False])
        for a, b in zip(results[True], results[False], strict=True):
            difference = max(difference, (a - b).abs().max().item() / largest)
    print(f"differs from eager by {difference:.1e} of the largest gradient")
    for enabled, seconds in times.items():
        rate = options.minibatch / median(seconds)
        print(f"  {'torch_autobatch' if enabled else 'eager':<16}{rate:8.0f} graphs/s")

    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for number in range(1, options.steps + 1):
        _, (loss, *_) = step(model, draw.sample(graphs, options.minibatch), True)
        optimizer.step()
        if number % 50 == 0 or number == options.steps:
            print(f"  step {number:4d}: loss {loss.item():.3f}")
    print(f"  {len(held_out)} functions not seen in training: {accuracy(model, held_out):.0%}")
    return int(not difference <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
