"""
Generation
==========

A character model that invents names of Python modules. The model decides when a name ends, so names
that are generated together have different lengths. Each step reads the character that was drawn:
:func:`torch_autobatch.map` batches the steps of all unfinished names.
"""

import random
import sys

import torch
import torch.nn.functional as F
import torch_autobatch as ab
from pictures import draw_batches, draw_times, milliseconds
from torch import Tensor, nn

torch.manual_seed(0)
torch.set_num_threads(1)
draw = random.Random(0)

# %%
# The data
# --------

names = sorted(sys.stdlib_module_names)
END = 0
LETTERS = ["", *sorted(set("".join(names)))]
print(len(names), "names, such as", ", ".join(draw.sample(names, 5)))

# %%
# The model
# ---------


class Names(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(LETTERS), hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.score = nn.Linear(hidden, len(LETTERS))

    def forward(self, name: str) -> Tensor:
        """Returns the loss of a name, without reads."""
        state, last, losses = None, END, []
        for letter in [*map(LETTERS.index, name), END]:
            state = self.cell(self.embedding(torch.tensor([last])), state)  # [1, hidden]
            losses.append(F.cross_entropy(self.score(state), torch.tensor([letter])))
            last = letter
        return torch.stack(losses).mean()

    def generate(self, chance: random.Random) -> str:
        """Returns a name, which is drawn letter by letter."""
        state, last, name = None, END, ""
        while len(name) < 20:
            state = self.cell(self.embedding(torch.tensor([last])), state)
            weights = self.score(state).softmax(1)[0].tolist()  # a read
            (last,) = chance.choices(range(len(LETTERS)), weights)
            if last == END:
                break
            name += LETTERS[last]
        return name


# %%
# Training
# --------

model = Names()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
for number in range(120):
    optimizer.zero_grad()
    with ab.batch():
        loss = torch.stack([model(name) for name in draw.sample(names, 64)]).mean()
    loss.backward()
    optimizer.step()
    if number % 30 == 0:
        print(f"step {number:3}  loss {loss.item():.3f}")

# %%
# Generation
# ----------
#
# Each name has its own random numbers. So it does not depend on other names that are generated at
# the same time.


def generate(enabled: bool = True) -> tuple[list[str], ab.batch]:
    chances = [random.Random(seed) for seed in range(64)]
    with torch.no_grad(), ab.batch(enabled=enabled) as scope:
        return ab.map(model.generate, chances, enabled=enabled), scope


invented, scope = generate()
print(", ".join(name for name in invented[:20] if name not in names))
assert invented == generate(enabled=False)[0]

# %%
# What was batched
# ----------------

draw_batches(scope.report())

# %%
# The time of 64 names
# --------------------

eager = milliseconds(lambda: generate(enabled=False), rounds=3)
ours = milliseconds(generate)
draw_times(eager, ours, "64 names")
