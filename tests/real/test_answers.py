"""Models of other people's packages (``benchmarks/real``) have eager's answers: losses, gradients
and buffers, in double precision, in blocks and maps. So has the package's own batching, or a ratio
to it would compare two different things. ``make test-real`` installs the packages.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from benchmarks.real import PACKAGES, makers
from benchmarks.real.answers import BLOCK, MAP, OWN, check, phases, variants
from benchmarks.real.case import build

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    MODELS = [
        pytest.param(make, id=f"{package}-{name}")
        for package in PACKAGES
        for name, make in makers(package).items()
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", [BLOCK, MAP, OWN])
@pytest.mark.parametrize("make", MODELS)
def test_answers(make, variant) -> None:
    case = build(make, torch.float64)
    if variant not in variants(case):
        pytest.skip("the package has no batching of these examples")
    for phase in phases(case):
        check(case, variant, phase, torch.float64)
