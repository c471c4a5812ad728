"""Checks that the compiled extension matches the imported torch."""

import re

import torch


def check(built_with: str) -> None:
    """Raises ImportError if the extension was built with a different torch.

    Called before the extension is loaded: PyTorch's C++ interface is not stable between versions,
    so loading would fail with an undefined symbol, or crash.
    """
    running = str(torch.__version__)
    if running == built_with:
        return
    raise ImportError(
        f"torch_autobatch was built with torch {built_with}, but the imported torch is {running}. "
        f"Install the torch_autobatch wheel whose version ends in '{_label(running)}', or install "
        f"torch {built_with}, or build torch_autobatch again in its source directory: "
        "pip install --no-build-isolation --force-reinstall --no-deps ."
    )


def _label(version: str) -> str:
    """Returns the label of the wheel for a torch version: "+pt213cpu" (setup.py, local_version)."""
    release, _, variant = version.partition("+")
    variant = re.sub(r"[^a-z0-9]", "", variant.lower())
    return f"+pt{release.removesuffix('.0').replace('.', '')}{variant}"
