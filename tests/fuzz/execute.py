"""Runs one program eagerly and batched, and compares the results."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import copy
import ctypes
import functools
import gc
import itertools
import math
import pickle
import re
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils.checkpoint
import torch_autobatch as ab
from torch import Tensor, nn
from torch.nn import functional as F
from torch_autobatch import _C

from tests.fuzz import celling, mapping
from tests.fuzz.program import PRELUDE, VARIABLE, Program

# Set before the worker is forked.
MAPPED = False  # instances are fibers of ab.map
CELLS = False  # plain assignments are cells

GROWTH_EVERY = 10  # every n-th program runs repeatedly, to detect growth of memory
WARM = 3
SLACK = 512  # bytes: Python's own bookkeeping
ROUNDS = 3  # perturbed eager runs, to detect programs that amplify rounding errors


@dataclass
class Difference:
    """A difference from the eager run. The kind distinguishes different bugs."""

    kind: str
    text: str


class Run:
    """The variables at the end of a program, and the error that ended the program."""

    def __init__(
        self, program: Program, *, batched: bool, perturb: float = 0.0, backwards: bool = False
    ) -> None:
        self.env = new_environment(batched=batched, perturb=perturb)
        self.error: Exception | None = None
        if MAPPED:
            log = self.env["log"] = mapping.Log()
            self.env["run_map"] = mapping.runner(log, batched=batched, backwards=backwards)
        self.env["call"] = celling.caller(self.env, batched=batched)
        code = compile(source(program), "<program>", "exec")
        torch.manual_seed(0)
        try:
            exec(code, self.env)
        except Exception as error:
            self.error = error.with_traceback(None)
            error.__context__ = error.__cause__ = None
        finally:
            torch.set_grad_enabled(True)
        if MAPPED:
            log.settle()

    def variables(self) -> dict[str, Any]:
        """Returns the program's variables."""
        return {name: v for name, v in self.env.items() if VARIABLE.fullmatch(name)}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensor variables, and the parameters and buffers of the module variables."""
        found: dict[str, Tensor] = {}
        for name, value in self.variables().items():
            if isinstance(value, Tensor):
                found[name] = value
            elif isinstance(value, nn.Module):
                found |= {f"{name}.{key}": p for key, p in value.named_parameters()}
                found |= {f"{name}.{key}": b for key, b in value.named_buffers()}
        return found


def source(program: Program) -> str:
    """Returns the source that runs, with maps and cells where they are switched on."""
    program = celling.with_cells(program) if CELLS else program
    return mapping.source(program) if MAPPED else program.source()


def new_environment(*, batched: bool, perturb: float = 0.0) -> dict[str, Any]:
    """Returns the global variables for a program."""
    torch.set_default_dtype(torch.float64)
    env: dict[str, Any] = {
        "collections": collections,
        "concurrent": concurrent,
        "contextlib": contextlib,
        "copy": copy,
        "math": math,
        "pickle": pickle,
        "torch": torch,
        "nn": nn,
        "F": F,
        "log": [],
        "hooks": collections.defaultdict(list),
        "batch": functools.partial(ab.batch, enabled=batched),
    }
    for code in _PRELUDE:
        exec(code, env)
    if perturb:
        exact = env["data"]
        env["data"] = lambda *a, **k: exact(*a, **k) * (1 + perturb)
    return env


_PRELUDE = [compile(text, "<prelude>", "exec") for text in PRELUDE.values()]


def check(program: Program, eager_is_done: Callable[[], None] = lambda: None) -> Difference | None:
    """Runs the program eagerly and batched. Returns None if the results agree."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = Run(program, batched=False)
        eager_is_done()
        ours = Run(program, batched=True)
        difference = _compare(program, eager, ours)
        if difference is not None and MAPPED and _order_matters(program, eager):
            return None
        if difference is None:
            difference = _left_behind(eager, ours) or _growth(program)
        elif difference.kind in ("value", "grad", "log", "hook") and _is_chaotic(program, eager):
            return None
        return difference


def tolerance(program: Program) -> float:
    """Returns the tolerance relative to the largest magnitude, for the program's coarsest dtype."""
    source = program.source()
    if "bfloat16" in source:
        return 0.1
    return 1e-4 if "float32" in source else 1e-9


