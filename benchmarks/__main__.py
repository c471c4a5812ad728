"""Measures the workloads and prints Markdown.

python -m benchmarks                              all, minibatch 64, one thread
python -m benchmarks --quick                      a few minutes: fewer rounds, small minibatches
python -m benchmarks --only tagger,mv-rnn --hidden 64,128 --minibatch 1,8,64
python -m benchmarks --forward                    without backward
python -m benchmarks --policies                   only the numbers of batches
python -m benchmarks --memory                     peak memory, each in a separate process
python -m benchmarks --minibatch 1,4,16,64,256,1024 --eager-rounds 1 --plot speed.png
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import measure, memory, suite, tables
from benchmarks.arguments import some_of
from benchmarks.suite import Result
from benchmarks.workload import Sources, Workload
from benchmarks.workloads import WORKLOADS


def numbers(text: str) -> list[int]:
    """Parses a list of positive integers: ``1,8,64``."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{min(values)} is less than 1")
    return values


def path_from(variable: str) -> Path | None:
    """Returns a path from an environment variable, or None if the variable is not set."""
    value = os.environ.get(variable)
    return Path(value) if value else None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", type=some_of(WORKLOADS), metavar="NAMES", help=f"some of {', '.join(WORKLOADS)}")
    add("--hidden", type=numbers, help="hidden sizes in place of each workload's own")
    add("--minibatch", type=numbers, help="examples a step (64)")
    add("--rounds", type=int, help="rounds that are timed (9)")
    add("--eager-rounds", type=int, help="in how many of them eager runs too (3)")
    add("--threads", type=int, default=1, help="with more than one, wall time is measured")
    add("--forward", action="store_true", help="no backward")
    add("--no-peers", action="store_true", help="leave other libraries out")
    add("--policies", action="store_true", help="count batches of each policy, and no more")
    add("--memory", action="store_true", help="peaks of memory, and no more")
    add("--keep-memory", action="store_true", help="glibc gives no memory back to the system")
    add("--quick", action="store_true", help="2 rounds, minibatches of 8, no peers")
    add("--treebank", type=Path, default=path_from("TREEBANK"), help="binary trees, one a line")
    add("--tags", type=Path, default=path_from("TAGS"), help="tagged sentences, one a line")
    add("--json", type=Path, help="write all figures there")
    add("--markdown", type=Path, help="write the tables there too")
    add("--plot", type=Path, help="plot speed against minibatch, as PNG (needs matplotlib)")
    options = parser.parse_args(arguments)
    quick = options.quick
    options.minibatch = options.minibatch or [8 if quick else 64]
    options.rounds = options.rounds or (2 if quick else 9)
    options.eager_rounds = min(options.eager_rounds or (1 if quick else 3), options.rounds)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the measurements. Returns 1 if the results of a variant differ from eager mode."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    if options.keep_memory:
        measure.keep_freed_memory()
    sources = Sources(options.treebank, options.tags)
    kinds = [WORKLOADS[name] for name in options.only or WORKLOADS]
    data: dict[str, Any] = {"environment": suite.environment()}
    text = ", ".join(f"{key} {value}" for key, value in data["environment"].items()) + "\n\n"

    if options.policies:
        data["policies"] = count_batches(options, kinds, sources)
        text += tables.policies(data["policies"])
        return finish(options, data, text, [])
    if options.memory:
        data["memory"] = measure_memory(options, kinds, sources)
        text += tables.memory(data["memory"])
        return finish(options, data, text, [])

    plan = suite.Plan(
        options.rounds,
        options.eager_rounds,
        warm_up=1 if options.quick else 3,
        peers=not (options.no_peers or options.quick),
        backward=not options.forward,
    )
    results, failed = measure_speed(options, kinds, sources, plan)
    data["results"] = suite.as_data(results)
    if results:
        is_sweep = len(options.minibatch) > 1
        text += tables.sweep(results) if is_sweep else speed_tables(results, plan.peers)
    return finish(options, data, text, results) or int(failed)


def count_batches(
    options: argparse.Namespace, kinds: list[type[Workload]], sources: Sources
) -> list[dict[str, Any]]:
    """Counts the batches of each policy, for each workload."""
    rows = []
    for kind in kinds:
        workload = suite.make(kind, (options.hidden or kind.sizes)[0], sources)
        rows.append(suite.count_batches(workload, options.minibatch[0]))
    return rows


def measure_memory(
    options: argparse.Namespace, kinds: list[type[Workload]], sources: Sources
) -> list[dict[str, Any]]:
    """Measures the peak memory of each workload, hidden size and minibatch."""
    return [
        memory.compare(kind.name, hidden, minibatch, sources)
        for kind in kinds
        for hidden in options.hidden or kind.sizes
        for minibatch in options.minibatch
    ]


def measure_speed(
    options: argparse.Namespace, kinds: list[type[Workload]], sources: Sources, plan: suite.Plan
) -> tuple[list[Result], bool]:
    """Times the variants of each workload.

    Returns:
        The results, and whether those of a variant differ from eager mode.
    """
    results: list[Result] = []
    failed = False
    for kind in kinds:
        for hidden in options.hidden or kind.sizes:
            workload = suite.make(kind, hidden, sources)
            for minibatch in options.minibatch:
                try:
                    results.append(suite.compare(workload, hidden, minibatch, plan))
                except AssertionError as error:
                    failed = True
                    print(f"benchmarks: {error}", file=sys.stderr)
                    continue
                r = results[-1]
                print(
                    f"{r.workload} {hidden}, minibatch {minibatch}: hand / ours "
                    f"{r.against_hand:.2f}, eager / ours {r.ours_against['eager']:.1f}, "
                    f"difference {r.difference:.0e}",
                    file=sys.stderr,
                    flush=True,
                )
    return results, failed


def speed_tables(results: list[Result], with_peers: bool) -> str:
    """Formats the results for one size of minibatch."""
    text = tables.speed(results) + "\n" + tables.stages(results) + "\n"
    text += tables.breakdowns(results) + "\n"
    if with_peers:
        text += tables.peers(results) + "\n"
    return text + tables.slow_ops(results)


def finish(
    options: argparse.Namespace, data: dict[str, Any], text: str, results: list[Result]
) -> int:
    """Prints the tables. Writes the files that the options name."""
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.plot and results:
        tables.plot(results, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
