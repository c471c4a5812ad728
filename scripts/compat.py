"""Compiles every C++ file against the headers of other PyTorch versions. Nothing is linked or run.

    python scripts/compat.py 2.11.0 2.13.0        versions
    python scripts/compat.py /path/to/torch       directories with include/

A version that is not installed is downloaded once (the wheel, without its dependencies) to
build/compat, and its headers are unpacked there. CUDA sources are compiled too if the headers and a
toolkit are available.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "build" / "compat"
CMAKE_LISTS = (ROOT / "CMakeLists.txt").read_text()
AVX2 = ["-mavx2", "-mfma", "-mf16c", "-Wno-psabi"]
AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw"]
CAPABILITIES = {
    "avx2": [*AVX2, "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2"],
    "avx512": [*AVX2, *AVX512, "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512"],
}
FLAGS = ["-std=c++20", "-fopenmp", "-fPIC", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]


def cmake_list(name: str) -> list[str]:
    """Returns the words of ``set(name ...)`` in CMakeLists.txt."""
    found = re.search(rf"^set\({name}\s([^)]*)\)", CMAKE_LISTS, re.MULTILINE)
    if found is None:
        raise SystemExit(f"error: CMakeLists.txt sets no {name}")
    return re.sub(r"#.*", "", found[1]).split()


def package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations or []))) if spec else None


def version_of(root: Path) -> str:
    for file in ("version.py", "build-version"):
        if (root / file).exists():
            found = re.search(r"\d+\.\d+\.\d+[\w.+]*", (root / file).read_text())
            return found[0] if found else "unknown"
    return "unknown"


def download(version: str) -> Path:
    """Downloads a version of torch unless it is in the cache. Returns its package directory."""
    root = CACHE / version / "torch"
    if (root / "include" / "ATen" / "ATen.h").exists():
        return root
    wheels = CACHE / "wheels"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*pip, f"torch=={version}", "-d", str(wheels)], check=True)
    (wheel,) = wheels.glob(f"torch-{version}*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wanted = [n for n in archive.namelist() if n.startswith("torch/include/")]
        archive.extractall(CACHE / version, [*wanted, "torch/version.py"])
    wheel.unlink()
    return root


def find_torch(what: str) -> Path:
    if Path(what).is_dir():
        return Path(what)
    installed = package("torch")
    if installed and version_of(installed).partition("+")[0] == what:
        return installed
    return download(what)


def include_flags(root: Path) -> list[str]:
    ours = [ROOT / "include", ROOT / "csrc"]
    theirs = [
        root / "include",
        root / "include" / "torch" / "csrc" / "api" / "include",
        Path(sysconfig.get_path("include")),
    ]
    if json := package("nlohmann_json"):
        theirs.append(json / "include")
    return [f"-I{path}" for path in ours] + [f"-isystem{path}" for path in theirs]


def cuda_include() -> Path | None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    listed = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True
    )
    found = re.search(r'INCLUDES="-I([^"]+?)"', listed.stderr)
    return Path(found[1]).resolve() if found else None


def check(root: Path, compiler: str, jobs: int, only: str) -> bool:
    version = version_of(root)
    work = CACHE / f"pch-{version}"
    work.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, *include_flags(root)]
    flags += [f'-DAUTOBATCH_TORCH_VERSION="{version}"', '-DAUTOBATCH_VERSION="0"']
    flags += ["-DAUTOBATCH_FOR_PYTHON=1"]
    python_flags = ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]

    def precompiled(name: str, extra: list[str], headers: list[str]) -> list[str]:
        """Precompiles headers. Returns the compiler flags of sources that use the result."""
        header = work / name
        header.write_text("".join(f"#include {include}\n" for include in headers))
        made = ["-x", "c++-header", str(header), "-o", f"{header}.gch"]
        subprocess.run([compiler, *flags, *extra, *made], check=True)
        return [*flags, *extra, "-Winvalid-pch", "-include", str(header)]

    shared = cmake_list("AUTOBATCH_PCH")
    for_library = precompiled("shared.h", [], shared)
    for_python = precompiled("python.h", python_flags, [*shared, "<torch/extension.h>"])

    def compiles(source: str) -> bool:
        is_python = source.startswith("csrc/python/")
        command = [compiler, *(for_python if is_python else for_library), "-fsyntax-only"]
        if found := re.search(r"kernels_(avx\w+)", source):
            # As in CMakeLists.txt, without the precompiled header, which has other flags.
            command = [compiler, *flags, "-fsyntax-only", *CAPABILITIES[found[1]]]
        if "/cuda/gather" in source:
            command += ["-DAUTOBATCH_WITH_CUDA=1", f"-isystem{cuda_include()}"]
        done = subprocess.run([*command, str(ROOT / source)], capture_output=True, text=True)
        if done.returncode:
            print(f"{source} with torch {version}:\n{done.stderr[:4000]}", flush=True)
        return done.returncode == 0

    sources = cmake_list("AUTOBATCH_SOURCES") + cmake_list("AUTOBATCH_PYTHON_SOURCES")
    if platform.machine() in ("x86_64", "AMD64"):
        sources += cmake_list("AUTOBATCH_X86_SOURCES")
    if (
        cuda_include()
        and (root / "include" / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h").exists()
    ):
        sources += cmake_list("AUTOBATCH_CUDA_SOURCES")
    sources = [source for source in sources if re.search(only, source)]
    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(compiles, sources))
    failed = results.count(False)
    print(
        f"torch {version}: {len(results)} files compiled, {failed} of them with errors", flush=True
    )
    return failed == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("torch", nargs="+", help="a version, or a directory with include/")
    parser.add_argument("--compiler", default=os.environ.get("CXX", "c++"))
    parser.add_argument("--only", default="", help="a regular expression that files' names match")
    jobs = int(os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2"))
    options = parser.parse_args()
    results = [
        check(find_torch(what), options.compiler, jobs, options.only) for what in options.torch
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
