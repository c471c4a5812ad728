"""Tests of the simulated device. They name the device; the default device stays the CPU."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "tests" / "python")]

from tests.device import sim  # noqa: E402


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seeds the random state, switches adaptive execution off, and synchronizes at the end."""
    random.seed(0)
    torch.manual_seed(0)
    monkeypatch.setattr(sys.modules["torch_autobatch._scope"], "ADAPTIVE", False)
    yield
    torch.accelerator.synchronize()
    sim.plant_nothing()
