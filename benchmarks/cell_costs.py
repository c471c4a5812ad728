"""Cells: cost of capture and schedule, for one call of a cell and by granularity.

python -m benchmarks.cell_costs [--rounds 9]

The first table shows the cost of one call of a cell, divided by the time of an eager addition of
one-element tensors under no_grad. It is measured on chains of 30 calls in 64 instances, on tensors
of 4 numbers. Inputs are embeddings. The results that a model would keep are kept. "Capture" is the
time of the loop in the block. "Schedule" is the time in which the flush at the end of the block
finds its schedule.

The second table shows the trade-off of Zha et al. 2019 (Just-in-Time Dynamic Batching), section 4.
The model is also theirs: a child-sum Tree-LSTM on pairs of sentences. With a larger unit of capture
there are fewer nodes to analyse, but fewer nodes have equal structure. The measurement uses the
original trees, which rarely have equal structure, and trees of four structures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from random import Random
from statistics import median

import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

from benchmarks import cells, measure, tables
from benchmarks.data import VOCABULARY, Tree, make_tree, word_ids
from benchmarks.measure import Step, clock, run_step
from benchmarks.workload import Sources
from benchmarks.workloads.trees import EMBEDDING, Pair, PairSimilarity, SentencePairs

# isort: split
from child_sum_tree_lstm import ChildSumTreeLSTM  # benchmarks.data put examples/ on the path

State = tuple[Tensor, Tensor]
Chain = Callable[[Sequence[Tensor]], list[Tensor]]

# ---------------------------------------------------------------- cost of one call

INSTANCES, STEPS, SIZE, WORDS = 64, 30, 4, 100
USES = INSTANCES * STEPS
GOAL = 2.0


class Cells(nn.Module):
    """Several cells, and for each cell a function that chains its calls (one instance)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.layer = nn.Linear(SIZE, SIZE)
        self.gates = nn.Linear(2 * SIZE, 4 * SIZE)
        self.tree_gates = nn.Linear(2 * SIZE, 5 * SIZE)
        self.start = torch.zeros(1, SIZE), torch.zeros(1, SIZE)

    @ab.cell
    def update(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()

    @ab.cell
    def lstm(self, x: Tensor, h: Tensor, c: Tensor) -> State:
        i, f, o, g = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    @ab.cell
    def node(self, left: State, right: State) -> State:
        i, o, g, f, e = self.tree_gates(torch.cat([left[0], right[0]], 1)).chunk(5, 1)
        c = i.sigmoid() * g.tanh() + f.sigmoid() * left[1] + e.sigmoid() * right[1]
        return o.sigmoid() * c.tanh(), c

    def updates(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Chains calls of a cell with one input and one output. Each result is kept."""
        x, out = xs[0], []
        for _ in xs:
            x = self.update(x)
            out.append(x)
        return out

    def sequence(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Chains LSTM steps, with three inputs and two outputs. Each h is kept."""
        h, c = self.start
        out = []
        for x in xs:
            h, c = self.lstm(x, h, c)
            out.append(h)
        return out

    def tree(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """Chains tree nodes, with two input pairs and one output pair. Each h is kept."""
        state, out = self.start, []
        for x in xs:
            state = self.node(state, (x, x))
            out.append(state[0])
        return out


def eager_addition(calls: int = 2000) -> float:
    x = torch.rand(1, 1)
    with torch.no_grad():
        start = clock()
        for _ in range(calls):
            x + x
        return (clock() - start) / calls


def use_costs_of(model: Cells, chain: Chain) -> tuple[float, float]:
    """Returns the seconds of capture and of schedule for one call. All results are kept.

    The inputs are embeddings that are captured before the calls. Only the schedule's time includes
    them.
    """
    words = [list(torch.randint(WORDS, (STEPS, 1)).unbind()) for _ in range(INSTANCES)]

    def embedded() -> list[list[Tensor]]:
        return [[model.embedding(word) for word in each] for each in words]

    with ab.batch():
        instances = embedded()
        start = clock()
        kept = [chain(xs) for xs in instances]
        end = clock()
    del kept, instances
    schedule = measure.schedule_seconds(lambda: [chain(xs) for xs in embedded()])
    return (end - start) / USES, schedule / USES


def use_costs(rounds: int) -> str:
    """Returns the table of capture, schedule and their sum, with a row for each cell."""
    model = Cells()
    chains: dict[str, Chain] = {
        "a tensor in, a tensor out": model.updates,
        "LSTM step, 3 in, 2 out": model.sequence,
        "tree node, 2 pairs in, a pair out": model.tree,
    }
    rows = []
    for name, chain in chains.items():
        for grad in (False, True):
            found = []
            for turn in range(rounds + 2):
                with torch.set_grad_enabled(grad):
                    captured, scheduled = use_costs_of(model, chain)
                addition = eager_addition()
                costs = (captured, scheduled, captured + scheduled)
                if turn >= 2:  # after the warm-up
                    found.append([cost / addition for cost in costs])
            row = [f"{median(column):.2f}" for column in zip(*found, strict=True)]
            rows.append([f"{name}; {'with gradients' if grad else 'no_grad'}", *row])
    header = ["a use, by an eager addition", "capture", "schedule", f"both (goal {GOAL:g})"]
    return tables.table(header, rows)


# ---------------------------------------------------------------- cost by granularity


MINIBATCH, HIDDEN = 64, 150
FEW = 4  # number of tree structures; many sentences share a structure
Nodes = tuple[list[Tensor], tuple[tuple[int, ...], ...]]  # symbols and children of a tree


class Parts(ChildSumTreeLSTM):
    """The model of the example, with its node split into small functions."""

    def leaf_gates(self, iou: Tensor) -> State:
        i, o, u = iou.chunk(3, dim=-1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c

    def forget(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return (x + h).sigmoid() * c

    def gates(self, words: Tensor, below: Tensor, kept: Tensor) -> State:
        i, o, u = (words + below).chunk(3, dim=-1)
        c = i.sigmoid() * u.tanh() + kept.sum(0)
        return o.sigmoid() * c.tanh(), c

    def node(self, symbol: Tensor, below: list[State]) -> State:
        x = self.embedding(symbol)
        if not below:
            return self.leaf_gates(self.w_iou(x))
        h = torch.stack([h for h, _ in below])
        c = torch.stack([c for _, c in below])
        kept = self.forget(self.w_f(x), self.u_f(h), c)
        return self.gates(self.w_iou(x), self.u_iou(h.sum(0)), kept)


class Grained(PairSimilarity):
    """The model of the workload, with a function for each unit of capture."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.encoder = Parts(VOCABULARY, 1, EMBEDDING, hidden)
        del self.encoder.classifier

    def sentence(self, tree: Nodes) -> Tensor:
        """Returns the hidden state of the root, of shape [1, hidden]."""
        states: list[State] = []
        for symbol, below in zip(*tree, strict=True):
            states.append(self.encoder.node(symbol, [states[child] for child in below]))
        return states[-1][0]

    def pair(self, left: Nodes, right: Nodes, target: Tensor) -> Tensor:
        scores = self.log_probabilities(self.sentence(left), self.sentence(right))
        return F.kl_div(scores, target, reduction="sum")

    def forward(self, pair: Pair) -> Tensor:
        left, right = ((tree.symbols, tuple(tree.children)) for tree in (pair.left, pair.right))
        return self.pair(left, right, pair.target)


UNITS: dict[str, tuple[str, ...]] = {
    "op": (),
    "gates": ("encoder.leaf_gates", "encoder.forget", "encoder.gates"),
    "node": ("encoder.node", "log_probabilities"),
    "sentence": ("sentence", "log_probabilities"),
    "pair": ("pair",),
}


def alike(examples: Sequence[Pair], structures: int) -> list[Pair]:
    """Returns pairs of trees with only ``structures`` structures, and with new random words."""
    draw = Random(0)
    shapes = [pair.left.children for pair in examples[:structures]]

    def tree() -> Tree:
        children = draw.choice(shapes)
        # Each word has a separate tensor. If two arguments were the same tensor, the cell's call
        # would be of a different kind.
        ids = word_ids(draw, len(children))
        return make_tree([torch.tensor([i]) for i in ids], children, [])

    return [Pair(tree(), tree(), pair.target) for pair in examples]


def granularity_costs(rounds: int, structures: int | None = None) -> list[list[str]]:
    """Returns a row of medians for each unit of capture. All units run on each minibatch."""
    workload = SentencePairs(HIDDEN, Sources(), seed=0)
    workload.model = Grained(HIDDEN)
    if structures is not None:
        workload.examples = alike(workload.examples, structures)
    variants: dict[str, Callable[..., Step]] = {
        name: lambda w, m, _, methods=methods: cells.step(w, m, methods)
        for name, methods in UNITS.items()
    }
    cells.check(variants, workload, MINIBATCH)
    found: dict[str, list[list[float]]] = {name: [] for name in variants}
    for turn in range(rounds + 2):
        examples = workload.minibatch(MINIBATCH, turn)
        for name, run in variants.items():
            step = run_step(run, workload, examples, True)
            with cells.as_cells(workload.model, UNITS[name]):
                schedule = measure.schedule_seconds(
                    lambda examples=examples: measure.eager_losses(workload, examples)
                )
            capture, flush, backward = step.stages.values()
            seconds = [capture, schedule, capture + schedule, flush - schedule, backward]
            if turn >= 2:  # after the warm-up
                milliseconds = [1e3 * value for value in (*seconds, step.seconds)]
                found[name].append([step.report.nodes, step.report.batches, *milliseconds])
    data = "all" if structures is None else str(structures)
    rows = []
    for name, measured in found.items():
        nodes, batches, *times = (median(column) for column in zip(*measured, strict=True))
        counts = [f"{nodes:.0f}", f"{batches:.0f}"]
        rows.append([name, data, *counts, *(f"{t:.1f}" for t in times)])
    return rows


def granularities(rounds: int) -> str:
    header = ["unit of capture", "structures", "nodes", "batches", "capture ms", "schedule ms"]
    header += ["analysis ms", "rest of flush ms", "backward ms", "step ms"]
    return tables.table(header, granularity_costs(rounds) + granularity_costs(rounds, FEW))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(use_costs(options.rounds))
    print(granularities(options.rounds))


if __name__ == "__main__":
    main()
