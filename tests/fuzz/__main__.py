"""Compares random programs inside ``batch()`` with eager: ``python -m tests.fuzz --programs 1000``.

A program fails if its values, gradients, strides, aliases, reads or errors differ from eager mode,
or if it crashes, hangs or leaks. It is then made smaller and printed as a script. Known gaps
(``tables.KNOWN_GAPS``) are left out or only counted, unless ``--enable`` names them. With ``--map``
the instances of each block are fibers of ``ab.map``. With ``--cells`` sequences of assignments are
cells. With ``--device sim`` tensors are on the simulated device, with ``--device cuda`` on a GPU.
If a bug hides other bugs, ``--ignore`` its differences or generate programs ``--without`` its ops.
Both take a regular expression.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter

from tests.fuzz import execute
from tests.fuzz.execute import known_gap
from tests.fuzz.isolate import Outcome, Worker
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrink
from tests.fuzz.tables import KNOWN_GAPS, leave_out


def main() -> int:
    """Returns 1 if any program failed, else 0."""
    options = parse()
    knobs = frozenset(KNOWN_GAPS if "all" in options.enable else options.enable)
    execute.MAPPED, execute.CELLS = options.map, options.cells
    if options.device is not None:
        from tests.device import default

        default.use(options.device)  # for eager runs and for blocks
    worker = Worker(knobs, options.timeout)
    leave_out(options.without)
    start, done = time.monotonic(), 0
    known: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    failures: list[Outcome] = []
    for seed in range(options.seed, options.seed + options.programs):
        outcome = worker.run(seed)
        done += 1
        gap = gap_of(outcome, knobs)
        if outcome.difference is None or gap is not None:
            known[gap or ""] += 1
            continue
        kind = outcome.difference.kind
        if options.ignore and re.search(options.ignore, f"{kind}: {outcome.difference.text}"):
            known["ignored"] += 1
            continue
        kinds[kind] += 1
        print(f"seed {seed}: {kind}: {outcome.difference.text[:160]}", flush=True)
        if outcome.program is not None and kinds[kind] <= options.each:
            failures.append(smallest(worker, outcome, options.shrink))
        if len(failures) >= options.stop:
            break
    worker.stop()
    for failure in sorted(failures, key=lambda f: -f.program.size()):
        print_failure(failure)
    seconds = time.monotonic() - start
    print(f"{done} programs from seed {options.seed} in {seconds:.0f} s, {done / seconds:.1f}/s")
    print(f"known gaps met: { {gap: n for gap, n in known.items() if gap} }")
    print(f"failures: {dict(kinds)}" if kinds else "no failures")
    return 1 if kinds else 0


def gap_of(outcome: Outcome, knobs: frozenset[str]) -> str | None:
    """Returns the known gap that explains an outcome, or None if there is none or it is enabled."""
    if outcome.difference is not None and outcome.difference.kind == "eager":
        return outcome.difference.text
    if outcome.program is None or outcome.difference is None:
        return None
    gap = known_gap(outcome.program, outcome.difference)
    return None if gap in knobs else gap


def smallest(worker: Worker, outcome: Outcome, seconds: float) -> Outcome:
    """Returns the smallest program found that fails in the same way."""
    best = outcome

    def fails(candidate: Program) -> bool:
        nonlocal best
        again = worker.run(candidate)
        same = again.difference is not None and again.difference.kind == outcome.difference.kind
        if not same or gap_of(again, worker.knobs) is not None:
            return False
        best = Outcome(candidate, again.difference)
        return True

    worker.stop()
    if fails(outcome.program):
        shrink(outcome.program, fails, seconds)
    else:
        print(f"# seed {outcome.program.seed} fails only after other programs", flush=True)
    worker.stop()
    return best


def print_failure(failure: Outcome) -> None:
    """Prints the difference and a script that shows it."""
    text = failure.difference.text.replace("\n", "\n# ")
    print(f"\n# --- seed {failure.program.seed}: {text[:800]}")
    as_run = execute.MAPPED or execute.CELLS
    print(execute.source(failure.program) if as_run else failure.program.script())


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument(
        "--enable", action="append", default=[], choices=[*KNOWN_GAPS, "all"], help="a known gap"
    )
    parser.add_argument(
        "--map", action="store_true", help="the instances of a block as fibers of ab.map"
    )
    parser.add_argument(
        "--device", choices=["sim", "cuda"], help="where tensors lie (tests/device)"
    )
    parser.add_argument("--cells", action="store_true", help="plain assignments as cells")
    parser.add_argument("--ignore", metavar="REGEX", help="differences not to count")
    parser.add_argument("--without", metavar="REGEX", help="patterns to leave out of programs")
    parser.add_argument("--shrink", type=float, default=20, help="seconds for each failure")
    parser.add_argument("--each", type=int, default=3, help="failures of a kind to make smaller")
    parser.add_argument("--stop", type=int, default=20, help="stop at so many small programs")
    parser.add_argument("--timeout", type=float, default=30, help="seconds for a program")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
