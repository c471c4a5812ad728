"""``python -m torch_autobatch``: where the C++ library is, and what it was built with."""

import argparse
from pathlib import Path

import torch

import torch_autobatch as ab
from torch_autobatch import _C


def cmake_dir() -> Path:
    """The directory of AutobatchConfig.cmake, for ``-DAutobatch_DIR=``."""
    path = Path(ab.__file__).resolve().parent / "share" / "cmake" / "Autobatch"
    if not (path / "AutobatchConfig.cmake").exists():
        raise SystemExit(
            f"error: {path} has no AutobatchConfig.cmake; install the package, or run "
            "'python setup.py build_ext --inplace' in its source directory"
        )
    return path


def info() -> str:
    return "\n".join(
        [
            _C.build_info(),
            f"running with torch {torch.__version__}, CUDA "
            + (str(torch.version.cuda) if torch.cuda.is_available() else "not available"),
            f"policies: {', '.join(ab.policy_names())}",
            f"package: {Path(ab.__file__).resolve().parent}",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m torch_autobatch", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--cmake-dir",
        action="store_true",
        help="the directory for CMake's -DAutobatch_DIR=, for find_package(Autobatch)",
    )
    what.add_argument("--version", action="version", version=ab.__version__)
    what.add_argument("--info", action="store_true", help="versions, CUDA, policies, where it is")
    chosen = parser.parse_args(arguments)
    print(cmake_dir() if chosen.cmake_dir else info())


if __name__ == "__main__":
    main()
