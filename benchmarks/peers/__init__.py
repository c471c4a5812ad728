"""Other libraries on the same workloads, where they are installed and can express them.

A peer is optional and imported when it is first asked for. Each gives, by workload, a function from
a minibatch to losses [examples] on the workload's own parameters; one with autograd of its own
(DyNet) gives whole steps.
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
    backward: bool,
    skipped: dict[str, str],
    names: Sequence[str] = PEERS,
) -> dict[str, Callable[..., Step]]:
    """Returns the variants of these peers. Stores in ``skipped`` why others have none."""
    variants: dict[str, Callable[..., Step]] = {}
    for peer in names:
        try:
            module: Any = importlib.import_module(f"benchmarks.peers.{peer}_peer")
            variants |= module.variants(workload)
        except Exception as error:
            # Not only ImportError: a library that was built for another torch may fail anyhow.
            skipped[peer] = f"{type(error).__name__}: {error}".splitlines()[0]
    return variants
