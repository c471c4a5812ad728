"""Reports say what asked for a flush in the words of the program, and where."""

from __future__ import annotations

import inspect
import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch_autobatch._report_advice import Finding

linear = nn.Linear(4, 3)
log = logging.getLogger("test")


class Double(torch.autograd.Function):
    """Without a vmap rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def with_print(loss: Tensor) -> None:
    print(loss)


def with_print_of_item(loss: Tensor) -> None:
    print("loss", loss.item())


def with_numpy(loss: Tensor) -> None:
    assert isinstance(loss.detach().numpy(), np.ndarray)


def with_asarray(loss: Tensor) -> None:
    np.asarray(loss.detach())


def with_float(loss: Tensor) -> None:
    float(loss)


def with_int(loss: Tensor) -> None:
    int(loss)


def with_item(loss: Tensor) -> None:
    value = loss.item()
    assert value < 1e9


def with_tolist(loss: Tensor) -> None:
    loss.detach().tolist()


def with_if(loss: Tensor) -> None:
    if loss > 1e9:
        log.error("too large")


def with_while(loss: Tensor) -> None:
    while loss > 1e9:
        loss = loss / 2


def with_item_in_if(loss: Tensor) -> None:
    if loss.item() > 1e9:
        log.error("too large")


def with_assert(loss: Tensor) -> None:
    assert loss < 1e9


def with_f_string(loss: Tensor) -> None:
    text = f"{loss:.3f}"
    assert text


def with_logger(loss: Tensor) -> None:
    log.warning("loss %.3f", loss.item())


def with_function(loss: Tensor) -> None:
    Double.apply(loss)


def with_requires_grad(loss: Tensor) -> None:
    loss.detach().tanh().requires_grad_() * 2


def with_hook(loss: Tensor) -> None:
    loss.register_hook(lambda grad: grad)


def with_backward(loss: Tensor) -> None:
    loss.backward()


def with_pickle(loss: Tensor) -> None:
    pickle.dumps(loss.detach())


CASES: list[tuple[Callable[[Tensor], None], str, str]] = [
    (with_print, "print", "after the block"),
    (with_print_of_item, "print", "after the block"),
    (with_numpy, "numpy()", "after the block"),
    (with_asarray, "numpy()", "after the block"),
    (with_float, "float()", "ab.map"),
    (with_int, "int()", "ab.map"),
    (with_item, ".item()", "ab.map"),
    (with_tolist, ".tolist()", "after the block"),
    (with_if, "if", "ab.map"),
    (with_while, "while", "ab.map"),
    (with_item_in_if, ".item()", "ab.map"),
    (with_assert, "assert", "defer_checks=True"),
    (with_f_string, "an f-string", "after the block"),
    (with_logger, "a logger", "after the block"),
    (with_function, "the custom autograd.Function Double", "generate_vmap_rule"),
    (with_requires_grad, "requires_grad_()", "before the block"),
    (with_hook, "a hook", "after the block"),
    (with_backward, "backward()", "scope.backward(loss)"),
    (with_pickle, "torch.save or pickle", "after the block"),
]


def findings_of(read: Callable[[Tensor], None], steps: int = 6) -> list[Finding]:
    """Of a loop that does that in each step."""
    with ab.batch(adaptive=False) as scope:
        for _ in range(steps):
            read(linear(torch.randn(4)).tanh().sum())
    return scope.report().findings


@pytest.mark.parametrize(
    ("read", "what", "remedy"), CASES, ids=lambda c: getattr(c, "__name__", "")
)
def test_it_says_what_it_was_where_and_how_often(
    read: Callable[[Tensor], None], what: str, remedy: str
) -> None:
    worst = findings_of(read)[0]
    assert worst.what.startswith(f"{what}: 6 early flushes")
    assert remedy in worst.remedy
    lines, first = inspect.getsourcelines(read)
    path, _, number = worst.site.rpartition(":")
    assert path == __file__
    assert first < int(number) < first + len(lines)
    assert worst.source in (line.strip() for line in lines)


def test_one_finding_a_reason_and_place() -> None:
    def read(loss: Tensor) -> None:
        float(loss)
        loss.exp().item()

    found = [f for f in findings_of(read) if "early flush" in f.what]
    assert sorted(f.what.split(":")[0] for f in found) == [".item()", "float()"]


def test_a_call_over_several_lines() -> None:
    def read(loss: Tensor) -> None:
        log.warning(
            "loss %.3f",
            loss.item(),
        )

    assert findings_of(read)[0].what.startswith("a logger: 6 early flushes")


def test_code_without_source() -> None:
    space: dict[str, Any] = {}
    exec(compile("def read(loss): loss.item()", "<nowhere>", "exec"), space)
    worst = findings_of(space["read"])[0]
    assert worst.what.startswith("a read of a value (item): 6 early flushes")
    assert worst.source == ""


def test_reads_in_a_map_are_no_early_flushes() -> None:
    def run(i: int) -> float:
        h = linear(torch.full((4,), float(i)))
        for _ in range(4):
            if h.sum() > 1e9:
                break
            h = h.tanh()
        return float(h.sum())

    ab.map(run, range(8))
    assert not any("flush" in finding.what for finding in ab.last_report().findings)


# --- other people's loops read losses ---


@contextmanager
def block() -> Iterator[ab.batch]:
    with ab.batch(adaptive=False) as scope:
        yield scope


def test_a_progress_bar() -> None:
    tqdm = pytest.importorskip("tqdm")
    with block() as scope, tqdm.tqdm(range(6), disable=False, file=open("/dev/null", "w")) as bar:
        for _ in bar:
            loss = linear(torch.randn(4)).tanh().sum()
            bar.set_postfix(loss=loss)
    worst = scope.report().findings[0]
    assert worst.what.startswith("a progress bar: 6 early flushes")
    assert worst.source == "bar.set_postfix(loss=loss)"
    assert "after the block" in worst.remedy


def test_a_logger_that_formats(caplog: pytest.LogCaptureFixture) -> None:
    with block() as scope, caplog.at_level(logging.INFO, "test"):
        for _ in range(6):
            log.info("loss %s", linear(torch.randn(4)).tanh().sum())
    worst = scope.report().findings[0]
    assert worst.what.startswith("a logger: 6 early flushes")
    assert worst.source.startswith("log.info(")
