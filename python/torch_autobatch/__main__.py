"""``python -m torch_autobatch``: runs a program, checks the installation, or prints build facts."""

import argparse
import sys
from pathlib import Path

import torch

import torch_autobatch as ab
from torch_autobatch import _C, _doctor, _run


def cmake_dir() -> Path:
    """Returns the directory of AutobatchConfig.cmake, for ``-DAutobatch_DIR=``."""
    path = Path(ab.__file__).resolve().parent / "share" / "cmake" / "Autobatch"
    if not (path / "AutobatchConfig.cmake").exists():
        raise SystemExit(
            f"error: {path} has no AutobatchConfig.cmake. Install the package, or run "
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


def _check_run(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> None:
    """Exits with a usage error if the program can't start or its report can't be saved."""
    try:
        _run.check(chosen.program, chosen.save, module=chosen.module)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m torch_autobatch", description=__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--cmake-dir",
        action="store_true",
        help="print the directory for CMake's -DAutobatch_DIR=, for find_package(Autobatch)",
    )
    what.add_argument("--version", action="version", version=ab.__version__)
    what.add_argument(
        "--info",
        action="store_true",
        help="print the versions, CUDA support, policies and location of the package",
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser(
        "doctor",
        help="print the fast paths of this machine, and compare small models with eager mode",
    )
    runs = commands.add_parser("run", help="run a script, and print advice on its blocks")
    runs.add_argument(
        "--save",
        help="save the report of the largest block: a .html (picture), .json, .dot or .txt file",
    )
    runs.add_argument("-m", dest="module", action="store_true", help="run a module, like python -m")
    runs.add_argument("program", help="a script, or a module if -m is given")
    runs.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments for the program")
    chosen = parser.parse_args(arguments)
    if chosen.command == "run":
        _check_run(runs, chosen)
        _run.run(chosen.program, chosen.arguments, chosen.save, module=chosen.module)
    elif chosen.command == "doctor":
        sys.exit(_doctor.main(info()))
    elif chosen.cmake_dir or chosen.info:
        print(cmake_dir() if chosen.cmake_dir else info())
    else:
        parser.error("expected one of run, doctor, --info, --cmake-dir and --version")


if __name__ == "__main__":
    main()
