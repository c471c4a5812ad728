"""Tests that results match eager mode exactly. Each topic (row) has a file of tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `from exactly import same`
