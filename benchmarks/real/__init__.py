"""Models of other people's packages, one example at a time, next to the package's own batching.

A file a package; the package is imported when its file is. ``make bench-real`` measures all of
them, ``make test-real`` asserts their answers.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from benchmarks.real.case import Maker, makers_of

# The distribution's name, and the file here.
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
    """What makes each model of a package, by the model's name. Imports the package."""
    return makers_of(importlib.import_module(f"benchmarks.real.{PACKAGES[package]}").__name__)


def version(package: str) -> str:
    """The version that is installed; of a part of PyTorch (``torch.distributions``) PyTorch's."""
    return importlib.metadata.version(package.partition(".")[0])
