"""Checks that includes in csrc point down or sideways: ``python scripts/layers.py``.

Each folder belongs to a layer. A file may include headers of its own layer and of lower layers.
``csrc/python`` is above all layers of ``csrc/autobatch``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "csrc" / "autobatch"

# From the lowest to the highest. Folders in one list are one layer.
LAYERS = [
    ["common"],
    ["graph"],
    ["kernels"],
    ["rules"],
    ["debug"],
    ["schedule"],
    ["subgraph"],
    ["plan"],
    ["backward"],
    ["execute"],
    ["capture", "cells", "derivatives", "fibers", "scope"],
    ["api"],
]
RANK = {folder: rank for rank, folders in enumerate(LAYERS) for folder in folders}
INCLUDE = re.compile(r'^#include "(?:autobatch/(\w+)/[\w/.]+|python/[\w/.]+)"', re.MULTILINE)


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def main() -> int:
    wrong = []
    for path in sorted(p for p in ROOT.rglob("*") if p.suffix in {".cpp", ".h", ".cu", ".inc"}):
        here = folder_of(path)
        if here not in RANK:
            wrong.append(f"{path.relative_to(ROOT)}: no layer has the folder {here}")
            continue
        for match in INCLUDE.finditer(path.read_text()):
            if match[1] is None or RANK[match[1]] > RANK[here]:
                wrong.append(f"{path.relative_to(ROOT)} includes upwards: {match[0][9:]}")
    print("\n".join(wrong) or f"{len(LAYERS)} layers, no include points up")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
