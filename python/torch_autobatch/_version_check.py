"""Whether the compiled part fits the torch that is imported."""

import torch


def check(built_with: str) -> None:
    """Raise ImportError if torch isn't the one that the extension was built with.

    Called before the extension is loaded: PyTorch's C++ interface has no stability between
    versions, and loading would fail with an undefined symbol, or crash.
    """
    running = str(torch.__version__)
    if running == built_with:
        return
    raise ImportError(
        f"torch_autobatch was built with torch {built_with}, but torch here is {running}; "
        "build it again, in its source directory: "
        "pip install --no-build-isolation --force-reinstall --no-deps ."
    )
