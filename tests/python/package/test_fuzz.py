"""Random programs compared with eager, and tests that the fuzzer detects planted differences."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from tests.fuzz.isolate import Worker  # noqa: E402
from tests.fuzz.program import Program, Statement  # noqa: E402
from tests.fuzz.shrink import shrink  # noqa: E402

BATCHED = "batch.keywords['enabled']"  # true in the batched run only: plants a difference


def planted(*lines: str) -> Program:
    """Returns a program with some unrelated lines around the given ones."""
    return Program(
        [
            Statement("W0 = data(1, 4, 4).requires_grad_()"),
            Statement("a0 = data(2, 3, 4)"),
            Statement("a1 = torch.tanh(a0 @ W0)"),
            *map(Statement, lines),
            Statement("with batch() as scope:", [Statement("a2 = torch.tanh(a0)")]),
        ]
    )


@pytest.fixture
def worker():
    """A process to run programs in."""
    made = Worker(frozenset(), timeout=20)
    yield made
    made.stop()


@pytest.mark.parametrize("how", [[], ["--map"]])
def test_random_programs_are_as_in_eager(how: list[str]) -> None:
    """Runs a few hundred programs."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--programs", "300", "--each", "1", *how],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "300 programs" in done.stdout


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("value", f"a3 = a1 * (1 + 1e-6 * {BATCHED})"),
        ("grad", f"(a1.sum() * (1 + {BATCHED})).backward()"),
        ("dtype", f"a3 = a0.float() if {BATCHED} else a0.double()"),
        ("shape", f"a3 = a0[None] if {BATCHED} else a0[:, None]"),
        ("stride", f"a3 = a0.clone() if {BATCHED} else a0.t().contiguous().t()"),
        ("requires_grad", f"a3 = a1.detach() if {BATCHED} else a1"),
        ("alias", f"a3 = a0.clone() if {BATCHED} else a0"),
        ("log", f"log.append(1.0 + {BATCHED})"),
        ("hook", f"hooks['a1'].append({BATCHED})"),
        ("variables", f"if {BATCHED}: a3 = 1"),
        ("leak", f"torch.planted = a1 if {BATCHED} else None"),
        ("error: ValueError: planted", f"if {BATCHED}: raise ValueError('planted')"),
        ("no error: ValueError: planted", f"if not {BATCHED}: raise ValueError('planted')"),
        ("error type IndexError KeyError", f"raise IndexError if {BATCHED} else KeyError"),
        ("crash SIGABRT", f"if {BATCHED}: __import__('os').abort()"),
        ("hang", f"while {BATCHED}: pass"),
    ],
)
def test_a_planted_difference_is_seen(worker: Worker, kind: str, line: str) -> None:
    """Each kind of difference is distinguished from the others."""
    if kind == "hang":
        worker.timeout = 2
    difference = worker.run(planted(line)).difference
    assert difference is not None
    assert difference.kind == kind


def test_memory_that_grows_is_seen(worker: Worker) -> None:
    """Growth is detected even if no variable of the program holds the memory."""
    program = planted(f"torch.__dict__.setdefault('planted', []).append(bytes(40000 * {BATCHED}))")
    program.seed = 0
    difference = worker.run(program).difference
    assert difference is not None
    assert difference.kind == "memory"


def test_equal_runs_are_equal(worker: Worker) -> None:
    """Equal runs have no difference, even after a process crashed."""
    worker.run(planted(f"if {BATCHED}: __import__('os').abort()"))
    assert worker.run(planted("a3 = a1 * 2", "a3.sum().backward()")).difference is None


def test_a_failing_program_is_made_smaller(worker: Worker) -> None:
    """The program shrinks to the failing line and its inputs, without surrounding blocks."""
    inner = [Statement("a4 = a1 + 1"), Statement(f"a5 = a4 * (1 + {BATCHED})")]
    program = planted("a3 = a1 * 2")
    program.statements.append(Statement("with torch.no_grad():", inner))

    def fails(candidate: Program) -> bool:
        difference = worker.run(candidate).difference
        return difference is not None and difference.kind == "value"

    small = shrink(program, fails, seconds=20)
    assert [s.code for s in small.statements][-1].startswith("a5 = ")
    assert small.size() == 2


def test_a_seed_gives_one_program(worker: Worker) -> None:
    """A seed gives the same program in any process, and the next seed gives a different one."""
    first, again = worker.run(7).program, Worker(frozenset(), timeout=10)
    assert first is not None
    same, other = again.run(7).program, again.run(8).program
    again.stop()
    assert same is not None
    assert other is not None
    assert first.source() == same.source() != other.source()


def test_the_script_runs_by_itself(tmp_path: Path) -> None:
    """The printed script does not need the fuzzer, and shows the difference."""
    script = planted("a3 = a1 * (2 if batch is ab.batch else 1)").script()
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a3\neager:")
