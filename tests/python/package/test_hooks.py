"""The hooks of pre-commit and `make lint` use the same tools."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_versions() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pinned = dict(line.split("==") for line in project["dependency-groups"]["lint"])
    found = dict(re.findall(r"/(ruff|[a-z-]*clang-format)\S*\n +rev: v(\S+)", hooks))
    assert found == {"ruff": pinned["ruff"], "mirrors-clang-format": pinned["clang-format"]}
