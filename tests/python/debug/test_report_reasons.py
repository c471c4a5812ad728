"""Reports name the program's expression that caused a flush, and its line."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import logging
import math
import pdb
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch_autobatch._report_advice import Finding

linear = nn.Linear(4, 3)
log = logging.getLogger("test")
with torch.inference_mode():
    OF_INFERENCE = torch.ones(())
HOOKED = nn.Linear(4, 3)
HOOKED.register_full_backward_hook(lambda *_: None)


class Double(torch.autograd.Function):
    """A Function that writes to its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

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
    Double.apply(loss * 1)


def with_requires_grad(loss: Tensor) -> None:
    loss.detach().requires_grad_() * 2  # shares memory with a tensor that is held


def with_hook(loss: Tensor) -> None:
    scaled = loss * 2
    scaled.mul_(2)
    scaled.register_hook(lambda grad: grad)


def with_backward(loss: Tensor) -> None:
    loss.backward()


def with_pickle(loss: Tensor) -> None:
    pickle.dumps(loss.detach())


def with_str(loss: Tensor) -> None:
    str(loss)


def with_repr(loss: Tensor) -> None:
    repr(loss)


def with_percent(loss: Tensor) -> None:
    text = "%s" % loss  # noqa: UP031
    assert text


def with_format(loss: Tensor) -> None:
    "{}".format(loss)  # noqa: UP032


def with_math(loss: Tensor) -> None:
    math.isnan(loss)


def with_complex(loss: Tensor) -> None:
    complex(loss)


def with_not(loss: Tensor) -> None:
    is_zero = not loss
    assert is_zero is False


def with_max(loss: Tensor) -> None:
    max(loss, 2 * loss)


def with_sorted(loss: Tensor) -> None:
    sorted([loss, 2 * loss])


def with_in(loss: Tensor) -> None:
    is_there = loss in [2 * loss]
    assert is_there is False


def with_any(loss: Tensor) -> None:
    any([loss > 1e9])


def with_index(loss: Tensor) -> None:
    [1, 2][(0 * loss).long()]


def with_range(loss: Tensor) -> None:
    range((0 * loss).long())


def with_deepcopy(loss: Tensor) -> None:
    copy.deepcopy(loss.detach())


def with_jvp(loss: Tensor) -> None:
    torch.func.jvp(torch.exp, (loss,), (torch.ones(()),))


def with_inference_tensor(loss: Tensor) -> None:
    loss.detach() * OF_INFERENCE


def with_checkpoint(loss: Tensor) -> None:
    torch.utils.checkpoint.checkpoint(torch.exp, loss, use_reentrant=False)


def with_module_hook(loss: Tensor) -> None:
    HOOKED(loss.expand(4))


def with_check(loss: Tensor) -> None:
    if loss.isnan().any():
        raise ValueError("diverged")


def with_mask(loss: Tensor) -> None:
    loss.expand(3)[loss.expand(3) > 0]


def with_transpose_in_place(loss: Tensor) -> None:
    loss.expand(2, 3).clone().t_()


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
    (
        with_function,
        "the custom autograd.Function Double that writes to its arguments",
        "new tensor",
    ),
    (with_requires_grad, "requires_grad_()", "before the block"),
    (with_hook, "a hook", "after the block"),
    (with_backward, "backward()", "scope.backward(loss)"),
    (with_pickle, "torch.save or pickle", "after the block"),
    (with_str, "str()", "after the block"),
    (with_repr, "str()", "after the block"),
    (with_percent, "a % format", "after the block"),
    (with_format, "format()", "after the block"),
    (with_math, "math.isnan()", "use torch.isnan() instead"),
    (with_complex, "complex()", "ab.map"),
    (with_not, "not", "ab.map"),
    (with_max, "max() of tensors", "torch.stack(x).max()"),
    (with_sorted, "sorted() of tensors", "torch.stack(x).sort()"),
    (with_in, "in", "ab.map"),
    (with_any, "any() of tensors", "torch.stack(x).any()"),
    (with_index, "an index x[i]", "ab.map"),
    (with_range, "range()", "ab.map"),
    (with_deepcopy, "copy.deepcopy()", "clone()"),
    (with_jvp, "a transform (vmap, grad, jvp)", "outside the block"),
    (with_inference_tensor, "an inference tensor", "inference_mode()"),
    (with_checkpoint, "checkpointing", "max_pending="),
    (with_module_hook, "a module's full backward hook", "outside the block"),
    (with_check, "if ...: raise", "defer_checks=True"),
    (with_mask, "x[mask]", "torch.where"),
    (with_transpose_in_place, "an in-place write (aten::t_)", "return results instead"),
]


