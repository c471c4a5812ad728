"""Models of other packages, one example at a time, compared with the packages' own batching.

Each package has a file, which imports the package. ``make bench-real`` measures all packages.
``make test-real`` checks their results.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from benchmarks.real.case import Maker, makers_of

# The name of each distribution, and its file in this folder.
PACKAGES = {
    "torch-geometric": "graphs",
    "transformers": "hugging_face",
    "pytorch-crf": "crf",
    "torch-struct": "structured",
    "entmax": "sparse_attention",
    "supar": "parsers",
    "pytorch-tree-lstm": "trees",
    "torchdiffeq": "ode",
    "torchode": "parallel_ode",
    "torch.distributions": "distributions",
    "pyro-ppl": "programs",
    "kornia": "images",
    "e3nn": "equivariant",
    "egnn-pytorch": "molecules",
    "torchdeq": "equilibrium",
    "geomloss": "transport",
    "POT": "optimal_transport",
    "qpth": "quadratic_programs",
    "torchcde": "controlled",
    "zuko": "flows",
    "gpytorch": "gaussian_processes",
    "higher": "meta_learning",
    "torchopt": "meta_optimizers",
    "mcts": "planning",
    "x-transformers": "attention",
    "rotary-embedding-torch": "rotary",
    "mixture-of-experts": "experts",
    "perceiver-pytorch": "perceiver",
}


def makers(package: str) -> dict[str, Maker]:
    """Returns the functions that make a package's models, by model name. Imports the package."""
    return makers_of(importlib.import_module(f"benchmarks.real.{PACKAGES[package]}").__name__)


def version(package: str) -> str:
    """Returns the installed version. For a part of PyTorch, this is PyTorch's version."""
    return importlib.metadata.version(package.partition(".")[0])
