"""Runs programs in a forked process, so that a crash or a hang ends only one program."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.fuzz.execute import Difference, check
from tests.fuzz.generate import generate
from tests.fuzz.program import Program

_fork = multiprocessing.get_context("fork")
_CHUNK = 500  # programs per process: enough to show leaks, and the next process starts clean


@dataclass
class Outcome:
    """The result of one program."""

    program: Program | None
    difference: Difference | None


class Worker:
    """A process that runs programs one after the other. A new process replaces it if it dies."""

    def __init__(self, knobs: frozenset[str], timeout: float) -> None:
        self.knobs = knobs
        self.timeout = timeout
        self.served = 0
        self.process: Any = None

    def run(self, task: int | Program) -> Outcome:
        """Runs a program, or the program of a seed, and returns its outcome."""
        if self.process is None or (self.served >= _CHUNK and isinstance(task, int)):
            self.stop()
            self._start()
        self.served += 1
        program: Program | None = None
        try:
            self.pipe.send(task)
            while self.pipe.poll(self.timeout):
                answer = self.pipe.recv()
                if isinstance(answer, Outcome):
                    return answer
                program = answer
            difference = Difference("hang", f"longer than {self.timeout} s")
        except (EOFError, OSError):
            difference = self._cause_of_death(program)
        self.stop()
        return Outcome(program, difference)

    def _start(self) -> None:
        self.pipe, theirs = _fork.Pipe()
        self.errors = tempfile.NamedTemporaryFile("r")  # noqa: SIM115  (closed in `stop`)
        self.process = _fork.Process(
            target=_serve, args=(theirs, self.pipe, self.errors.name, self.knobs), daemon=True
        )
        self.process.start()
        self.served = 0
        theirs.close()

    def stop(self) -> None:
        """Ends the process."""
        if self.process is None:
            return
        self.process.kill()
        self.process.join()
        self.pipe.close()
        self.errors.close()
        self.process = None

    def _cause_of_death(self, program: Program | None) -> Difference:
        self.process.join()
        code = self.process.exitcode or 0
        name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        lines = self.errors.read().strip().splitlines() or ["no message"]
        if program is None and code < 0:  # the crash was in the generator or in the eager run
            return Difference("eager", f"{name} of PyTorch itself")
        if program is None:
            return Difference("generator", "\n".join([name, *lines[-30:]]))
        return Difference(f"crash {name}", f"{name}; {lines[-1][:300]}")


def _serve(pipe: Connection, other_end: Connection, errors: str, knobs: frozenset[str]) -> None:
    """Runs in the forked process. Sends an answer after the eager run and one after the batched
    run."""
    other_end.close()
    os.dup2(os.open(errors, os.O_WRONLY | os.O_TRUNC), sys.stderr.fileno())
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    gc.freeze()  # so that the collector visits only objects of programs
    try:
        while True:
            program = pipe.recv()
            if isinstance(program, int):
                program = generate(program, knobs)
            difference = check(program, lambda made=program: pipe.send(made))
            pipe.send(Outcome(program, difference))
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc(file=os.fdopen(2, "w", closefd=False))
        os._exit(1)
