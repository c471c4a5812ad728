#!/usr/bin/env python3
"""Runs every op of PyTorch's operator database inside a block, and compares it with eager.

    python scripts/op_sweep.py                     all ops, all dtypes
    python scripts/op_sweep.py --write             all ops, all dtypes; rewrites docs/ops.md
    python scripts/op_sweep.py --only add,fft.fft --dtypes float32 --verbose

The exit status is 1 if an op is wrong, or has a worse class than in docs/ops.md. op_check.py
documents the checks and the classes. Each worker is a separate process, so that a crash is
reported like any other error of an op.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import op_check
import torch
from op_check import BATCHED, CLASSES, DTYPES, EXCEPTIONS, Outcome

TABLE = Path(__file__).resolve().parents[1] / "docs" / "ops.md"
TIME_LIMIT = 900  # seconds; an op that takes longer counts as hanging
DEFAULT_SAMPLES = 8
# The instances of a check have equal data. Their ops must run as one batch, and not as one op.
DISABLED = ",".join([*os.environ.get("AUTOBATCH_DISABLE", "").split(), "common_subexpressions"])


# --- workers --------------------------------------------------------------------------------------


def serve(dtypes: list[str], samples: int, each: bool) -> None:
    """Runs a worker. A line of input is an index, and a line of output is its outcomes as JSON."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of ops out of the results
    for line in sys.stdin:
        outcomes = op_check.check_index(int(line), dtypes, samples, each)
        print(json.dumps([asdict(outcome) for outcome in outcomes]), file=out, flush=True)


class Worker:
    """A process that checks ops. It is replaced after a crash."""

    def __init__(self, arguments: list[str]) -> None:
        self.command = [sys.executable, __file__, "--worker", *arguments]
        self.process: subprocess.Popen[str] | None = None

    def check(self, index: int) -> list[Outcome]:
        if self.process is None:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "AUTOBATCH_DISABLE": DISABLED},
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(index, file=self.process.stdin, flush=True)
        answered, _, _ = select.select([self.process.stdout], [], [], TIME_LIMIT)
        line = self.process.stdout.readline() if answered else ""
        if line:
            return [Outcome(**fields) for fields in json.loads(line)]
        self.process.kill()
        ended = f"crashed ({self.process.wait()})" if answered else "hangs"
        self.process = None
        name = op_check.op_name(op_check.op_db[index])
        return [Outcome(name, "?", problems=[f"the process {ended}"])]

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()


def sweep(
    dtypes: list[str], samples: int, each: bool, jobs: int, only: set[str] | None = None
) -> list[Outcome]:
    """Returns the outcomes of all ops, in the order of the database."""
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index, op in enumerate(op_check.op_db):
        if only is None or op_check.op_name(op) in only:
            todo.put(index)
    arguments = ["--dtypes", ",".join(dtypes), "--samples", str(samples), *["--each"] * each]
    done: dict[int, list[Outcome]] = {}

    def work() -> None:
        worker = Worker(arguments)
        while True:
            try:
                index = todo.get_nowait()
            except queue.Empty:
                return worker.close()
            done[index] = worker.check(index)
            if sys.stderr.isatty():
                print(f"  {len(done)} ops, {todo.qsize()} to go ", end="\r", file=sys.stderr)

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcome for index in sorted(done) for outcome in done[index]]


# --- the table ------------------------------------------------------------------------------------

VERSION = torch.__version__.rsplit(".", 1)[0]  # 2.13

HEADER = """# Ops

Written by `make sweep ARGS=--write`; do not edit. The tables list every op of PyTorch {version}'s
operator database. All tensor inputs are pending. An op has the worst class of its samples:

{classes}

A cell is empty if the op does not take the dtype, has no tensor input, or has no sample that eager
mode runs. All other ops were compared with eager mode: values, dtypes, shapes, strides,
`requires_grad` and gradients. For random ops, the distribution was compared, and a seed must give
the same numbers again.

{summary}
"""


def rows_of(outcomes: list[Outcome]) -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.name, {})[outcome.dtype] = outcome.kind
    return {name: row for name, row in rows.items() if any(row.values())}


