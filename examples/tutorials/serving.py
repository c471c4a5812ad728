"""
Serving
=======

A server for trees of any shape. Requests arrive at any time and from any thread. Each request has a
different tree. :class:`torch_autobatch.Engine` runs the code for one tree, and batches across all
running requests. A request that arrives later joins the batches of earlier requests.
"""

import random
import threading
import time
from concurrent.futures import Future, wait

import matplotlib.pyplot as plt
import torch
import torch_autobatch as ab
from torch import Tensor, nn

torch.manual_seed(0)
torch.set_num_threads(1)
draw = random.Random(0)

# %%
# The requests
# ------------
#
# A tree is a number (a word) or a pair of trees.

Tree = int | tuple["Tree", "Tree"]


def tree(words: int) -> Tree:
    if words == 1:
        return draw.randrange(100)
    left = draw.randint(1, words - 1)
    return tree(left), tree(words - left)


requests = [tree(draw.randint(2, 40)) for _ in range(200)]
print("a request:", next(request for request in requests if len(str(request)) < 60))

# %%
# The code for one request
# ------------------------
#
# The code returns the client's result, here the number of a class. ``int(...)`` is a read.


class Classifier(nn.Module):
    def __init__(self, hidden: int = 128) -> None:
        super().__init__()
        self.word = nn.Embedding(100, hidden)
        self.join = nn.Linear(2 * hidden, hidden)
        self.classes = nn.Linear(hidden, 5)

    def encode(self, tree: Tree) -> Tensor:
        if isinstance(tree, int):
            return self.word(torch.tensor(tree))
        return self.join(torch.cat([self.encode(child) for child in tree])).tanh()

    def forward(self, tree: Tree) -> int:
        return int(self.classes(self.encode(tree)).argmax())


model = Classifier().eval()
with torch.inference_mode():
    expected = [model(request) for request in requests]

# %%
# An engine
# ---------
#
# ``submit`` returns a future. Four clients send fifty requests each.

with ab.Engine(model) as engine:
    futures: list[Future[int]] = [Future()] * len(requests)

    def client(first: int) -> None:
        for number in range(first, len(requests), 4):
            futures[number] = engine.submit(requests[number])
            time.sleep(0.001)

    clients = [threading.Thread(target=client, args=(first,)) for first in range(4)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    answers = [future.result() for future in futures]
    stats = engine.stats()

agree = sum(answer == right for answer, right in zip(answers, expected, strict=True))
print(f"{agree} of {len(requests)} answers are those of the loop")
print("requests:", {name: stats[name] for name in ("submitted", "finished", "failed")})

# %%
# What was batched
# ----------------
#
# The picture shows the mean number of requests that share a call, for each op.

widths = dict(sorted(stats["batch_width"].items(), key=lambda item: item[1]))
_, axes = plt.subplots(figsize=(7, 0.8 + 0.35 * len(widths)), layout="constrained")
bars = axes.barh(list(widths), list(widths.values()), color="#1f5fa8")
axes.bar_label(bars, fmt="%.1f", padding=3)
axes.margins(x=0.1)
axes.set_xlabel("ops in a call, mean")

# %%
# Latency
# -------
#
# All requests arrive at the same time. If they run one after the other, the last request waits for
# all others. In an engine, requests share calls, and short requests need not wait for long
# requests.


def one_by_one() -> list[float]:
    start, seconds = time.perf_counter(), []
    with torch.inference_mode():
        for request in requests:
            model(request)
            seconds.append(time.perf_counter() - start)
    return seconds


def in_an_engine() -> list[float]:
    seconds: list[float] = []
    with ab.Engine(model) as engine:
        start = time.perf_counter()
        sent = [engine.submit(request) for request in requests]
        for future in sent:
            future.add_done_callback(lambda _: seconds.append(time.perf_counter() - start))
        wait(sent)
    return sorted(seconds)


in_an_engine()  # warms up
_, axes = plt.subplots(figsize=(7, 2.6), layout="constrained")
for name, seconds in (("one by one", one_by_one()), ("engine", in_an_engine())):
    axes.plot([1e3 * s for s in seconds], range(1, len(seconds) + 1), label=name)
    print(f"{name}: {len(seconds) / seconds[-1]:.0f} requests a second")
axes.set_xlabel("ms since they arrived")
axes.set_ylabel("requests answered")
axes.legend()

# %%
# The page on :doc:`serving </serving>` has limits, time-outs, streams, new weights and HTTP.
