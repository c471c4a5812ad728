"""The documentation as a site: `make docs`. Warnings are errors; nothing comes from the web."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from sphinx_gallery.sorting import ExplicitOrder

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))
with (ROOT / "pyproject.toml").open("rb") as _file:
    _metadata = tomllib.load(_file)["project"]

project = _metadata["name"]
author = copyright = _metadata["authors"][0]["name"]
version = release = _metadata["version"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "sphinx_llms_txt",
    "make_gallery",
]
exclude_patterns = ["tutorials/*.py"]  # copies that sphinx-gallery makes
nitpicky = False  # signatures name types of torch, whose own documentation is on the web

# --- pages ---
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"

# --- reference ---
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"

# --- tutorials: run when the site is built; one that fails is an error ---
sphinx_gallery_conf = {
    "examples_dirs": "../examples/tutorials",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"\.py$",
    "ignore_pattern": r"pictures\.py",
    "within_subsection_order": ExplicitOrder(
        ["trees.py", "graphs.py", "parser.py", "generation.py", "serving.py"]
    ),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "min_reported_time": 1e9,
}

# --- the site ---
html_theme = "furo"
html_title = f"torch-autobatch {release}"
html_show_sphinx = False
html_copy_source = True  # llms.txt is made of it
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}

# --- llms.txt and llms-full.txt: the same text for language models ---
llms_txt_title = "torch-autobatch"
llms_txt_summary = _metadata["description"]


def _own_pages(app: object, page: str, source: list[str]) -> None:
    """Pages link to the repository's files; the site has a page for this one."""
    source[0] = source[0].replace("(../CONTRIBUTING.md", "(contributing.md")


def setup(app: object) -> None:
    app.connect("source-read", _own_pages)  # type: ignore[attr-defined]