def table_of(outcomes: list[Outcome]) -> str:
    lines = [f"| op | {' | '.join(DTYPES)} |", "| --- " * (len(DTYPES) + 1) + "|"]
    for name, row in sorted(rows_of(outcomes).items()):
        lines.append(f"| {name} | {' | '.join(row.get(dtype, '') for dtype in DTYPES)} |")
    return "\n".join(lines) + "\n"


def write_table(outcomes: list[Outcome]) -> None:
    classes = "\n".join(f"- *{name}*: {text}" for name, text in CLASSES.items())
    pairs = [o for o in outcomes if o.kind and not o.in_place]
    text = HEADER.format(version=VERSION, classes=classes, summary=f"{share_of(pairs)}.")
    if EXCEPTIONS:
        text += "\nNot checked, or not checked in full:\n\n"
        text += "\n".join(f"- `{name}`: {why}" for name, why in EXCEPTIONS.items()) + "\n"
    text += "\n" + table_of([o for o in outcomes if not o.in_place])
    text += "\n## In place\n\nRun on a clone that was made inside the block.\n\n"
    TABLE.write_text(text + table_of([o for o in outcomes if o.in_place]))


def read_table() -> dict[tuple[str, str], str]:
    """Returns the classes in docs/ops.md by (op, dtype); none for other versions of PyTorch."""
    promised = {}
    columns: list[str] = []
    text = TABLE.read_text() if TABLE.exists() else ""
    for line in text.splitlines() if f"PyTorch {VERSION}'s" in text else []:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] == "op":
            columns = cells[1:]
        elif line.startswith("|") and columns and not cells[0].startswith("---"):
            promised |= {
                (cells[0], d): kind for d, kind in zip(columns, cells[1:], strict=True) if kind
            }
    return promised


# --- results --------------------------------------------------------------------------------------


def share_of(pairs: list[Outcome]) -> str:
    kinds = Counter(o.kind for o in pairs)
    batched = sum(kinds[kind] for kind in BATCHED)
    listed = ", ".join(f"{kinds[kind]} {kind}" for kind in CLASSES)
    share = 100 * batched / max(len(pairs), 1)
    return f"{len(pairs)} pairs of op and dtype, {share:.1f} % batched: {listed}"


def wrong(outcomes: list[Outcome]) -> list[str]:
    return [f"{o.name} {o.dtype}: {problem}" for o in outcomes for problem in o.problems]


def fallen(outcomes: list[Outcome]) -> list[str]:
    """Returns messages for ops with a worse class than in the table. New ops get no message."""
    promised = read_table()
    order = list(CLASSES)
    out = []
    for o in outcomes:
        before = promised.get((o.name, o.dtype))
        if before and o.kind and order.index(o.kind) > order.index(before):
            out.append(f"{o.name} {o.dtype}: {o.kind}, was {before} ({'; '.join(o.reasons)})")
    return out


def print_reasons(outcomes: list[Outcome]) -> None:
    """Prints why ops are not batched, the most frequent reason first."""
    ops: dict[str, set[str]] = {}
    pairs: Counter[str] = Counter()
    for o in outcomes:
        for reason in o.reasons if o.kind not in BATCHED else []:
            pairs[reason] += 1
            ops.setdefault(reason, set()).add(o.name)
    for reason, count in pairs.most_common():
        print(f"{count:5}  {reason}  ({', '.join(sorted(ops[reason])[:4])})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="rewrite docs/ops.md")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--samples", type=int, default=DEFAULT_SAMPLES, help="of each op")
    parser.add_argument("--only", help="ops, separated by commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="write all outcomes there")
    parser.add_argument("--verbose", action="store_true", help="why ops are not batched")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--each", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    dtypes = args.dtypes.split(",")
    if args.worker:
        serve(dtypes, args.samples, args.each)
        return 0
    only = set(args.only.split(",")) if args.only else None
    outcomes = sweep(dtypes, args.samples, True, args.jobs, only)
    if args.json:
        args.json.write_text("\n".join(json.dumps(asdict(o)) for o in outcomes) + "\n")
    if args.verbose:
        print_reasons(outcomes)
    failures = wrong(outcomes) + fallen(outcomes)
    print("\n".join(failures))
    ordinary = [o for o in outcomes if o.kind and not o.in_place]
    print(f"{share_of(ordinary)}; {len({(o.name, o.dtype) for o in outcomes if o.problems})} wrong")
    if args.write:
        write_table(outcomes)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
