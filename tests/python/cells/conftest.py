"""Tests of cells: templates, subgraphs, fusion."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `import test_subgraphs`
