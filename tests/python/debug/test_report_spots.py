"""The position of the instruction determines which expression of a line reads a value. Other
expressions of the line are not reported."""

from __future__ import annotations

import ast
import contextlib
import copy
import csv
import io
import itertools
import linecache
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch import _source
from torch_autobatch._cell_program import compile_function
from torch_autobatch._deferred_checks import Check
from torch_autobatch._report_flushes import cause_of
from torch_autobatch._report_source import Spot, around, nodes_at

linear = nn.Linear(4, 1)
CHECK = "defer_checks=True"
MAP = "ab.map"
AFTER = "after the block"

# A line of code that uses a tensor `y`, the expected spot, a part of the advice.
LINES = [
    ("if y > 1e4: print('big')", "if", MAP),
    ("if y > 1e4: log.warning('large')", "if", MAP),
    ("if y > 1e4: bar.set_postfix(a=1)", "if", MAP),
    ("if y > 1e4: hist.append(y.item())", "if", MAP),
    ("if not y.isfinite().all(): raise ValueError(f'bad {y}')", "if ...: raise", CHECK),
    ("if i < 9 and y > 1e4: print('big')", "if", MAP),
    ("assert y.isfinite().all(), f'bad {y}'", "assert", CHECK),
    ("hist.append(y.item()); print('step', i)", ".item()", AFTER),
    ("hist.append({'loss': y.item(), 'msg': f'{i}'})", ".item()", AFTER),
    ("v = y.item() if i else y.item(); assert v is not None", ".item()", AFTER),
    ("assert i < 10, f'{i}'; y.tolist()", ".tolist()", AFTER),
    ("log.info('x %d', i); y.tolist()", ".tolist()", AFTER),
    ("hist.append('a' if y > 0 else f'b{i}')", "if", MAP),
    ("print('loss', y.item())", "print", AFTER),
    ("log.info('loss %.3f', y)", "a logger", AFTER),
    ("hist.append(f'{y:.3f}')", "an f-string", AFTER),
    ("[t for t in [y] if t > 0]", "if", MAP),
    ("hist.append(y > 0 and y < 3)", "and, or", MAP),
    ("hist.append(y > 0 or print('small'))", "and, or", MAP),
    ("lst[i] = float(y)", "float()", MAP),
    ("buf[i] = y", "numpy()", AFTER),
    ("csv.writer(out).writerow([i, y])", "writerow(), a conversion of a tensor to text", AFTER),
    ("hist.append(','.join(map(str, [y])))", "join(), a conversion of a tensor to text", AFTER),
    ("copy.copy(y.detach())", "copy.copy()", "clone()"),
    ("scheduler.step(y)", "a step of the learning-rate scheduler", AFTER),
    ("torch.equal(y, y + 1)", "equal(), a read of a value (equal)", MAP),
]


class Silent:
    """A progress bar."""

    def set_postfix(self, **values: object) -> None: ...


def made(line: str, path: Path) -> tuple[Callable[[Tensor, int], object], str]:
    """Makes a function with this line. Returns the function and the place of the line."""
    path.write_text(f"def read(y, i):\n    {line}\n")
    linecache.checkcache(str(path))
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    logger = logging.Logger("silent")  # has no parent loggers
    logger.addHandler(logging.StreamHandler(io.StringIO()))
    space: dict[str, Any] = {
        "hist": [],
        "lst": [0.0] * 9,
        "buf": np.zeros(9),
        "out": io.StringIO(),
        "bar": Silent(),
        "log": logger,
        "csv": csv,
        "copy": copy,
        "torch": torch,
        "print": lambda *values: str(values),
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    }
    exec(compile(path.read_text(), str(path), "exec"), space)
    return space["read"], f"{path}:2"


@pytest.mark.parametrize(("line", "what", "remedy"), LINES, ids=[line for line, *_ in LINES])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_reads_takes_the_blame(line: str, what: str, remedy: str, tmp_path: Path) -> None:
    read, site = made(line, tmp_path / "program.py")
    with ab.batch(adaptive=False) as scope:
        kept = []
        for i in range(6):
            y = linear(torch.randn(4)).sum()
            read(y, i)
            kept.append(y.tanh())
    worst = scope.report().findings[0]
    assert worst.site == site
    assert worst.what.startswith(f"{what}: "), worst.what
    assert "early flush" in worst.what or "ran eagerly" in worst.what
    assert remedy in worst.remedy


