"""The installed C++ library: its exported symbols, and a program that is built against it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_autobatch as ab
from torch_autobatch import _C
from torch_autobatch import __main__ as command

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(ab.__file__).resolve().parent
EXAMPLE = ROOT / "examples" / "cmake_project"


def library() -> Path:
    """Returns the path of the libautobatch that this process uses."""
    with open("/proc/self/maps") as maps:
        (path,) = {line.split()[-1] for line in maps if line.strip().endswith("/libautobatch.so")}
    return Path(path)


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return str(done.stdout)


def symbols(path: Path, *options: str) -> set[str]:
    """Returns all dynamic symbols, demangled."""
    lines = run("nm", "-DC", *options, path).splitlines()
    return {line[19:] for line in lines if len(line) > 19}


def own(names: set[str]) -> set[str]:
    """Returns the symbols in namespace autobatch, without their arguments."""
    return {re.split(r"[(\[]", name)[0] for name in names if name.startswith("autobatch::")}


# Python objects of tensors are reused with Python 3.11 only (tensor_objects.cpp).
FOR_PYTHON_3_11 = {f"autobatch::PendingTensor::{name}" for name in ("rest", "wake", "end_rest")}

needs_nm = pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (Debian: binutils)")


USED_BY_THE_TESTS_DEVICE = {
    "autobatch::register_region_kernels",
    "autobatch::register_elementwise_kernel",
    "autobatch::cuda::element_of",
    "autobatch::cuda::plan_elementwise",
    "autobatch::cuda::plan_rows",
}


@needs_nm
def test_only_the_api_is_exported() -> None:
    headers = "".join(path.read_text() for path in (ROOT / "include" / "autobatch").glob("*.h"))
    marked = re.findall(r"AUTOBATCH_API [^;{]*?([~\w]+)\s?[({;]", headers)
    marked += re.findall(r"class AUTOBATCH_API (\w+)", headers)  # a class may have a base class
    api = {name.strip("~") for name in marked} | {"Policy"}
    used_by_python = own(symbols(Path(ab._C.__file__), "--undefined-only"))
    used_by_python |= USED_BY_THE_TESTS_DEVICE
    everything = symbols(library(), "--defined-only")
    exported = own(everything)
    assert exported, "nm shows nothing"
    others = {n for n in everything if not re.match(r"((typeinfo|vtable).* for )?autobatch::", n)}
    assert not others, f"none of ours: {sorted(others)}"
    private = {name for name in exported if name.rpartition("::")[2].strip("~") not in api}
    if sys.version_info >= (3, 12):
        private -= FOR_PYTHON_3_11
    assert private <= used_by_python, f"exported for nobody: {sorted(private - used_by_python)}"


@needs_nm
def test_no_python_in_the_library() -> None:
    undefined = run("nm", "-D", "--undefined-only", library())
    assert not re.search(r"\b_?Py[A-Z_]|THPVariable", undefined)
    needed = run("readelf", "-d", library())
    assert "python" not in "".join(line for line in needed.splitlines() if "NEEDED" in line)


def test_public_headers_include_only_theirs_torch_and_the_standard_library() -> None:
    for header in (ROOT / "include" / "autobatch").glob("*.h"):
        for name in re.findall(r"#include [<\"]([^>\"]+)[>\"]", header.read_text()):
            public = (ROOT / "include" / name).exists()
            assert public or name.startswith(("ATen/", "c10/", "torch/")) or "/" not in name, name


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["--info"])
    info = capsys.readouterr().out
    assert ab.__version__ in info
    assert torch.__version__ in info
    assert "CUDA kernels" in info
    assert f"capture on the dispatch key {_C.capture_key}" in info
    with pytest.raises(SystemExit) as ended:
        command.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == ab.__version__


def environment_without_python() -> dict[str, str]:
    """Returns an environment whose PATH has only the tools of a C++ build, without Python."""
    return {"PATH": "/nonexistent", "HOME": os.environ.get("HOME", "/")}


def build_and_run(tmp_path: Path, *arguments: str) -> str:
    """Configures and builds the example from a clean folder, and runs it without Python."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    build = tmp_path / "build"
    run("cmake", "-S", EXAMPLE, "-B", build, *generator, *arguments)
    run("cmake", "--build", build, "-j", "2")
    program = build / "tree_lstm"
    out = run(
        program, EXAMPLE / "trees.txt", "--epochs", "3", "--check", env=environment_without_python()
    )
    assert not re.search(r"lib(torch_)?python", run("ldd", program))
    return out


