"""Makes the page `gallery`: each workload of benchmarks/ with its speed, its batches in a picture,
and how many lines its authors needed to batch it by hand. Runs when the site is built."""

from __future__ import annotations

import dis
import inspect
import io
import re
import statistics
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import matplotlib

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "tutorials")]
matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import torch  # noqa: E402
from pictures import draw_batches  # noqa: E402

from benchmarks import measure  # noqa: E402
from benchmarks.workload import Sources, Workload  # noqa: E402
from benchmarks.workloads import WORKLOADS  # noqa: E402

PAGE = Path(__file__).parent / "gallery"
MINIBATCH = 16
ROUNDS = 3

HEAD = f"""# Gallery

The models of the [benchmarks](../benchmarks.md), one file each, on data that they make themselves.
Each is written for one example, and runs batched in a block or in `ab.map` as it stands. An expert
has written the same by hand for a whole minibatch, to compare with.

Times are those of a training step of {MINIBATCH} examples on one thread of the machine that built
this page. Lines are those of code that batching by hand adds: collation, and the model once more
for a minibatch. Not counted are comments, blank lines, and functions that the model for one example
needs as well.

| model | eager | by hand | batched | eager / batched | lines by hand | lines for torch-autobatch |
| --- | --: | --: | --: | --: | --: | --: |
"""


# --- lines of code ---


def named_in(code: CodeType, known: dict[str, Any], owner: type) -> Iterator[object]:
    """What code names: globals, and attributes of `owner` (methods) and of imported modules."""
    modules = [m for m in known.values() if inspect.ismodule(m)]
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield known.get(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            yield from (getattr(place, instruction.argval, None) for place in (owner, *modules))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from named_in(constant, known, owner)


def reached(start: list[FunctionType], owner: type) -> set[FunctionType]:
    """These functions, and what they call of the benchmarks' and examples' own."""
    found: set[FunctionType] = set()
    waiting: list[object] = [*start]
    while waiting:
        function = waiting.pop()
        if not isinstance(function, FunctionType) or function in found:
            continue
        if function.__code__.co_filename.startswith((f"{ROOT}/benchmarks/", f"{ROOT}/examples/")):
            found.add(function)
            waiting += named_in(function.__code__, function.__globals__, owner)
    return found


def lines_of(function: FunctionType) -> int:
    """Without blank lines, comments and docstrings."""
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    source = inspect.cleandoc(inspect.getsource(function))
    lines: set[int] = set()
    is_first = True  # of a statement: a string that is one is a docstring
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = is_first and token.type == tokenize.STRING
        if token.type not in (*ignored, tokenize.ENDMARKER) and not is_docstring:
            lines.update(range(token.start[0], token.end[0] + 1))
        is_first = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return len(lines)


def lines_by_hand(workload: Workload) -> int:
    kind = type(workload)
    hand = reached([kind.collate, kind.hand], kind)  # type: ignore[list-item]
    single = reached([type(workload.model).forward], type(workload.model))
    return sum(map(lines_of, hand - single))


# --- times and pictures ---


def median(run: Callable[..., measure.Step], workload: Workload, rounds: int) -> float:
    """Milliseconds of a step, after one that warms up."""
    minibatch = workload.minibatch(MINIBATCH, 0)
    steps = [measure.run_step(run, workload, minibatch, True) for _ in range(1 + rounds)]
    return 1e3 * statistics.median(step.seconds for step in steps[1:])


def entry(name: str) -> tuple[str, str]:
    """A row of the table, and a section with a picture."""
    kind = WORKLOADS[name]
    workload = kind(kind.sizes[-1], Sources(), seed=0)
    eager = median(measure.eager, workload, 1)
    hand = median(measure.hand, workload, ROUNDS)
    ours = median(measure.ours, workload, ROUNDS)
    step = measure.run_step(measure.ours, workload, workload.minibatch(MINIBATCH, 0), True)
    draw_batches(step.report)
    plt.savefig(PAGE / f"{name}.svg")
    plt.close("all")
    by_hand = lines_by_hand(workload)
    anchor = re.sub(r"[^\w -]", "", kind.title.lower()).replace(" ", "-")
    row = (
        f"| [{kind.title}](#{anchor}) | {eager:.1f} ms | {hand:.1f} ms | {ours:.1f} ms "
        f"| {eager / ours:.1f} | {by_hand} | 1 |\n"
    )
    way = "`ab.map` in place of the loop" if kind.reads else "`with ab.batch():` around the loop"
    source = Path(inspect.getfile(kind)).relative_to(ROOT)
    section = (
        f"\n## {kind.title[0].upper()}{kind.title[1:]}\n\n"
        f"`{source}`. {way}; by hand {by_hand} more lines. {eager / ours:.1f} times as fast as "
        f"eager, {hand / ours:.2f} of the speed of the version by hand.\n\n"
        f"![ops that were captured, and calls that ran them, by op]({name}.svg)\n"
    )
    return row, section


def make(app: Any) -> None:
    PAGE.mkdir(exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        entries = [entry(name) for name in WORKLOADS]
    finally:
        torch.set_num_threads(threads)
    text = HEAD + "".join(row for row, _ in entries) + "".join(section for _, section in entries)
    (PAGE / "index.md").write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("builder-inited", make)
    return {"parallel_read_safe": True}
