"""Runs one entry of PyTorch's operator database inside a block, and compares it with eager.

Compares values, dtypes, shapes, strides, requires_grad, and gradients of the inputs. For random ops
the distribution is compared instead of the values, and equal seeds must give equal numbers. The
result is the class of the op (`CLASSES`), derived from the report of the block.
"""

from __future__ import annotations

import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch_autobatch as ab
from op_compare import (
    Different,
    aliases,
    same,
    same_distribution,
    same_gradients,
    tensors,
)
from torch import Tensor
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_leaves, tree_map
from torch_autobatch import _C

op_db = common_methods_invocations.op_db
Function = Callable[..., Any]

INSTANCES = 4
GENERATED = 40  # generated samples of an op; the checked samples are spread evenly over them
DRAWS = 6  # seeds drawn for the distribution of a random op

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.bfloat16,
        torch.int64,
        torch.bool,
    )
}
# From best to worst. The class of an op is the class of its worst node over all samples.
CLASSES = {
    "view": "no call: an address computation, or the argument itself",
    "native": "one call per batch, by a native rule",
    "functorch": "one call per batch, by functorch's batching rule",
    "loop": "captured, with one call per instance",
    "factory": "reads no values of pending tensors: runs as usual, without a flush",
    "eager": "its arguments are computed, then it runs eagerly",
    "flush": "reads values without dispatching an op",
}
BATCHED = {"view", "native", "functorch"}

_NOISE = "the gradient of one normalised number is rounding noise: ten times the tolerance"
# Ops that are not checked on tensors without dimensions.
NOT_SCALAR = {
    "_chunk_cat": "PyTorch 2.13 itself crashes on numbers without dimensions",
    "logcumsumexp": "without dimensions, eager's gradient is a quotient of two rounding errors",
    "resize_": "without dimensions, the new elements are uninitialized memory",
}
# Ops that are not checked on tensors with many equal elements.
_SINGULAR = "the gradient for a singular matrix is not unique, and its condition is rounding noise"
_RANK = "the rank of a singular matrix, and thus the result, depends on its memory address"
_BOUND = "a singular value that equals the bound is above or below it by rounding noise"
NOT_EQUAL = (
    dict.fromkeys(("norm.nuc", "linalg.cond", "linalg.svdvals"), _SINGULAR)
    | dict.fromkeys(("linalg.lstsq", "linalg.lstsq.grad_oriented"), _RANK)
    | {"linalg.matrix_rank": _BOUND}
)
SKIPPED = {"scalar": NOT_SCALAR, "equal": NOT_EQUAL}
EXCEPTIONS = (
    NOT_SCALAR
    | NOT_EQUAL
    | {  # ops that are not checked in full, and why
        "native_layer_norm": _NOISE,
        "nn.functional.layer_norm": _NOISE,
        "nn.functional.normalize": _NOISE,
    }
)
# How arguments are prepared:
# - plain: results of ops;
# - gaps: every other element of results of ops;
# - shared: the input is a result of an op, and all instances share the other arguments, which are
#   not pending, like the weights of a model;
# - equal: few different values, so that many elements are equal or zero;
# - scalar: one element of each argument, without dimensions.
LAYOUTS = ("plain", "gaps", "shared", "equal", "scalar")
# Ops that return uninitialized memory. Only their metadata can be compared.
UNDEFINED = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


@dataclass
class Outcome:
    """The result of the checks of one op, or of its in-place variant, at one dtype."""

    name: str
    dtype: str
    in_place: bool = False  # the in-place variant, run on a clone
    kind: str = ""  # one of CLASSES; empty: no sample has a tensor, or eager rejects all samples
    samples: int = 0
    random: bool = False
    problems: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # why the class is not a better one

    def worsen(self, kind: str, reasons: set[str]) -> None:
        order = list(CLASSES)
        if kind and (not self.kind or order.index(kind) > order.index(self.kind)):
            self.kind = kind
        self.reasons = sorted(reasons.union(self.reasons))


@dataclass(frozen=True)
class Subject:
    """The function to check, and how its arguments are prepared."""

    name: str
    function: Function
    dtype: torch.dtype
    layout: str = "plain"  # one of LAYOUTS

    @property
    def is_defined(self) -> bool:
        return self.name not in UNDEFINED


