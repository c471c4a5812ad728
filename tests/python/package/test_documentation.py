"""README and docs: every Python block runs, and all commands and link targets exist."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch_autobatch

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]


@dataclass
class Block:
    language: str
    line: int  # number of its first line of code, from 1
    code: str


def blocks(page: Path) -> Iterator[Block]:
    """Returns the fenced blocks of a Markdown page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
        else:
            code = "\n".join(lines[start + 1 : number])
            yield Block(lines[start].removeprefix("```").strip(), start + 2, code)
            start = None
    assert start is None, f"{page}:{start}: a block that does not end"


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(page: Path) -> str:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.sub(r"`[^`\n]+`", "", text)


@pytest.mark.parametrize("page", [p for p in PAGES if python_blocks(p)], ids=name)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run in order, in one namespace."""
    monkeypatch.chdir(tmp_path)  # some blocks save files
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in python_blocks(page):
        padded = "\n" * (block.line - 1) + block.code  # a traceback then shows the page's line
        exec(compile(padded, str(page), "exec"), namespace)
    assert namespace["ab"] is torch_autobatch


def test_examples_of_contributing_are_compiled() -> None:
    """A source of the library or its tests contains each C++ block, except for indentation."""
    sources = [
        *(ROOT / "csrc").rglob("*.cpp"),
        *(ROOT / "csrc").rglob("*.inc"),
        *(ROOT / "tests" / "cpp").rglob("*.cpp"),
    ]
    text = " ".join(" ".join(path.read_text(encoding="utf-8").split()) for path in sources)
    found = [b for b in blocks(ROOT / "CONTRIBUTING.md") if b.language == "cpp"]
    assert len(found) >= 5
    for block in found:
        assert " ".join(block.code.split()) in text, f"CONTRIBUTING.md:{block.line} is not compiled"


def test_readme_starts_with_a_program() -> None:
    first = python_blocks(ROOT / "README.md")[0].code
    assert "import torch_autobatch as ab" in first
    assert len([line for line in first.splitlines() if line.strip()]) <= 15


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


def heading_anchors(page: Path) -> set[str]:
    """Returns anchors in the form of GitHub and the site: lower case, no punctuation, hyphens."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), flags=re.M):
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        again = (f"{anchor}-{n}" for n in itertools.count(1))  # for repeated headings
        anchors.add(anchor if anchor not in anchors else next(a for a in again if a not in anchors))
    return anchors


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if re.match(r"\w+:", target):  # a web address
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name(page)}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in heading_anchors(file), f"{name(page)}: {target}"


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=name)
def test_make_targets_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.M))
    # Finds `make x` in the text, and lines of code blocks.
    found = re.findall(r"(?:`|^)make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), flags=re.M)
    assert set(found) <= targets