def _is_chaotic(program: Program, eager: Run) -> bool:
    """Whether rounding differences alone change the eager results."""
    step = tolerance(program) * 1e-3
    for k in range(ROUNDS):
        other = Run(program, batched=False, perturb=step * (1 - 2 * (k % 2)) * (1 + k / 3))
        if _compare(program, eager, other) is not None:
            return True
    return False


def _order_matters(program: Program, eager: Run) -> bool:
    """Whether the eager results change if the instances of each region run in reverse order."""
    reverse = Run(program, batched=False, backwards=True)
    return _compare(program, eager, reverse) is not None


def _compare(program: Program, eager: Run, ours: Run) -> Difference | None:
    limit = tolerance(program)
    if eager.error is not None or ours.error is not None:
        return _compare_errors(eager.error, ours.error)
    expected, found = eager.tensors(), ours.tensors()
    if list(eager.variables()) != list(ours.variables()):
        return Difference("variables", f"{set(eager.variables()) ^ set(ours.variables())}")
    if list(expected) != list(found):
        return Difference("variables", f"of the two: {set(expected) ^ set(found)}")
    for name, want in expected.items():
        if (why := _metadata(found[name], want)) is not None:
            return Difference(why[0], f"{name}: {why[1]}")
        if (text := _unequal(found[name], want, limit)) is not None:
            return Difference("value", f"{name}: {text}")
    for name, want in expected.items():
        gradients = [getattr(t, "grad", None) for t in (found[name], want)]
        if (text := _unequal(*gradients, limit)) is not None:
            return Difference("grad", f"{name}.grad: {text}")
    if (text := _unequal(ours.env["log"], eager.env["log"], limit)) is not None:
        return Difference("log", f"log: {text}")
    if (text := _unequal(dict(ours.env["hooks"]), dict(eager.env["hooks"]), limit)) is not None:
        return Difference("hook", f"hooks: {text}")
    return _compare_aliases(expected, found)


def _compare_errors(eager: Exception | None, ours: Exception | None) -> Difference | None:
    if eager is None:
        return Difference(f"error: {_first_line(ours)[:40]}", f"raises {_first_line(ours)}")
    if ours is None:
        return Difference(f"no error: {_first_line(eager)[:40]}", f"eager: {_first_line(eager)}")
    if type(eager) is not type(ours):
        text = f"{_first_line(ours)} where eager raises {_first_line(eager)}"
        return Difference(f"error type {type(ours).__name__} {type(eager).__name__}", text)
    return None


def _first_line(error: Exception | None) -> str:
    lines = str(error).splitlines() or [""]
    # An error about a view names its autograd node, which has another name in a block.
    line = re.sub(r"Output \d+ of \S+", "Output of a node", lines[0])
    return f"{type(error).__name__}: {line[:300]}"


FACTS: dict[str, Callable[[Tensor], Any]] = {
    "dtype": lambda t: t.dtype,
    "shape": lambda t: t.shape,
    "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: t.is_leaf,
    "history": lambda t: t.grad_fn is not None,
    "retains_grad": lambda t: t.retains_grad,
    "layout": lambda t: t.layout,
    "conj": lambda t: t.is_conj(),
    "neg": lambda t: t.is_neg(),
    "inference": lambda t: t.is_inference(),
}


def _fact(tensor: Tensor, fact: str) -> Any:
    """Returns a fact, or the error of its getter, e.g. for a view that is no longer valid."""
    try:
        return FACTS[fact](tensor)
    except RuntimeError as error:
        return _first_line(error)


def _strides(tensor: Tensor) -> list[int]:
    """Returns the strides of the dimensions with more than one element."""
    return [tensor.stride(d) for d in range(tensor.dim()) if tensor.shape[d] > 1]


def _metadata(found: Tensor, want: Tensor) -> tuple[str, str] | None:
    """Returns the first difference in metadata as (kind, description)."""
    for fact in FACTS:
        a, b = _fact(found, fact), _fact(want, fact)
        if a != b:
            return fact, f"{fact} {a} where eager has {b}"
    if want.numel() > 0 and _strides(found) != _strides(want):
        return "stride", f"strides {found.stride()} where eager has {want.stride()}"
    return None


