"""Collects cycles of pending tensors on one thread while a block runs on another thread.

test_collector.py runs this file in a separate process, because an error here is a crash.
"""

from __future__ import annotations

import gc
import random
import sys
import threading

import torch
import torch_autobatch as ab
from torch import Tensor, nn


def main(blocks: int) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(4)
    box: list[Tensor] = []
    lock, stop = threading.Lock(), threading.Event()
    finished: list[int] = []

    def produce() -> None:
        for _ in range(blocks):
            with ab.batch():
                results = []
                for i in range(30):
                    t = layer(x) + i
                    u = t.tanh()
                    with lock:
                        box.extend([t, u])
                    results.append(u * 2)
                    if i % 10 == 9:
                        results[-1].sum().item()
            for i, result in enumerate(results):
                assert torch.allclose(result, (layer(x) + i).tanh() * 2)
        finished.append(1)

    def consume() -> None:
        while not stop.is_set():
            with lock:
                taken = [box.pop() for _ in range(min(7, len(box)))]
            for t in taken:
                if random.random() < 0.2:
                    t.itself = t  # type: ignore[attr-defined]
            del taken
            if random.random() < 0.01:
                gc.collect()

    sys.setswitchinterval(1e-5)
    producers = [threading.Thread(target=produce) for _ in range(2)]
    consumers = [threading.Thread(target=consume) for _ in range(2)]
    for thread in producers + consumers:
        thread.start()
    for thread in producers:
        thread.join()
    stop.set()
    for thread in consumers:
        thread.join()
    assert len(finished) == 2


if __name__ == "__main__":
    main(int(sys.argv[1]))
