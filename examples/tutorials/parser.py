"""
A parser
========

A shift-reduce parser that learns the precedence of operators. The next action depends on scores
that the parser reads, so each sentence takes a different path. :func:`torch_autobatch.map` still
batches across sentences: a sentence that reads a value waits, and the others continue.
"""

import random

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
#
# A sentence is an expression such as ``a + b * c - d``. Its parse is the order in which its
# operators are applied: ``**`` first, then ``*`` and ``/``, then ``+`` and ``-``.

OPERATORS = ["+", "-", "*", "/", "**"]
PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "**": 3}
WORDS = ["a", "b", "c", *OPERATORS]
SHIFT, REDUCE = 0, 1


def sentence() -> list[str]:
    words = [draw.choice("abc")]
    for _ in range(draw.randint(1, 9)):
        words += [draw.choice(OPERATORS), draw.choice("abc")]
    return words


sentences = [sentence() for _ in range(400)]
print("a sentence:", " ".join(sentences[0]))

# %%
# The parser's state
# ------------------
#
# A stack of words and phrases, and the remaining words. They are plain Python objects, without
# batching or padding. A phrase is written as nested tuples.


class Parse:
    def __init__(self, words: list[str]) -> None:
        self.words, self.front, self.stack = words, 0, []

    def is_final(self) -> bool:
        return self.front == len(self.words) and len(self.stack) == 1

    def possible(self) -> list[int]:
        shift = [SHIFT] if self.front < len(self.words) else []
        reduce = len(self.stack) >= 3 and self.stack[-1] not in OPERATORS
        return shift + [REDUCE] * reduce

    def best(self) -> int:
        """Returns the action that the rules of precedence require."""
        if self.possible() != [SHIFT, REDUCE]:
            return self.possible()[0]
        held, next_one = PRECEDENCE[self.stack[-2]], PRECEDENCE[self.words[self.front]]
        return REDUCE if held >= next_one else SHIFT

    def apply(self, action: int) -> None:
        if action == SHIFT:
            self.stack.append(self.words[self.front])
            self.front += 1
        else:
            right, operator, left = (self.stack.pop() for _ in range(3))
            self.stack.append((left, operator, right))


# %%
# The model
# ---------
#
# The model gets the second word from the top of the stack and the next word of the sentence. Both
# are states of an LSTM that has read the sentence. ``int(scores.argmax())`` is the read.


class Parser(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), hidden)
        self.encoder = nn.LSTM(hidden, hidden // 2, bidirectional=True)
        self.score = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.Tanh(), nn.Linear(hidden, 2))

    def encode(self, words: list[str]) -> Tensor:
        numbers = torch.tensor([WORDS.index(word) for word in words])
        return self.encoder(self.embedding(numbers))[0]  # [words, hidden]

    def scores(self, states: Tensor, parse: Parse) -> Tensor:
        held = parse.stack[-2]
        place = max(i for i in range(parse.front) if parse.words[i] == held)
        return self.score(torch.cat([states[place], states[parse.front]]))

    def forward(self, words: list[str]) -> Tensor:
        """Returns the loss of the right actions. The model chooses half of the actions taken."""
        states, parse, losses = self.encode(words), Parse(words), [torch.zeros(())]
        while not parse.is_final():
            action = parse.best()
            if len(parse.possible()) == 2:
                scores = self.scores(states, parse)
                losses.append(F.cross_entropy(scores, torch.tensor(action)))
                if draw.random() < 0.5:
                    action = int(scores.argmax())  # a read
            parse.apply(action)
        return torch.stack(losses).sum()

    def predict(self, words: list[str]) -> object:
        states, parse = self.encode(words), Parse(words)
        while not parse.is_final():
            possible = parse.possible()
            choose = len(possible) == 2
            parse.apply(int(self.scores(states, parse).argmax()) if choose else possible[0])
        return parse.stack[0]


def truth(words: list[str]) -> object:
    parse = Parse(words)
    while not parse.is_final():
        parse.apply(parse.best())
    return parse.stack[0]


# %%
# Training
# --------
#
# ``ab.map(model, minibatch)`` replaces ``[model(words) for words in minibatch]``.

model = Parser()
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)


def step(minibatch: list[list[str]], enabled: bool = True) -> tuple[float, ab.batch]:
    optimizer.zero_grad()
    with ab.batch(enabled=enabled) as scope:
        loss = torch.stack(ab.map(model, minibatch, enabled=enabled)).mean()
    loss.backward()
    optimizer.step()
    return loss.item(), scope


for number in range(40):
    loss, scope = step(draw.sample(sentences[:300], 32))
    if number % 10 == 0:
        print(f"step {number:3}  loss {loss:.3f}")

with torch.no_grad():
    parses = ab.map(model.predict, sentences[300:])
right = sum(p == truth(words) for p, words in zip(parses, sentences[300:], strict=True))
print(f"held out: {right} of {len(parses)} parses are right")
print(" ".join(sentences[300]), " is ", parses[0])

# %%
# What was batched
# ----------------
#
# All sentences take their next action together. The number of calls depends on the longest
# sentence, and not on the number of sentences.

draw_batches(scope.report())
for flush in scope.report().flushes[:3]:
    print(f"a flush of {flush.nodes} ops: {flush.reason}")

# %%
# The time of a step
# ------------------

minibatch = sentences[:64]
eager = milliseconds(lambda: step(minibatch, enabled=False), rounds=3)
ours = milliseconds(lambda: step(minibatch))
draw_times(eager, ours, "a training step of 64 sentences")
