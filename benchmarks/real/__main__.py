"""Measures models of other packages, each package in a separate process.

python -m benchmarks.real                         all, a few minutes
python -m benchmarks.real --only torch-geometric,transformers
python -m benchmarks.real --only torch-geometric:GCN --seconds 10
python -m benchmarks.real --only pyro-ppl --check  answers alone, of one package
python -m benchmarks.real --write                 puts the tables into docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.real import PACKAGES, answers, makers, timing, version
from benchmarks.real.answers import EAGER, OURS
from benchmarks.real.report import markdown
from benchmarks.real.timing import Row

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "benchmarks.md"
MARKS = "<!-- make bench-real: begin -->\n", "<!-- make bench-real: end -->\n"
TIME_LIMIT = 300  # seconds for a package; if it takes longer, it hangs


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", metavar="NAMES", help=f"packages, or package:model: {', '.join(PACKAGES)}")
    add("--seconds", type=float, default=4, help="how long each model is timed (4)")
    add("--json", type=Path, help="write all figures there")
    add("--markdown", type=Path, help="write the tables there too")
    add("--write", action="store_true", help=f"write the tables into {DOCUMENT.name}")
    add("--check", action="store_true", help="compare answers in double precision, and no more")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write: of all packages, without --only")
    options.wanted = [w.partition(":") for w in (options.only or ",".join(PACKAGES)).split(",")]
    unknown = {package for package, _, _ in options.wanted} - set(PACKAGES)
    if unknown:
        parser.error(
            f"--only: {', '.join(sorted(unknown))}: expected some of {', '.join(PACKAGES)}"
        )
    return options


def work(options: argparse.Namespace) -> None:
    """Measures the models of one package. Prints a line of JSON for each."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    measure.keep_freed_memory()
    ((package, _, wanted),) = options.wanted
    names = [wanted] if wanted else list(makers(package))
    for name in names:
        print(name, flush=True)
        print(json.dumps(timing.measure(package, name, options.seconds).as_data()), flush=True)


def check(options: argparse.Namespace) -> int:
    """Prints which results of a package differ from eager mode. Returns 1 if any differs."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    ((package, _, wanted),) = options.wanted
    failed = 0
    for name, make in makers(package).items():
        if wanted in ("", name):
            for failure in answers.failures(make):
                print(f"{package}: {name}, {failure}", flush=True)
                failed = 1
    return failed


def rows_of(package: str, model: str, seconds: float) -> Iterator[Row]:
    """Yields the rows of a separate process. After a crash, the current row contains the error."""
    command = [sys.executable, "-m", "benchmarks.real", "--worker", "--seconds", str(seconds)]
    command += ["--only", f"{package}:{model}" if model else package]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIME_LIMIT)
            ended = f"the process ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
            ended = f"takes more than {TIME_LIMIT} s"
    at = model
    for line in output.splitlines():
        if line.startswith('{"package"'):
            yield Row.from_data(json.loads(line))
            at = ""
        else:
            at = line
    if process.returncode != 0:
        last = (errors.strip().splitlines() or [""])[-1]
        yield Row(package, installed(package), at or "(all)", failed=f"{ended}: {last}")


def installed(package: str) -> str:
    try:
        return version(package)
    except ImportError:
        return "(not installed)"


def line(row: Row) -> str:
    """Formats a row, to show progress."""
    if row.failed:
        return f"{row.package}: {row.model}: {row.failed}"
    parts = []
    for phase, found in row.phases.items():
        for ours in OURS:
            if ours in found.failed:
                parts.append(f"{phase} {ours} fails: {found.failed[ours][:80]}")
            elif ours in found.speed:
                ratio = found.speed[ours][EAGER]
                parts.append(f"{phase} {ours} {ratio:.2f} ({found.flushes[ours]})")
        if "own" in found.failed:
            parts.append(f"{phase} own fails: {found.failed['own'][:80]}")
    return f"{row.package}: {row.model}: {', '.join(parts)}"


def write(text: str) -> None:
    """Writes the tables into the document, between their marks."""
    document = DOCUMENT.read_text(encoding="utf-8")
    before, begin, rest = document.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{DOCUMENT.name}: no lines {MARKS}")
    DOCUMENT.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")


def main() -> int:
    options = parse()
    if options.check:
        if len(options.wanted) > 1:
            raise SystemExit("--check: one package, since some of them change what others see")
        return check(options)
    if options.worker:
        work(options)
        return 0
    rows = []
    print("eager / ours, and flushes in brackets", file=sys.stderr)
    for package, _, model in options.wanted:
        for row in rows_of(package, model, options.seconds):
            rows.append(row)
            print(line(row), file=sys.stderr, flush=True)
    text = markdown(rows)
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    if options.json:
        data = [row.as_data() for row in rows]
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.write:
        write(text)
    return int(any(row.failed or any(p.failed for p in row.phases.values()) for row in rows))


if __name__ == "__main__":
    sys.exit(main())
