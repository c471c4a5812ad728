"""The parts of `make gpu`, the most important first, each with a time limit."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CPP_TESTS = ROOT / "build" / "latest" / "autobatch_tests"
JSON = "JSON"  # in a command: the file to which the part writes its figures
TRACES = "TRACES"  # the archive of traces


@dataclass(frozen=True)
class Part:
    """A command. It does not run if a function in `needs` reports that something is missing."""

    name: str
    command: tuple[str, ...]
    limit: int  # seconds
    environment: dict[str, str] = field(default_factory=dict)
    needs: tuple[Callable[[], str], ...] = ()

    def missing(self) -> str:
        """Returns what is missing, or an empty string."""
        return next(filter(None, (need() for need in self.needs)), "")


def python(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, *arguments)


def _needs_catch2() -> str:
    cache = CPP_TESTS.with_name("CMakeCache.txt")
    found = cache.exists() and "Catch2_DIR:PATH=Catch2_DIR-NOTFOUND" not in cache.read_text()
    return "" if found else "Catch2 was not found (CMAKE_PREFIX_PATH)"


def _needs_cpp_tests() -> str:
    return "" if CPP_TESTS.exists() else "no C++ tests"


def _needs_sanitizer() -> str:
    return "" if shutil.which("compute-sanitizer") else "no compute-sanitizer"


def _build(architecture: str, device: str) -> tuple[Part, Part]:
    jobs = str(len(os.sched_getaffinity(0)))
    environment = {"CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", jobs)}
    if device.startswith("cuda"):
        # Without the CUDA kernels, the other parts would be useless.
        kernels = f"-DAUTOBATCH_CUDA=ON -DAUTOBATCH_CUDA_ARCHITECTURES={architecture}"
        given = os.environ.get("AUTOBATCH_CMAKE_ARGS", "")
        environment["AUTOBATCH_CMAKE_ARGS"] = f"{given} {kernels}".strip()
    build = python("setup.py", "--quiet", "build_ext", "--inplace")
    return (
        Part("build", build, 540, environment),
        Part("build the C++ tests", (*build, "--cpp-tests"), 240, environment, (_needs_catch2,)),
    )


def _tests() -> tuple[Part, Part]:
    return (
        Part("tests", python("-m", "pytest", "-q", "-m", "cuda", "tests/python"), 240),
        Part("C++ tests", (str(CPP_TESTS), "[cuda]"), 60, needs=(_needs_cpp_tests,)),
    )


def _sanitizer() -> Iterator[Part]:
    # Each tensor is allocated separately, so that an access behind its end is detected.
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    check = ("compute-sanitizer", "--error-exitcode", "1")
    yield Part(
        "compute-sanitizer: C++ tests",
        (*check, str(CPP_TESTS), "[gather][cuda]"),
        120,
        environment,
        (_needs_sanitizer, _needs_cpp_tests),
    )
    # Memory that is not cached can't be allocated while a CUDA graph is captured.
    leave_out = ("--deselect", "tests/python/kernels/test_cuda.py::test_a_block_in_a_cuda_graph")
    tests = python("-m", "pytest", "-q", "tests/python/kernels/test_cuda.py", *leave_out)
    yield Part("compute-sanitizer: tests", (*check, *tests), 120, environment, (_needs_sanitizer,))


def _suites(device: str) -> Iterator[Part]:
    """Yields test suites and random programs on the device (tests/device/plugin.py)."""
    if device != "cuda":
        return
    plugin = ("-p", "tests.device.plugin", "-p", "no:cacheprovider", "-n", "8")
    for suite in ("cells", "exact", "backward"):
        tests = python("-m", "pytest", "-q", *plugin, f"tests/python/{suite}")
        yield Part(f"suite: {suite}", tests, 120, {"AUTOBATCH_TEST_DEVICE": device})
    for how in ((), ("--cells",), ("--map",)):
        programs = python("-m", "tests.fuzz", "--device", device, "--programs", "500", *how)
        yield Part(" ".join(("random programs", *how)), programs, 120)


def _row(device: str, workload: str, hidden: int, minibatch: int, *more: str) -> Part:
    where = ("--device", device, "--json", JSON)
    command = python("-m", "benchmarks.gpu.row", workload, str(hidden), str(minibatch))
    limit = 90 if minibatch <= 64 else 150  # steps in eager mode take seconds
    return Part(f"row: {workload} {hidden} {minibatch}", (*command, *where, *more), limit)


def _trace(device: str, workload: str, hidden: int, minibatch: int) -> Part:
    command = python("-m", "benchmarks.gpu.trace", workload, str(hidden), str(minibatch))
    return Part(
        f"trace: {workload} {hidden} {minibatch}",
        (*command, "--device", device, "--archive", TRACES),
        60,
    )


def _experts(device: str, *more: str) -> Part:
    command = python("-m", "benchmarks.cell_speedup", "--device", device, "--json", JSON)
    return Part("experts", (*command, *more), 150)


FIRST = ("binary-tree-lstm", "mixture-of-experts")
REST = (
    "tagger",
    "child-sum-pairs",
    "tagger-gates",
    "mv-rnn",
    "transition-parser",
    "neural-modules",
    "tree-generation",
)
# Smaller sizes for some workloads: their time grows at least with the square of the hidden size, or
# their images are 14 x 14.
SIZES = {"mv-rnn": (32, 64), "neural-modules": (64, 128)}


def all_parts(device: str, architecture: str, small: bool) -> list[Part]:
    """Returns all parts, in the order in which they run."""
    if small:
        return rehearsal(device)
    build, build_cpp_tests = _build(architecture, device)
    tests, cpp_tests = _tests()
    parts = [build, tests]
    parts += [_row(device, workload, 128, 64) for workload in FIRST]
    parts += _suites(device)
    parts += [_experts(device, "--rounds", "5"), build_cpp_tests, cpp_tests, *_sanitizer()]
    parts += [_trace(device, workload, 128, 64) for workload in FIRST]
    parts += [_row(device, workload, SIZES.get(workload, (128,))[0], 64) for workload in REST]
    for minibatch in (256, 64):
        for hidden in (256, 1024, 128):
            parts += [_row(device, workload, hidden, minibatch) for workload in FIRST]
    for minibatch in (256, 64):
        for hidden in (128, 256, 1024):
            parts += [
                _row(device, workload, size, minibatch)
                for workload in REST
                for size in SIZES.get(workload, (hidden,))
            ]
    return list({part.name: part for part in parts}.values())


def rehearsal(device: str) -> list[Part]:
    """Returns the same parts with small sizes, for a few minutes on a CPU."""
    build, build_cpp_tests = _build("", device)
    tests, cpp_tests = _tests()
    return [
        build,
        tests,
        *(_row(device, workload, 16, 4, "--rounds", "2") for workload in FIRST),
        _experts(device, "--rounds", "2", "--fewer", "200"),
        build_cpp_tests,
        cpp_tests,
        *_sanitizer(),
        *(_trace(device, workload, 16, 4) for workload in FIRST),
        *(_row(device, workload, 16, 2, "--rounds", "2") for workload in (*FIRST, *REST)),
    ]
