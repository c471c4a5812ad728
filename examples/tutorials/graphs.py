"""
Graphs
======

A graph network that counts the leaves of a graph. Each graph has its own number of nodes and edges.
The model is written for one graph: no node numbers are shifted, and no vector says which node
belongs to which graph.
"""

import random

import torch
import torch_autobatch as ab
from pictures import draw_batches, draw_times, milliseconds
from torch import Tensor, nn

torch.manual_seed(0)
torch.set_num_threads(1)
draw = random.Random(0)

# %%
# The data
# --------
#
# A graph consists of edges in both directions, as two tensors: their start nodes and their end
# nodes.


class Graph:
    def __init__(self, nodes: int) -> None:
        edges = [(node, draw.randrange(node)) for node in range(1, nodes)]
        both = edges + [(end, start) for start, end in edges]
        self.nodes = nodes
        self.start, self.end = torch.tensor(both).T
        self.leaves = int((torch.bincount(self.start) == 1).sum())


graphs = [Graph(draw.randint(4, 20)) for _ in range(400)]
print("nodes:", min(g.nodes for g in graphs), "to", max(g.nodes for g in graphs))
print("leaves:", min(g.leaves for g in graphs), "to", max(g.leaves for g in graphs))

# %%
# The model
# ---------
#
# Two rounds of messages. A node adds the messages of its neighbours, and the output of the graph is
# the sum over its nodes.


class Network(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.first = nn.Embedding(1, hidden)  # all nodes have the same first state
        self.message = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.update = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in range(2))
        self.answer = nn.Linear(hidden, 1)

    def forward(self, graph: Graph) -> Tensor:
        state = self.first(torch.zeros(graph.nodes, dtype=torch.long))  # [nodes, hidden]
        for message, update in zip(self.message, self.update, strict=True):
            sent = message(state)[graph.start]  # [edges, hidden]
            heard = torch.zeros_like(state).index_add(0, graph.end, sent)  # [nodes, hidden]
            state = update(torch.cat([state, heard], 1)).relu()
        return self.answer(state).sum()


model = Network()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def step(minibatch: list[Graph], enabled: bool = True) -> tuple[float, ab.batch]:
    optimizer.zero_grad()
    with ab.batch(enabled=enabled) as scope:
        counts = torch.stack([model(graph) for graph in minibatch])
        wanted = torch.tensor([float(graph.leaves) for graph in minibatch])
        loss = nn.functional.mse_loss(counts, wanted)
    loss.backward()
    optimizer.step()
    return loss.item(), scope


for number in range(100):
    loss, scope = step(draw.sample(graphs[:300], 32))
    if number % 25 == 0:
        print(f"step {number:3}  mean squared error {loss:7.3f}")

with torch.no_grad(), ab.batch():
    counts = [model(graph) for graph in graphs[300:]]
errors = [abs(float(c) - g.leaves) for c, g in zip(counts, graphs[300:], strict=True)]
print(f"held out: {sum(errors) / len(errors):.2f} leaves off on average")

# %%
# What was batched
# ----------------
#
# The rows of all graphs are concatenated, so a layer is one call whatever the sizes are.

draw_batches(scope.report())

# %%
# The time of a step
# ------------------

minibatch = graphs[:64]
eager = milliseconds(lambda: step(minibatch, enabled=False))
ours = milliseconds(lambda: step(minibatch))
draw_times(eager, ours, "a training step of 64 graphs")

# %%
# A graph network has few and large ops, so there is less to gain than with trees. Libraries for
# graphs that merge the minibatch before the step, such as PyTorch Geometric, are faster still: use
# them if the model consists only of message passing.
