"""
Trees
=====

A model that evaluates Boolean expressions such as ``(a and not b) or c``. Expressions are trees of
different shapes, so no tensor can hold a minibatch of them. The model is written for one tree, as a
recursive function.
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
# A tree is a truth value or an operator with its operands.

OPERATORS = {"and": all, "or": any, "not": lambda operands: not operands[0]}
Tree = bool | tuple[str, list["Tree"]]


def random_tree(depth: int) -> Tree:
    if depth == 0 or draw.random() < 0.15:
        return draw.random() < 0.5
    operator = draw.choice(list(OPERATORS))
    count = 1 if operator == "not" else draw.randint(2, 4)
    return operator, [random_tree(depth - 1) for _ in range(count)]


def value(tree: Tree) -> bool:
    if isinstance(tree, bool):
        return tree
    operator, operands = tree
    return bool(OPERATORS[operator]([value(operand) for operand in operands]))


def size(tree: Tree) -> int:
    return 1 if isinstance(tree, bool) else 1 + sum(map(size, tree[1]))


trees = [random_tree(4) for _ in range(600)]
print("an expression:", min((t for t in trees if size(t) > 8), key=size))
print("nodes of a tree:", min(map(size, trees)), "to", max(map(size, trees)))

# %%
# The model
# ---------
#
# A truth value is a row of an embedding. Each operator is a layer, which takes the sum of its
# operands' vectors. So operators may have any number of operands.


class Evaluator(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.constant = nn.Embedding(2, hidden)
        self.operand = nn.Linear(hidden, hidden)
        self.operator = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in OPERATORS})
        self.answer = nn.Linear(hidden, 2)

    def encode(self, tree: Tree) -> Tensor:
        if isinstance(tree, bool):
            return self.constant(torch.tensor(int(tree)))
        operator, operands = tree
        total = sum(self.operand(self.encode(operand)).relu() for operand in operands)
        return self.operator[operator](total).tanh()

    def forward(self, tree: Tree) -> Tensor:
        return self.answer(self.encode(tree))  # scores of False and True, [2]


model = Evaluator()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

# %%
# A training step
# ---------------
#
# The loop over examples is inside a block. ``enabled=False`` runs the same code in eager mode.


def step(minibatch: list[Tree], enabled: bool = True) -> tuple[float, ab.batch]:
    optimizer.zero_grad()
    with ab.batch(enabled=enabled) as scope:
        scores = torch.stack([model(tree) for tree in minibatch])
        labels = torch.tensor([int(value(tree)) for tree in minibatch])
        loss = nn.functional.cross_entropy(scores, labels)
    loss.backward()
    optimizer.step()
    return loss.item(), scope


train, held_out = trees[:500], trees[500:]
for number in range(60):
    loss, scope = step(draw.sample(train, 64))
    if number % 15 == 0:
        print(f"step {number:3}  loss {loss:.3f}")

with torch.no_grad(), ab.batch():
    answers = torch.stack([model(tree) for tree in held_out])
right = sum(int(a) == value(tree) for a, tree in zip(answers.argmax(1), held_out, strict=True))
print(f"held out: {right} of {len(held_out)} right")

# %%
# What was batched
# ----------------
#
# The layers of one operator run together, at any depth and in any tree.

draw_batches(scope.report())

# %%
# The time of a step
# ------------------

minibatch = train[:64]
eager = milliseconds(lambda: step(minibatch, enabled=False), rounds=3)
ours = milliseconds(lambda: step(minibatch))
draw_times(eager, ours, "a training step of 64 trees")

# %%
# Hand-batched code needs a list of nodes for each level and operator, an index for each operand, a
# gather and a scatter for each level, and a mapping from levels back to trees.