@dataclass
class Run:
    """The instances of one or several samples, run in one block."""

    results: list[Any]
    inputs: list[Any]  # the arguments of the op, after the block
    leaves: list[list[Tensor]]
    scope: ab.batch
    deferred: bool = True  # the op's results were pending

    def part(self, first: int, count: int) -> Run:
        of = slice(first, first + count)
        return Run(self.results[of], self.inputs[of], self.leaves[of], self.scope, self.deferred)


# --- samples --------------------------------------------------------------------------------------


def op_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def samples_of(op: Any, dtype: torch.dtype, count: int) -> list[list[Any]]:
    """Returns up to `count` samples, each as a list of instances with different values.

    Returns an empty list if the entry of the database fails to make samples.
    """
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    by_seed = []
    for seed in range(INSTANCES):
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            generator = op.sample_inputs("cpu", dtype, requires_grad=grad)
            by_seed.append(list(itertools.islice(generator, GENERATED)))
        except Exception:  # some entries need packages that are not installed
            return []
    size = min(map(len, by_seed))
    picked = sorted({i * size // count for i in range(count)}) if size else []
    return [[samples[i] for samples in by_seed] for i in picked]


def leaf(value: Any, layout: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    plain = value.detach().resolve_conj().resolve_neg()
    numbers = is_plain(plain) and (plain.is_floating_point() or plain.is_complex())
    if layout == "equal" and numbers:
        plain = plain.sgn() if plain.is_complex() else plain.round().clamp(-1, 1)
    elif layout == "scalar" and is_plain(plain) and plain.numel() > 0:
        plain = plain.flatten()[0].clone()
    return plain.requires_grad_(value.requires_grad)


def arguments(sample: Any) -> Any:
    return sample.input, sample.args, sample.kwargs


# --- running --------------------------------------------------------------------------------------


def call(function: Function, input: Any, args: Any, kwargs: Any) -> Any:
    return function(input, *args, **kwargs)  # SITE is this line


SITE = f"{__file__}:{call.__code__.co_firstlineno + 1}"


def is_ops_own(site: str) -> bool:
    """Whether a line belongs to the op, and not to the code that makes its inputs pending."""
    return site == SITE or not site.startswith(f"{__file__}:")


# The database seeds every call of some random ops. This script seeds each block once instead.
common_methods_invocations.wrapper_set_seed = lambda f, x, *args, **kwargs: call(f, x, args, kwargs)


def is_pending(tensor: Tensor) -> bool:
    return _C.capture_key in repr(torch._C._dispatch_keys(tensor))


def in_place(function: Function) -> Function:
    def on_a_copy(input: Any, *args: Any, **kwargs: Any) -> Any:
        copy = input.clone()
        return call(function, copy, args, kwargs), copy

    return on_a_copy


def run(subject: Subject, groups: list[list[Any]], seed: int, enabled: bool) -> Run:
    """Runs all samples of all groups in one block, with pending inputs."""
    out = Run([], [], [], ab.batch(enabled=enabled, adaptive=False))
    weight = torch.ones((), requires_grad=True)
    leaves = [each for group in groups for each in leaves_of(group, subject.layout)]
    out.leaves = [[x for x in tree_leaves(each) if wants_grad(x)] for each in leaves]
    torch.manual_seed(seed)
    with out.scope:

        def pend(value: Any) -> Any:
            if not isinstance(value, Tensor) or not is_plain(value):
                return value
            true = (weight * 1) > 0
            pended = torch.where(true, value, value)  # keeps values, dtype and strides
            if subject.layout == "gaps" and value.dim() > 0:
                pended = torch.stack([pended, pended], dim=-1).select(-1, 1)
            if enabled and not is_pending(pended):
                raise Different("an input is not pending")
            return pended

        for each in leaves:
            pended = 1 if subject.layout == "shared" else len(each)
            inputs = (*tree_map(pend, each[:pended]), *each[pended:])
            out.inputs.append(inputs)
            out.results.append(call(subject.function, *inputs))
            out.deferred &= all(is_pending(x) for x in tensors(out.results[-1]))
    return out


def fresh(value: Any) -> Any:
    """Returns a copy with separate memory, because some ops write to running statistics."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


def leaves_of(samples: list[Any], layout: str) -> list[Any]:
    """Returns the arguments of each sample.

    In the layout "shared", all samples have the arguments of the first one, except for the input.
    """
    own = [tree_map(lambda x: leaf(x, layout), arguments(sample)) for sample in samples]
    if layout != "shared":
        return own
    shared = tree_map(fresh, own[0][1:])
    return [(input, *shared) for input, *_ in own]


def wants_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.layout == torch.strided


def gradients(done: Run, samples: list[Any], members: list[int]) -> list[Tensor | None]:
    """Returns the gradients of the members' leaves, for fixed random gradients of the results."""
    outputs: list[Tensor] = []
    leaves: list[Tensor] = []
    for m in members:
        result = samples[m].output_process_fn_grad(done.results[m])
        outputs += [x for x in tree_leaves(result) if wants_grad(x)]
        leaves += done.leaves[m]
    if not outputs or not leaves:
        return []
    torch.manual_seed(members[0])
    roots = [torch.randn(x.shape, dtype=x.dtype) for x in outputs]
    return list(torch.autograd.grad(outputs, leaves, roots, allow_unused=True, retain_graph=True))


# --- random ops -----------------------------------------------------------------------------------


def draws(subject: Subject, samples: list[Any], enabled: bool) -> Tensor:
    """Returns all numbers in the results for several seeds, as one vector."""
    numbers = []
    for seed in range(DRAWS):
        for tensor in tensors(run(subject, [samples], seed, enabled).results):
            if tensor.layout == torch.strided:
                values = tensor.detach().resolve_conj()
                real = torch.view_as_real(values) if values.is_complex() else values
                numbers.append(real.flatten().double())
    return torch.cat(numbers) if numbers else torch.zeros(0)


def check_random(subject: Subject, samples: list[Any]) -> None:
    first, second = (run(subject, [samples], 1, True).results for _ in range(2))
    same(first, second, subject.dtype)
    same_distribution(draws(subject, samples, True), draws(subject, samples, False))


# --- one op ---------------------------------------------------------------------------------------


def classify(done: Run) -> tuple[str, set[str]]:
    """Returns the worst class of the nodes from the op's line, and the reasons for this class."""
    report = done.scope.report()
    kinds, reasons = set(), set()
    for row in report.signatures:
        if is_ops_own(row.site):
            kinds.add(row.rule)
            if row.rule == "loop":
                reasons.add(f"loop: {row.op}: {row.note}")
            elif row.largest == 1:
                kinds.add("loop")
                reasons.add(f"alone: {row.op}")
    for at_once in report.at_once:
        if is_ops_own(at_once.site):
            kinds.add("eager")
            reasons.add(f"eager: {at_once.op}: {at_once.reason}")
    flushes = {flush.reason for flush in report.flushes if is_ops_own(flush.site)}
    if "eager" not in kinds and flushes:
        kinds.add("flush")
        reasons |= {f"flush: {reason}" for reason in flushes}
    if not kinds:
        kinds.add("view" if done.deferred else "factory")
    return max(kinds, key=list(CLASSES).index), reasons


@dataclass
class Case:
    """A sample that eager runs: its instances, and their eager results."""

    samples: list[Any]
    expected: Run
    differentiable: bool
    random: bool


def eager_case(subject: Subject, samples: list[Any]) -> Case | None:
    """Runs a sample eagerly. Returns None if eager raises an error."""
    before = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        seeded = torch.get_rng_state()
        expected = run(subject, [samples], 0, False)
        is_random = not torch.equal(torch.get_rng_state(), seeded)
    except Exception:
        return None
    finally:
        torch.set_rng_state(before)
    try:
        differentiable = not is_random and bool(gradients(expected, samples, [0]))
    except Exception:
        differentiable = False
    return Case(samples, expected, differentiable, is_random)


def check_block(subject: Subject, cases: list[Case], outcome: Outcome) -> None:
    """Runs and compares all instances of the cases in one block. Adds the class to `outcome`."""
    done = run(subject, [case.samples for case in cases], 0, True)
    if subject.layout == "plain":
        outcome.worsen(*classify(done))
    first = 0
    for case in cases:
        compare(subject, done.part(first, len(case.samples)), case)
        first += len(case.samples)


def compare(subject: Subject, got: Run, case: Case) -> None:
    """Raises Different at the first difference from eager."""
    expected, dtype = case.expected, subject.dtype
    values = subject.is_defined and not case.random
    for m in range(len(case.samples)):
        same(got.results[m], expected.results[m], dtype, values)
        same(got.inputs[m], expected.inputs[m], dtype, values)  # some ops write to their inputs
        ours, theirs = (aliases(run.results[m], run.inputs[m]) for run in (got, expected))
        if ours != theirs:
            raise Different(f"results share memory with inputs: {ours}, eager's: {theirs}")
    if not values or not case.differentiable:
        return
    slack = 10.0 if subject.name in EXCEPTIONS else 1.0
    if subject.layout == "shared":  # sums over instances have larger rounding errors
        slack *= math.sqrt(len(case.samples))
    for members in (range(len(case.samples)), [len(case.samples) - 1]):  # all, then only one
        ours, theirs = (gradients(run, case.samples, list(members)) for run in (got, expected))
        same_gradients(ours, theirs, dtype, slack)


def check_cases(subject: Subject, cases: list[Case], outcome: Outcome, each: bool) -> None:
    """Checks all cases in one block, and then each case in a separate block.

    Without `each`, single cases run only after a problem, to find the case that causes the problem.
    """
    before = len(outcome.problems)

    def attempt(label: str, check: Callable[[], None]) -> None:
        try:
            check()
        except Exception as error:
            kind = "" if isinstance(error, Different) else type(error).__name__ + ": "
            text = str(error).split("\nException raised from")[0].replace("\n", " ")
            outcome.problems.append(f"{label}, {subject.layout}: {kind}{text[:300]}")

    if len(cases) > 1:
        attempt("all samples", lambda: check_block(subject, cases, outcome))
    if each or len(outcome.problems) > before or len(cases) == 1:
        for i, case in enumerate(cases):
            attempt(f"sample {i}", lambda case=case: check_block(subject, [case], outcome))
    for i, case in enumerate(cases):
        if case.random and subject.is_defined:
            outcome.random = True
            attempt(f"sample {i}", lambda case=case: check_random(subject, case.samples))


def check(op: Any, dtype: torch.dtype, count: int, each: bool = True) -> Iterator[Outcome]:
    """Checks the op, and its in-place variant if it has one."""
    generated = [s for s in samples_of(op, dtype, count) if any(tensors(arguments(x)) for x in s)]
    variants = [(False, op.op, generated)]
    if op.inplace_variant is not None:
        fitting = [s for s in generated if not any(x.broadcasts_input for x in s)]
        variants.append((True, in_place(op.inplace_variant), fitting))
    for writes, function, groups in variants:
        name = op_name(op) + "_" * writes
        outcome = Outcome(name, str(dtype).removeprefix("torch."), writes)
        for layout in LAYOUTS:
            if op_name(op) in SKIPPED.get(layout, {}):
                continue
            subject = Subject(name, function, dtype, layout)
            cases = [case for s in groups if (case := eager_case(subject, s)) is not None]
            outcome.samples += len(cases)
            if cases:
                check_cases(subject, cases, outcome, each)
        yield outcome


def raised(subject: Subject, sample: Any, enabled: bool) -> Exception | None:
    try:
        run(subject, [[sample]], 0, enabled)
    except Exception as error:
        return error
    return None


def check_errors(op: Any) -> Iterator[str]:
    """Checks calls with wrong arguments. Yields errors that differ from eager's in type or text."""
    if op.error_inputs_func is None:
        return
    subject = Subject(op_name(op), op.op, torch.float32)
    try:
        cases = list(op.error_inputs("cpu"))
    except Exception:
        return
    for i, case in enumerate(cases):
        theirs = raised(subject, case.sample_input, False)
        if theirs is None:
            continue
        ours = raised(subject, case.sample_input, True)
        first_line = str(theirs).splitlines()[0] if str(theirs) else ""
        if type(ours) is not type(theirs) or first_line[:60] not in str(ours):
            yield f"error {i}: {ours!r:.200}, eager's is {theirs!r:.200}"


def check_index(index: int, dtypes: list[str], count: int, each: bool) -> list[Outcome]:
    """Checks entry `index` of the database at all dtypes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    op = op_db[index]
    supported = op.supported_dtypes("cpu")
    outcomes = [
        outcome
        for name in dtypes
        if DTYPES[name] in supported
        for outcome in check(op, DTYPES[name], count, each)
    ]
    if outcomes:
        outcomes[0].problems += check_errors(op)
    return outcomes