def _unequal(found: Any, want: Any, limit: float) -> str | None:
    """Describes how two results of a read, or two tensors, differ. None if they are equal."""
    if type(found) is not type(want):
        return f"{found} where eager has {want}"
    if isinstance(want, Tensor):
        return _unequal_tensors(found, want, limit)
    if isinstance(want, list | tuple):
        if len(found) != len(want):
            return f"{len(found)} entries where eager has {len(want)}"
        pairs = enumerate(zip(found, want, strict=True))
    elif isinstance(want, dict):
        if sorted(found) != sorted(want):
            return f"{sorted(found)} where eager has {sorted(want)}"
        pairs = ((key, (found[key], want[key])) for key in want)
    elif isinstance(want, float):
        close = math.isclose(found, want, rel_tol=limit, abs_tol=limit)
        same = close or found == want or (found != found and want != want)
        return None if same else f"{found} where eager has {want}"
    elif hasattr(want, "dtype") and hasattr(want, "ndim"):
        return _unequal_tensors(torch.as_tensor(found), torch.as_tensor(want), limit)
    else:
        return None if found == want else f"{found} where eager has {want}"
    for key, (a, b) in pairs:
        if (text := _unequal(a, b, limit)) is not None:
            return f"[{key!r}] {text}"
    return None


def _unequal_tensors(found: Tensor, want: Tensor, limit: float) -> str | None:
    if found.shape != want.shape or found.dtype != want.dtype:
        return f"{found.dtype}{list(found.shape)} where eager has {want.dtype}{list(want.shape)}"
    found, want = found.detach(), want.detach()
    if not (want.is_floating_point() or want.is_complex()):
        return None if torch.equal(found, want) else f"{found} where eager has {want}"
    if want.numel() == 0:
        return None
    scale = max(1.0, want.where(want.isfinite(), 0).abs().max().item())
    if torch.allclose(found, want, rtol=0, atol=limit * scale, equal_nan=True):
        return None
    return f"{found} where eager has {want}"


def _compare_aliases(expected: dict[str, Tensor], found: dict[str, Tensor]) -> Difference | None:
    """Compares which variables share memory."""
    if _sharing(expected) == _sharing(found):
        return None
    names = list(expected)
    for k, a in enumerate(names):
        for b in names[:k]:
            share = [_memory(t[a]) == _memory(t[b]) for t in (expected, found)]
            if expected[a].numel() and expected[b].numel() and share[0] != share[1]:
                text = f"{b} and {a} share memory in {'eager' if share[0] else 'ours'} only"
                return Difference("alias", text)
    return None


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _sharing(tensors: dict[str, Tensor]) -> list[int]:
    first: dict[int, int] = {}
    ids = [_memory(t) for t in tensors.values() if t.numel() > 0]
    return [first.setdefault(key, k) for k, key in enumerate(ids)]


def _left_behind(eager: Run, ours: Run) -> Difference | None:
    """Finds a scope that is still open, or live tensors that eager frees."""
    if torch._C._dispatch_tls_is_dispatch_key_included(_C.capture_key):
        return Difference("open", "the scope is still open")
    if eager.error is not None:  # PyTorch's engine may keep references
        return None
    ours_left, eager_left = _survivors(ours), _survivors(eager)
    if eager_left:  # PyTorch makes reference cycles (x.div_(x)), which hold values of their flush
        return None
    left = sorted(ours_left)
    return Difference("leak", f"still alive after the program: {left}") if left else None


def _survivors(run: Run) -> set[str]:
    """Returns the variables that are still alive after the program's environment is cleared."""
    alive = {name: weakref.ref(tensor) for name, tensor in run.tensors().items()}
    run.env.clear()
    run.error = None
    if any(ref() is not None for ref in alive.values()):
        gc.collect()
    return {name for name, ref in alive.items() if ref() is not None}


def _growth(program: Program) -> Difference | None:
    """Detects memory that each run of the program allocates and does not release.

    Checks only every ``GROWTH_EVERY``-th seed, because the check needs several runs. (Memory that
    the first runs cache is not a leak.)
    """
    if program.seed % GROWTH_EVERY != 0:
        return None
    gc.collect()
    gc.freeze()  # excludes modules imported meanwhile from later collections
    steps: dict[bool, list[int]] = {}
    for runs in (4, 20):  # a cache may grow for some runs, a leak grows in all
        steps = {on: _steps(program, runs, batched=on) for on in (True, False)}
        if min(steps[True]) <= max(steps[False]) + SLACK or min(steps[False]) > 0:
            return None  # eager leaks too (x.div_(x))
    return Difference("memory", f"each run keeps memory: {steps[True]} bytes")