def test_a_call_over_several_lines_with_other_texts(tmp_path: Path) -> None:
    line = "dict(\n        loss=y.item(),\n        name=f'epoch {i}',\n    )"
    read, _ = made(line, tmp_path / "lines.py")
    with ab.batch(adaptive=False) as scope:
        for i in range(6):
            read(linear(torch.randn(4)).sum(), i)
    assert scope.report().findings[0].what.startswith(".item(): 6 early flushes")
    assert scope.report().findings[0].source == "loss=y.item(),"


# --- positions ---


def spots(source: str, path: Path) -> Iterator[Spot]:
    """Returns the spots of all instructions of a program."""
    path.write_text(source)
    linecache.checkcache(str(path))
    rest = [compile(source, str(path), "exec")]
    while rest:
        code = rest.pop()
        rest += [c for c in code.co_consts if isinstance(c, CodeType)]
        for line, last, first_column, last_column in code.co_positions():
            if line and last and first_column is not None and last_column is not None:
                position = (last - line) << 32 | first_column << 16 | last_column
                yield Spot(f"{path}:{line}", position)


def test_a_spot_is_a_part_of_what_is_around_it(tmp_path: Path) -> None:
    source = "x = f(a.b, [c for c in d if c > 0])\nif x:\n    y = g(x)\n"
    found = list(spots(source, tmp_path / "some.py"))
    assert found
    for spot in found:
        nodes = nodes_at(spot)
        assert nodes
        texts = [text for node in nodes if (text := source_of(source, node))]
        assert all(inner in outer for inner, outer in itertools.pairwise(texts))


def source_of(source: str, node: Any) -> str:
    if not hasattr(node, "lineno"):
        return ""
    lines = source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]
    return "".join(lines)


def test_statements_around_a_line(tmp_path: Path) -> None:
    source = "def f(x):\n    with a:\n        try:\n            g(x)\n        except E: pass\n"
    found = [spot for spot in spots(source, tmp_path / "more.py") if spot.site.endswith(":4")]
    assert found
    for spot in (*found, Spot(found[0].site)):
        assert [type(node).__name__ for node in around(spot)] == ["Try", "With"]


# --- checks that can't wait ---


@contextlib.contextmanager
def timer() -> Iterator[None]:
    yield


def checked(x: Tensor) -> None:
    assert x.isfinite().all()


def checked_in_with(x: Tensor) -> None:
    with timer():
        assert x.isfinite().all()


def checked_in_no_grad(x: Tensor) -> None:
    with torch.no_grad():
        assert x.isfinite().all()


def checked_in_try(x: Tensor) -> None:
    try:
        assert x.isfinite().all()
    except AssertionError:
        sys.exit(1)


@pytest.mark.parametrize(
    ("check", "defers", "is_advised"),
    [
        (checked, None, True),
        (checked_in_no_grad, None, True),
        (checked_in_with, None, False),
        (checked_in_try, None, False),
        (checked_in_with, True, False),
        (checked_in_try, True, False),
    ],
)
def test_defer_checks_is_advised_where_it_helps(
    check: Callable[[Tensor], None], defers: bool | None, is_advised: bool
) -> None:
    with ab.batch(adaptive=False, defer_checks=defers) as scope:
        for _ in range(4):
            check(linear(torch.randn(4)).sum())
    [found] = scope.report().findings
    assert found.what.startswith("assert: 4 early flushes")
    assert ("defer_checks=True" in found.remedy) is is_advised
    assert is_advised or AFTER in found.remedy
    assert scope.report().defers_checks is bool(defers)


def test_checks_that_wait_are_no_finding() -> None:
    reason = "aten::is_nonzero: needs values"
    site = f"{__file__}:{checked.__code__.co_firstlineno + 1}"
    assert "defer_checks=True" in cause_of(reason, site).remedy
    assert "defer_checks=True" not in cause_of(reason, site, defers_checks=True).remedy


def test_only_one_thread_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Python 3.11, ast.parse in two threads can raise a SystemError (gh-106905)."""
    failing = ast.parse("raise ValueError").body
    callers: list[tuple[str, bool]] = []
    parse = ast.parse

    def noted(source: str, *args: Any, **kwargs: Any) -> ast.Module:
        caller = sys._getframe(1).f_globals["__name__"]
        callers.append((caller, _source._parsing._is_owned()))  # type: ignore[attr-defined]
        return parse(source, *args, **kwargs)

    _source.tree_of.cache_clear()
    monkeypatch.setattr(ast, "parse", noted)
    assert nodes_at(Spot(f"{linecache.__file__}:1"))
    assert compile_function("def program(): return 1", {}, "<cell>", 1)() == 1
    error = Check(sys._getframe().f_code, True, failing, []).failure({}, {}, "")
    assert isinstance(error, ValueError)
    assert callers == [("torch_autobatch._source", True)] * 3
