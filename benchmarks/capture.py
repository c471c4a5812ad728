"""Compares the time to capture an op from Python with the time to run it, on one-element tensors.

python -m benchmarks.capture
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

CALLS = 2000
GOALS = {"the eight ops": 0.5, "nn.Linear": 0.35}

Call = Callable[[], object]


def calls() -> dict[str, dict[str, Call]]:
    """Returns the timed calls by group: first ops, which have a target time, and then modules."""
    x, y = torch.rand(1, 1), torch.rand(1, 1)
    w, b = nn.Parameter(torch.rand(1, 1)), nn.Parameter(torch.rand(1))
    leaf = torch.zeros(1, 1)
    wide = torch.rand(1, 4)
    modules: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
        "nn.Linear": (nn.Linear(1, 1), (x,)),
        "nn.LSTMCell": (nn.LSTMCell(1, 1), (x,)),
        "nn.GRUCell": (nn.GRUCell(1, 1), (x,)),
        "nn.Embedding": (nn.Embedding(2, 1), (torch.zeros(1, dtype=torch.long),)),
        "nn.LayerNorm": (nn.LayerNorm(4), (wide,)),
        "nn.Tanh": (nn.Tanh(), (x,)),
    }
    # Products with a parameter, so that the operands are pending while ops are captured.
    operands: list[Tensor] = []

    def fresh() -> None:
        operands[:] = [F.linear(x, w, b), F.linear(y, w, b), F.linear(leaf, w).expand(1, 4) + 0]

    ops: dict[str, Call] = {
        "add": lambda: operands[0] + operands[1],
        "mul": lambda: operands[0] * operands[1],
        "tanh": lambda: operands[0].tanh(),
        "sigmoid": lambda: operands[0].sigmoid(),
        "F.linear": lambda: F.linear(operands[0], w, b),
        "cat": lambda: torch.cat((operands[0], operands[1])),
        "select": lambda: operands[0].select(0, 0),
        "chunk": lambda: operands[2].chunk(4, 1),
    }

    def module_call(module: nn.Module, arguments: tuple[Tensor, ...]) -> Call:
        return lambda: module(*arguments)

    made = {name: module_call(*given) for name, given in modules.items()}
    return {"before": {"": fresh}, "the eight ops": ops, "modules": made}


def seconds(call: Call, before: Call, captured: bool) -> float:
    """Returns the seconds of one call, without the cost of the loop. The graph never runs."""
    with torch.no_grad(), ab.batch(enabled=captured):
        before()
        for _ in range(50):
            call()
        start = time.process_time()
        for _ in range(CALLS):
            call()
        middle = time.process_time()
        for _ in range(CALLS):
            pass
        return (2 * middle - start - time.process_time()) / CALLS


def main() -> None:
    """Prints a table."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    groups = calls()
    before = groups.pop("before")[""]
    print("| op | eager µs | captured µs | captured / eager |\n| --- | --: | --: | --: |")
    for group, members in groups.items():
        ratios = []
        for name, call in members.items():
            rounds = [(seconds(call, before, False), seconds(call, before, True)) for _ in range(9)]
            eager, ours = (median(column) for column in zip(*rounds, strict=True))
            ratios.append(median(captured / plain for plain, captured in rounds))
            goal = f" (goal {GOALS[name]})" if name in GOALS else ""
            print(f"| {name} | {1e6 * eager:.2f} | {1e6 * ours:.2f} | {ratios[-1]:.2f}{goal} |")
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        goal = f" (goal {GOALS[group]})" if group in GOALS else ""
        print(f"| {group}, geometric mean | | | {mean:.2f}{goal} |")


if __name__ == "__main__":
    main()
