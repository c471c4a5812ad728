"""Fills the holes of a pattern: predicates for tensors, and random arguments for a given tensor.

``tables.py`` lists the names of the holes.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64)


def sizes(rng: random.Random, tensor: Tensor) -> str:
    """Returns sizes with the same number of elements as the tensor."""
    left, made = max(tensor.numel(), 1), []
    while left > 1 and len(made) < 3:
        divisor = rng.choice([k for k in range(1, left + 1) if left % k == 0])
        made.append(divisor)
        left //= divisor
    made.append(left)
    if rng.random() < 0.3:
        made[rng.randrange(len(made))] = -1
    return ",".join(map(str, made))


def index(rng: random.Random, tensor: Tensor) -> str:
    one = ["0", "-1", "1", "1:", ":1", "::2", ":", ":-1", "None", "1:3"]
    parts = [rng.choice(one) for _ in range(rng.randint(1, max(1, tensor.dim())))]
    if rng.random() < 0.2:
        parts.insert(rng.randrange(len(parts) + 1), "...")
    return ",".join(parts)


def permutation(rng: random.Random, tensor: Tensor) -> str:
    dims = list(range(tensor.dim()))
    rng.shuffle(dims)
    return ",".join(map(str, dims)) or "()"


def expansion(rng: random.Random, tensor: Tensor) -> str:
    sizes = [rng.randint(1, 3) if n == 1 else n for n in tensor.shape]
    return ",".join(map(str, sizes)) or "1"


def strided(rng: random.Random, tensor: Tensor) -> str:
    # By the number of required elements. The layout must fit into the tensor, because the storage
    # may be larger in eager mode than in a block.
    layouts = {
        2: ["(2,),(1,)"],
        3: ["(3,2),(1,0)", "(2,2),(1,1)"],
        4: ["(2,2),(2,1)", "(2,),(2,),1"],
    }
    fitting = [text for n, texts in layouts.items() if n <= tensor.numel() for text in texts]
    return rng.choice(fitting or ["(1,),(1,)"])


# By the hole's name: makes the text for the hole from a random generator and the first tensor.
GEOMETRY: dict[str, Callable[[random.Random, Tensor], str]] = {
    "d": lambda rng, t: str(rng.randrange(-t.dim(), t.dim()) if t.dim() else 0),
    "u": lambda rng, t: str(rng.randrange(-t.dim() - 1, t.dim() + 1)),
    "index": index,
    "slice": lambda rng, t: rng.choice(["1:", "::2", ":-1", "0:2", "-2:", "1:2"]),
    "view": sizes,
    "perm": permutation,
    "expand": expansion,
    "strided": strided,
}

# By the hole's name: whether a tensor fits.
KINDS: dict[str, Callable[[Tensor], bool]] = {
    "x": lambda t: True,
    "f": lambda t: t.dtype in FLOATS,
    "y": lambda t: t.dtype in FLOATS,
    "g": lambda t: t.requires_grad and t.dtype in FLOATS,
    "i": lambda t: t.dtype == torch.int64,
    "j": lambda t: t.dtype == torch.int64 and t.dim() == 1 and bool(((t >= 0) & (t < 4)).all()),
    "b": lambda t: t.dtype == torch.bool,
    "c": lambda t: t.is_complex(),
    "s": lambda t: t.dtype in FLOATS and t.numel() == 1,
    "v": lambda t: t.dtype in FLOATS and t.dim() == 1,
    "m": lambda t: t.dtype in FLOATS and t.dim() == 2,
    "e": lambda t: t.dtype in FLOATS and t.dim() == 3,
    "r": lambda t: t.dtype in FLOATS and t.dim() > 0 and t.shape[-1] == 4,
}
