"""Other libraries on the same workloads, if they are installed and can express the workload.

A peer is another library. It is optional, and is imported when it is first used. For each workload,
a peer provides a function from a minibatch to losses [examples] that uses the workload's
parameters. A peer with its own autograd (DyNet) provides whole steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.measure import Step
from benchmarks.workload import Workload

PEERS = ("torchfold", "dgl", "vmap", "dynet")


def available(
    workload: Workload,
    skipped: dict[str, str],
    names: Sequence[str] = PEERS,
) -> dict[str, Callable[..., Step]]:
    """Returns the variants of these peers. Stores in ``skipped`` why other peers can't run."""
    variants: dict[str, Callable[..., Step]] = {}
    for peer in names:
        try:
            module: Any = importlib.import_module(f"benchmarks.peers.{peer}_peer")
            variants |= module.variants(workload)
        except Exception as error:
            # Not only ImportError, because a library that was built for another torch may fail in
            # any way.
            skipped[peer] = f"{type(error).__name__}: {error}".splitlines()[0]
    return variants
