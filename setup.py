"""Builds the package with CMake. The package's metadata is in pyproject.toml.

This file does not import torch, so tools can read the metadata without torch.

Environment:
  CMAKE_BUILD_PARALLEL_LEVEL   compile jobs (default 2)
  AUTOBATCH_WERROR=ON          warnings are errors
  AUTOBATCH_CAPTURE_KEY=...    the dispatch key that capture borrows: DeferredInit (the default
                               where PyTorch has it) or TESTING_ONLY_GenericMode
  AUTOBATCH_CMAKE_ARGS         further arguments for CMake, written as in a shell
  AUTOBATCH_BUILD_DIR          the build directory (default: a directory in build/ for each Python,
                               torch and AUTOBATCH_CAPTURE_KEY)
"""

import sys

if sys.platform != "linux":  # checked before imports that other systems lack
    sys.exit(f"error: torch-autobatch builds on Linux only; this is {sys.platform}")

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = "torch_autobatch"
CAPTURE_KEY = os.environ.get("AUTOBATCH_CAPTURE_KEY", "")


def torch_dir() -> Path | None:
    """Returns the directory of the interpreter's torch."""
    torch = importlib.util.find_spec("torch")
    return Path(torch.origin).parent if torch is not None and torch.origin else None


def torch_version() -> str | None:
    """Returns torch's full version, "2.13.0+cpu".

    Reads version.py first, because the metadata of some builds lack the part after the plus.
    """
    directory = torch_dir()
    if directory is None:
        return None
    found = re.search(
        r"^__version__ = '(.+)'", (directory / "version.py").read_text(), re.MULTILINE
    )
    return found[1] if found else importlib.metadata.version("torch")


def local_version() -> str:
    """Returns the suffix of the package's version: "+pt213cpu" for torch 2.13 built for CPUs."""
    version = torch_version()
    if version is None:
        return ""
    release, _, variant = version.partition("+")
    digits = release.removesuffix(".0").replace(".", "")
    return "+" + re.sub(r"[^a-z0-9]", "", f"pt{digits}{variant}".lower())


def requirements() -> list[str]:
    """Returns the required packages.

    The extension needs the version of torch that it was built with, because PyTorch's C++ interface
    differs between versions.
    """
    version = torch_version()
    torch = f"torch=={version.partition('+')[0]}" if version else "torch>=2.11"
    return [torch, "greenlet>=3.1"]


def build_dir() -> Path:
    """Returns the build directory for this Python, torch and capture key.

    Each combination has a separate directory, so switching between them needs no rebuild.
    """
    if path := os.environ.get("AUTOBATCH_BUILD_DIR"):
        return ROOT / path
    torch = torch_dir()
    if torch is None:
        sys.exit(
            f"error: {sys.executable} has no torch, and the extension is built against it; "
            "install torch>=2.11 first and use 'pip install --no-build-isolation'"
        )
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    version = importlib.metadata.version("torch").replace("+", "-")
    origin = torch / "__init__.py"
    where = hashlib.sha256(f"{sys.executable}\n{origin}".encode()).hexdigest()[:6]
    key = f"-{CAPTURE_KEY}" if CAPTURE_KEY else ""
    return ROOT / "build" / f"{tag}-torch{version}-{where}{key}"


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Locks the directory, because two builds at the same time would damage each other's files."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cmake(*args: str | Path, quiet: bool = False) -> None:
    # PyPI's ninja is installed next to the interpreter. This directory may not be on PATH.
    scripts = sysconfig.get_path("scripts")
    env = os.environ | {"PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")])}
    try:
        stdout = subprocess.DEVNULL if quiet else None
        subprocess.run(["cmake", *map(str, args)], check=True, cwd=ROOT, env=env, stdout=stdout)
    except FileNotFoundError:
        sys.exit("error: cmake was not found; run: apt-get install cmake (or pip install cmake)")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


class CMakeBuild(build_ext):
    """Runs CMake. Installs into the source package with --inplace or -e, else into build_lib."""

    user_options: ClassVar = [
        *build_ext.user_options,
        ("cpp-tests", None, "build the C++ tests as well"),
    ]
    boolean_options: ClassVar = [*build_ext.boolean_options, "cpp-tests"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.cpp_tests = False

    def run(self) -> None:
        build = build_dir()
        with lock(build):
            self.configure(build)
            jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2")
            targets = ["autobatch", "_C"]
            if self.cpp_tests:
                targets += ["autobatch_tests", "simulated_device"]
            cmake("--build", build, "-j", jobs, "--target", *targets)
            package = self.package_dir()
            for made_before in ("include", "share"):
                shutil.rmtree(package / made_before, ignore_errors=True)
            install = ["--install", build, "--prefix", package, "--component", "autobatch"]
            # A build in a checkout keeps the names of functions, for profilers. A wheel does not.
            strip = [] if self.is_in_place() else ["--strip"]
            cmake(*install, *strip, quiet=True)
        with contextlib.suppress(OSError):
            self.link(ROOT / "build" / "latest", build)
            self.link(ROOT / "compile_commands.json", build / "compile_commands.json")

    def configure(self, build: Path) -> None:
        args = [
            f"-DPython_EXECUTABLE={sys.executable}",
            "-DAUTOBATCH_BUILD_PYTHON=ON",
            f"-DAUTOBATCH_WERROR={os.environ.get('AUTOBATCH_WERROR') or 'OFF'}",
            f"-DAUTOBATCH_CAPTURE_KEY={CAPTURE_KEY}",
            f"-DAUTOBATCH_IN_PLACE={'ON' if self.is_in_place() else 'OFF'}",
            *shlex.split(os.environ.get("AUTOBATCH_CMAKE_ARGS", "")),
        ]
        scripts = Path(sysconfig.get_path("scripts"))
        if (scripts / "ninja").exists() or shutil.which("ninja"):
            args += ["-G", "Ninja"]
        stamp = build / "configured.txt"
        wanted = "\n".join(args)
        cached = (build / "CMakeCache.txt").exists()
        configured = cached and stamp.exists() and stamp.read_text() == wanted
        if configured and self.cpp_tests:
            # Catch2 may have been installed after the last configuration.
            configured = (build / "CTestTestfile.cmake").read_text().find("autobatch_tests") >= 0
        if configured:
            return  # the build itself detects changes of CMakeLists.txt
        stamp.unlink(missing_ok=True)
        cmake("-S", ROOT, "-B", build, *args)
        stamp.write_text(wanted)

    def is_in_place(self) -> bool:
        return bool(self.inplace or getattr(self, "editable_mode", False))

    def package_dir(self) -> Path:
        if self.is_in_place():
            return ROOT / "python" / PACKAGE
        return ROOT / self.build_lib / PACKAGE

    @staticmethod
    def link(link: Path, target: Path) -> None:
        if not link.is_symlink() or link.readlink() != target:
            link.unlink(missing_ok=True)
            link.symlink_to(target)

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / PACKAGE
        return [] if self.inplace else [str(p) for p in package.rglob("*") if p.is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


setup(
    # An extension without sources. It marks the wheel as specific to a platform and a Python
    # version.
    ext_modules=[Extension(f"{PACKAGE}._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=requirements(),
    options={"egg_info": {"tag_build": local_version()}},
)