def check_output(out: str) -> None:
    difference = re.search(r"differ from eager's by (\S+) of the largest", out)
    assert difference is not None, out
    assert float(difference[1]) < 1e-5
    losses = [float(loss) for loss in re.findall(r"epoch \d+: loss (\S+) a tree", out)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "accuracy at the roots" in out
    assert "torch_autobatch report" in out
    saved = re.search(r"ops run +(\d+) in (\d+) batches", out)
    assert saved is not None
    assert int(saved[2]) < int(saved[1]) / 10


def build_folder() -> Path:
    """Returns the folder in which the library was built."""
    for folder in (library().parent, ROOT / "build" / "latest"):
        if (folder / "CMakeCache.txt").exists():
            return folder
    pytest.skip("no build folder to install from")


needs_cmake = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


@pytest.mark.slow
@needs_cmake
def test_example_against_an_install_prefix(tmp_path: Path) -> None:
    """Uses an install prefix that was moved, and finds torch through CMAKE_PREFIX_PATH."""
    first = tmp_path / "first"
    run("cmake", "--install", build_folder(), "--prefix", first, "--component", "autobatch")
    moved = tmp_path / "moved"
    first.rename(moved)
    headers = sorted(path.name for path in (moved / "include" / "autobatch").iterdir())
    assert headers == sorted(path.name for path in (ROOT / "include" / "autobatch").iterdir())
    prefixes = f"-DCMAKE_PREFIX_PATH={moved};{torch.utils.cmake_prefix_path}"
    check_output(build_and_run(tmp_path, prefixes))


@pytest.mark.slow
@needs_cmake
def test_example_against_the_python_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Uses only the directory that `python -m torch_autobatch --cmake-dir` prints."""
    if not (PACKAGE / "share" / "cmake" / "Autobatch").exists():
        pytest.skip("the package was not installed: only its module was built")
    command.main(["--cmake-dir"])
    found = capsys.readouterr().out.strip()
    check_output(build_and_run(tmp_path, f"-DAutobatch_DIR={found}"))


def configured_with(
    tmp_path: Path, project: Path, change: Callable[[str], str]
) -> subprocess.CompletedProcess[str]:
    """Configures a project against an installed package whose config file was changed."""
    prefix = tmp_path / "prefix"
    run("cmake", "--install", build_folder(), "--prefix", prefix, "--component", "autobatch")
    (config,) = prefix.rglob("AutobatchConfig.cmake")
    before = config.read_text()
    config.write_text(change(before))
    assert config.read_text() != before
    return subprocess.run(
        ["cmake", "-S", project, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}"],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@needs_cmake
def test_another_torch_is_refused(tmp_path: Path) -> None:
    """Configuring fails with a message if the package was built with another torch."""
    done = configured_with(tmp_path, EXAMPLE, lambda s: s.replace(torch.__version__, "2.11.0"))
    assert done.returncode != 0
    assert "built with torch 2.11.0" in " ".join(done.stderr.split())


@pytest.mark.slow
@needs_cmake
def test_without_torch_the_package_is_not_found(tmp_path: Path) -> None:
    """A project for which the package is optional is still configured."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(optional CXX)\n"
        "find_package(Autobatch CONFIG QUIET)\n"
        'if(NOT Autobatch_FOUND)\n  message(STATUS "goes on without")\nendif()\n'
        "find_package(Autobatch CONFIG)\n"
    )
    before = re.compile(r'(AUTOBATCH_TORCH_BEFORE) ".+"')
    done = configured_with(tmp_path, project, lambda s: before.sub(r'\1 "/nowhere"', s))
    assert done.returncode == 0, done.stderr
    assert "goes on without" in done.stdout
    assert "torch was not found" in " ".join((done.stdout + done.stderr).split())


def test_treebank_generator_is_what_made_the_file() -> None:
    made = run(sys.executable, EXAMPLE / "make_trees.py")
    assert made == (EXAMPLE / "trees.txt").read_text()