def _steps(program: Program, runs: int, *, batched: bool) -> list[int]:
    """Returns the growth of the memory in use with each run, after warm-up runs."""
    used = []
    for _ in range(WARM + runs):
        run = Run(program, batched=batched)
        run.env.clear()
        del run
        gc.collect()
        used.append(_memory_in_use())
    return [after - before for before, after in itertools.pairwise(used[WARM:])]


class _MallInfo(ctypes.Structure):
    _fields_: ClassVar = [
        *[(f"other{k}", ctypes.c_size_t) for k in range(4)],
        ("hblkhd", ctypes.c_size_t),  # mapped
        *[(f"other{k}", ctypes.c_size_t) for k in range(4, 6)],
        ("uordblks", ctypes.c_size_t),  # in use
        *[(f"other{k}", ctypes.c_size_t) for k in range(6, 8)],
    ]


def _memory_in_use() -> int:
    """Returns the bytes allocated from the C library; 0 if it has no mallinfo2."""
    if _mallinfo is None:
        return 0
    info = _mallinfo()
    return int(info.uordblks + info.hblkhd)


_mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 or newer
if _mallinfo is not None:
    _mallinfo.restype = _MallInfo


def _gradients(source: str) -> set[str]:
    """Returns the names of the variables assigned from autograd.grad."""
    lines = re.findall(r"^\s*(.*?) = torch\.autograd\.grad\(", source, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"\w+", line)}


def _writes_gradient(source: str) -> bool:
    """Whether the program writes to a result of autograd.grad."""
    return any(
        re.search(rf"\b{name}(\[.*\] *\S?=|(\.\w+\(.*\))*\.\w+[a-z]_\()", source)
        for name in _gradients(source)
    )


def _shows_strides(difference: Difference, source: str) -> bool:
    """Whether the difference is the contiguity of a gradient, or memory that two gradients
    share."""
    shared = re.match(r"(\w+) and (\w+) share memory in eager only", difference.text)
    if difference.kind == "alias" and shared is not None:
        return set(shared.groups()) <= _gradients(source)
    if difference.kind != "log" or not difference.text.endswith("True where eager has False"):
        return False
    asked = re.findall(r"log\.append\((\w+)\.is_contiguous\(\)\)", source)
    return bool(asked) and set(asked) <= _gradients(source)


def known_gap(program: Program, difference: Difference) -> str | None:
    """Returns the known gap that explains a difference, or None."""
    text, source, kind = difference.text, program.source(), difference.kind
    if "modified by an inplace operation" in text:
        return "saved_write"
    if "where eager has" in text and "INTERNAL ASSERT FAILED" in text.split("where eager has")[1]:
        return "eager_assert"
    if re.search(r"created in (no_grad|inference) mode", text):
        return "no_grad_views"
    if "backward through the graph a second time" in text and kind.startswith("error"):
        return "second_backward"
    # Results of autograd.grad, and parameters after SGD, are values that depend on gradients.
    of_gradients = kind == "value" and re.search(r"autograd\.grad\(|SGD", source)
    if (kind == "grad" or of_gradients) and re.search(r"\.data\b|copy\.copy", source):
        return "hidden_write"
    if "autograd.grad(" in source or "inputs=" in source:
        if kind == "hook":
            return "hooks_off_path"
        if kind == "grad" and "retain_grad()" in source:
            return "retain_off_path"
        if kind == "stride" or re.search(r"single memory location|view size is not comp", text):
            return "grad_strides"
        if "is a view and is being modified inplace" in text or _shows_strides(difference, source):
            return "grad_strides"
        if kind == "value" and _writes_gradient(source):
            return "grad_strides"  # elements share memory in eager
    if kind.startswith("no error") and "the broadcast shape" in text and "clamp(" in source:
        return "clamp_bounds"
    if "returned an invalid gradient" in text and "no_grad()" in source:
        return "no_grad_reshape"
    return None
