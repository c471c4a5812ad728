"""Type checkers find mistakes in programs that use the library, and none in correct programs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch_autobatch

PACKAGES = Path(torch_autobatch.__file__).resolve().parents[1]
PYRIGHT = shutil.which("pyright") or shutil.which("basedpyright")

RIGHT = """\
import torch_autobatch as ab


@ab.batch
def score(x: int) -> str:
    return str(x)


@ab.batch("depth", max_pending=10)
def measure(x: int) -> str:
    return str(x)


text: str = score(1) + measure(1)
texts: list[str] = ab.map(score, [1, 2], max_live=1)
with ab.batch(profile=True) as scope:
    pass
bound: int = scope.report().lower_bound + ab.last_report().ops
scope.report().save("batches.html")
"""
WRONG = """\
import torch_autobatch as ab

ab.batch("agend")  # a policy that is none
ab.batch(granularity="cells")
ab.batch(max_pendings=10)  # a keyword that is none
ab.map(str, [1, 2], max_lives=3)
with ab.batch() as scope:
    scope.report().lower_bounds  # a field that is none


@ab.batch
def score(x: int) -> str:
    return str(x)


score("one")  # the decorated function keeps its type
"""
WRONG_LINES = {3, 4, 5, 6, 8, 16}


@pytest.fixture
def programs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "right.py", tmp_path / "wrong.py"]
    for path, program in zip(paths, (RIGHT, WRONG), strict=True):
        path.write_text(program)
    return paths


def run(*command: str, folder: Path) -> str:
    """Returns the output of a checker, whose exit status is 1 if it finds a mistake."""
    environment = {**os.environ, "MYPYPATH": str(PACKAGES)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_mypy(programs: list[Path], tmp_path: Path) -> None:
    options = ["--follow-imports=silent", f"--cache-dir={tmp_path}", "--output=json"]
    said = run(sys.executable, "-m", "mypy", *options, *map(str, programs), folder=tmp_path)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    errors = {(Path(e["file"]).name, e["line"]) for e in found if e["severity"] == "error"}
    assert errors == {("wrong.py", line) for line in WRONG_LINES}


@pytest.mark.skipif(PYRIGHT is None, reason="needs pyright")
@pytest.mark.usefixtures("programs")
def test_pyright(tmp_path: Path) -> None:
    assert PYRIGHT is not None
    settings = {"extraPaths": [str(PACKAGES)], "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    said = run(PYRIGHT, "--outputjson", "--pythonpath", sys.executable, folder=tmp_path)
    found = [e for e in json.loads(said)["generalDiagnostics"] if e["severity"] == "error"]
    errors = {(Path(e["file"]).name, e["range"]["start"]["line"] + 1) for e in found}
    assert errors == {("wrong.py", line) for line in WRONG_LINES}