def findings_of(read: Callable[[Tensor], None], steps: int = 6) -> list[Finding]:
    """Returns the findings of a loop that runs this code in each step."""
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
    [worst] = findings_of(read)
    assert re.match(rf"{re.escape(what)}: \d+ early flushes", worst.what), worst.what
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


def test_code_of_fx_is_reported_where_it_is_called() -> None:
    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.expand(3).tanh().nonzero()

    traced = torch.fx.symbolic_trace(Positive())

    def read(loss: Tensor) -> None:
        traced(loss)

    [found] = findings_of(read)
    assert found.what.startswith("traced(), a read of a value (nonzero): 6 early flushes")
    assert found.source == "traced(loss)"


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


def test_eager_code_is_no_fault() -> None:
    def read(loss: Tensor) -> None:
        with ab.eager():
            loss.item()

    assert findings_of(read) == []


def test_one_line_where_a_print_runs_ops_as_well() -> None:
    """Formatting a tensor of several elements runs ops."""

    def read(loss: Tensor) -> None:
        print(loss.expand(3), file=io.StringIO())

    [found] = findings_of(read)
    assert found.what.startswith("print: 6 early flushes")


# --- modes that must observe each op when it runs ---


class Watching(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("mode", "what", "remedy"),
    [
        (lambda: torch.autograd.detect_anomaly(check_nan=False), "anomaly mode", "turn it off"),
        (Watching, "a TorchDispatchMode", "batch(enabled=False)"),
        (lambda: FlopCounterMode(display=False), "a TorchDispatchMode", "batch(enabled=False)"),
    ],
    ids=["anomaly", "mode", "flops"],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_that_leave_nothing_to_batch(mode: Any, what: str, remedy: str) -> None:
    with mode(), ab.batch(adaptive=False) as scope:
        losses = [linear(torch.ones(4)).sum() for _ in range(6)]
    assert not any(map(ab.is_pending, losses))
    report = scope.report()
    [found] = report.findings
    assert re.fullmatch(rf"{what}: \d+ ops ran eagerly", found.what)
    assert remedy in found.remedy
    assert found.source.startswith("losses = [linear(")
    assert re.match(r"No op was captured: \d+ ops ran eagerly\.\n\nWorst line: ", str(report))


# --- findings in packages ---

PACKAGE = """\
import torch

def read(loss):
    return loss.item()

def backward(loss):
    loss.backward()

def transpose(x):
    return x.clone().t_()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "helpful.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("helpful")
    sys.modules.pop("helpful")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("read", "a read of a value in helpful"),
        ("backward", "backward()"),
        ("transpose", "an in-place write (aten::t_)"),
    ],
)
def test_findings_in_packages_are_at_the_users_line(package: Any, name: str, what: str) -> None:
    def step(loss: Tensor) -> None:
        getattr(package, name)(loss.expand(2, 3) if name == "transpose" else loss)

    [found] = findings_of(step)
    assert found.what.startswith(f"{what}: 6 early flushes")
    assert found.source.startswith("getattr(package, name)(")


def test_the_debugger() -> None:
    out = io.StringIO()

    def read(loss: Tensor) -> None:
        pdb.Pdb(stdin=io.StringIO("p loss\ncontinue\n"), stdout=out, nosigint=True).set_trace()
        assert loss.dim() == 0

    try:
        [found] = findings_of(read)
    finally:
        sys.settrace(None)
    assert "tensor(" in out.getvalue()
    assert found.what.startswith("the debugger: 6 early flushes")
    assert "batch(enabled=False)" in found.remedy


# --- training loops of other packages that read losses ---


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
