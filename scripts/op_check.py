"""One entry of PyTorch's operator database run inside a block, next to eager.

What is checked: values, dtypes, shapes, strides, requires_grad, and gradients of the inputs; of
random ops, in place of values, the distribution and that a seed repeats. What is reported: into
which class the op falls (`CLASSES`), from the scope's own report.
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
from torch import Tensor
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_leaves, tree_map

op_db = common_methods_invocations.op_db
Function = Callable[..., Any]

INSTANCES = 4
GENERATED = 40  # samples of an op looked at; those checked are spread over them
DRAWS = 6  # of a random op's distribution

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
TOLERANCE = {  # of the largest magnitude expected
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 4e-2,
}

# From best to worst; an op that makes several nodes has the class of the worst one, over all
# samples.
CLASSES = {
    "view": "no call at all: an address, or the argument itself",
    "native": "one call a batch, by a rule of ours",
    "functorch": "one call a batch, by functorch's batching rule",
    "loop": "captured, one call an instance",
    "factory": "reads no pending tensor's values: runs as usual, flushes nothing",
    "at once": "its arguments are computed, then it runs",
    "flush": "reads values without an op of its own",
}
BATCHED = {"view", "native", "functorch"}

# What is not checked, or not in full, and why.
EXCEPTIONS: dict[str, str] = {}
# Memory that nobody has written: only the metadata can be compared.
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
    """What became of one op (or its in-place variant) at one dtype."""

    name: str
    dtype: str
    in_place: bool = False
    kind: str = ""  # one of CLASSES; empty: no sample has a tensor, or eager refuses them all
    samples: int = 0
    random: bool = False
    problems: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # why not a better class

    def worsen(self, kind: str, reasons: set[str]) -> None:
        order = list(CLASSES)
        if kind and (not self.kind or order.index(kind) > order.index(self.kind)):
            self.kind = kind
        self.reasons = sorted(reasons.union(self.reasons))


@dataclass
class Run:
    """Instances of one sample or of several, run in one block."""

    results: list[Any]
    inputs: list[Any]  # as the op got them, after the block
    leaves: list[list[Tensor]]
    scope: ab.batch
    deferred: bool = True  # the op's results were pending

    def part(self, first: int, count: int) -> Run:
        of = slice(first, first + count)
        return Run(self.results[of], self.inputs[of], self.leaves[of], self.scope, self.deferred)


class Different(Exception):  # noqa: N818
    """What is not eager's."""


# --- samples --------------------------------------------------------------------------------------


def op_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def samples_of(op: Any, dtype: torch.dtype, count: int) -> list[list[Any]]:
    """Up to `count` samples, each as instances with values of their own."""
    grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    by_seed = []
    for seed in range(INSTANCES):
        torch.manual_seed(seed)
        random.seed(seed)
        generator = op.sample_inputs("cpu", dtype, requires_grad=grad)
        by_seed.append(list(itertools.islice(generator, GENERATED)))
    size = min(map(len, by_seed))
    picked = sorted({i * size // count for i in range(count)}) if size else []
    return [[samples[i] for samples in by_seed] for i in picked]


def leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    plain = value.detach().resolve_conj().resolve_neg()
    return plain.requires_grad_(value.requires_grad)


def tensors(value: Any) -> list[Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def arguments(sample: Any) -> Any:
    return sample.input, sample.args, sample.kwargs


# --- running --------------------------------------------------------------------------------------


def call(function: Function, input: Any, args: Any, kwargs: Any) -> Any:
    return function(input, *args, **kwargs)  # SITE is this line


SITE = f"{__file__}:{call.__code__.co_firstlineno + 1}"


def is_ops_own(site: str) -> bool:
    """Whether the op made it, not what makes its inputs pending."""
    return site == SITE or not site.startswith(f"{__file__}:")


# The database seeds every single call of some random ops; here each block is seeded once.
common_methods_invocations.wrapper_set_seed = lambda f, x, *args, **kwargs: call(f, x, args, kwargs)


def is_pending(tensor: Tensor) -> bool:
    return "DeferredInit" in repr(torch._C._dispatch_keys(tensor))


def in_place(function: Function) -> Function:
    def on_a_copy(input: Any, *args: Any, **kwargs: Any) -> Any:
        copy = input.clone()
        return call(function, copy, args, kwargs), copy

    return on_a_copy


def run(function: Function, samples: list[Any], seed: int, enabled: bool) -> Run:
    """All of them in one block, with pending inputs."""
    out = Run([], [], [], ab.batch(enabled=enabled))
    weight = torch.ones((), requires_grad=True)
    leaves = [tree_map(leaf, arguments(sample)) for sample in samples]
    out.leaves = [[x for x in tree_leaves(each) if wants_grad(x)] for each in leaves]
    torch.manual_seed(seed)
    with out.scope:

        def pend(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                return value
            true = (weight * 1) > 0
            pended = torch.where(true, value, value)  # keeps values, dtype and strides
            if enabled and not is_pending(pended):
                raise Different("an input is not pending")
            return pended

        for each in leaves:
            inputs = tree_map(pend, each)
            out.inputs.append(inputs)
            out.results.append(call(function, *inputs))
            out.deferred &= all(is_pending(x) for x in tensors(out.results[-1]))
    return out


def wants_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.layout == torch.strided


def gradients(done: Run, samples: list[Any], members: list[int]) -> list[Tensor | None]:
    """Of the leaves of these members, for fixed random gradients of the results."""
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


# --- comparing ------------------------------------------------------------------------------------


def same_metadata(got: Tensor, expected: Tensor, strides: bool) -> None:
    for what in ("shape", "dtype", "layout", "device", "requires_grad"):
        a, b = getattr(got, what), getattr(expected, what)
        if a != b:
            raise Different(f"{what} {a}, eager has {b}")
    if strides and expected.layout == torch.strided and expected.numel() > 0:
        a, b = (
            [s for s, size in zip(x.stride(), x.shape, strict=True) if size > 1]
            for x in (got, expected)
        )
        if a != b:
            raise Different(f"strides {got.stride()}, eager has {expected.stride()}")


def same_values(got: Tensor, expected: Tensor, dtype: torch.dtype, least: float = 1e-30) -> None:
    if expected.layout != torch.strided:
        got, expected = got.to_dense(), expected.to_dense()
    if expected.dtype == torch.complex32:
        got, expected = got.to(torch.complex64), expected.to(torch.complex64)
    got, expected = got.detach().resolve_conj(), expected.detach().resolve_conj()
    if expected.is_quantized:
        got, expected = got.dequantize(), expected.dequantize()
    if expected.dtype not in TOLERANCE:
        if not torch.equal(got, expected):
            raise Different(f"values differ: {describe(got)}, eager has {describe(expected)}")
        return
    tolerance = max(TOLERANCE[expected.dtype], TOLERANCE.get(dtype, 0))
    finite = expected[expected.isfinite()].abs()
    scale = max(finite.max().item(), least) if finite.numel() else 1.0
    if torch.allclose(got, expected, rtol=0, atol=tolerance * scale, equal_nan=True):
        return
    difference = (got - expected).abs().nan_to_num(0, 0, 0).max().item()
    raise Different(
        f"values differ by {difference / scale:.1e}: {describe(got)}, eager: {describe(expected)}"
    )


def describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.flatten()[:4].tolist())[:60]}"


def same(got: Any, expected: Any, dtype: torch.dtype, values: bool = True) -> None:
    ours, theirs = tree_leaves(got), tree_leaves(expected)
    if type(got) is not type(expected) or len(ours) != len(theirs):
        raise Different(f"{type(got)} of {len(ours)}, eager has {type(expected)} of {len(theirs)}")
    for a, b in zip(ours, theirs, strict=True):
        if type(a) is not type(b):
            raise Different(f"{type(a)}, eager has {type(b)}")
        if isinstance(b, Tensor):
            same_metadata(a, b, strides=True)
            if values:
                same_values(a, b, dtype)
        elif a != b and values and not (a != a and b != b):
            raise Different(f"{a}, eager has {b}")


def aliases(results: Any, inputs: Any) -> list[bool]:
    """Which results share memory with which inputs."""

    def memory(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0

    return [
        memory(x) == memory(y) != 0 and x.numel() > 0
        for x in tensors(results)
        for y in tensors(inputs)
    ]


def same_gradients(
    got: list[Tensor | None], expected: list[Tensor | None], dtype: torch.dtype
) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if (a is None) != (b is None):
            raise Different(f"gradient {i} is {a if a is None else describe(a)}, eager's is {b}")
        if a is not None and b is not None:
            try:
                same_metadata(a, b, strides=False)
                same_values(a, b, dtype, least=1)  # of the size of the roots, whose sums cancel
            except Different as error:
                raise Different(f"gradient {i}: {error}") from None


# --- random ops -----------------------------------------------------------------------------------


def draws(function: Function, samples: list[Any], enabled: bool) -> Tensor:
    """All numbers of the results, of several seeds."""
    numbers = []
    for seed in range(DRAWS):
        for tensor in tensors(run(function, samples, seed, enabled).results):
            if tensor.layout == torch.strided:
                values = tensor.detach()
                values = (
                    torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
                )
                numbers.append(values.flatten().double())
    return torch.cat(numbers) if numbers else torch.zeros(0)


def same_distribution(got: Tensor, expected: Tensor) -> None:
    """Kolmogorov and Smirnov's: the largest distance of the two distribution functions."""
    if got.numel() != expected.numel():
        raise Different(f"{got.numel()} numbers, eager draws {expected.numel()}")
    n = got.numel()
    if n == 0:
        return
    at = torch.cat([got, expected]).sort().values
    below = [torch.searchsorted(x.sort().values, at, right=True) / n for x in (got, expected)]
    distance = (below[0] - below[1]).abs().max().item()
    # Whole channels may share one draw, so there are fewer draws than numbers.
    if distance > 4 / math.sqrt(n / 2) and distance > 0.1:
        raise Different(f"another distribution: distance {distance:.2f} of {n} numbers")


def check_random(function: Function, samples: list[Any], dtype: torch.dtype) -> None:
    first, second = (run(function, samples, 1, True).results for _ in range(2))
    same(first, second, dtype)
    same_distribution(draws(function, samples, True), draws(function, samples, False))


# --- one op ---------------------------------------------------------------------------------------


def classify(done: Run) -> tuple[str, set[str]]:
    """The worst class of what the op's own line made, and why it is no better."""
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
            kinds.add("at once")
            reasons.add(f"at once: {at_once.op}: {at_once.reason}")
    flushes = {flush.reason for flush in report.flushes if is_ops_own(flush.site)}
    if "at once" not in kinds and flushes:
        kinds.add("flush")
        reasons |= {f"flush: {reason}" for reason in flushes}
    if not kinds:
        kinds.add("view" if done.deferred else "factory")
    return max(kinds, key=list(CLASSES).index), reasons


@dataclass
class Case:
    """A sample that eager runs: its instances, and what eager gives for them."""

    samples: list[Any]
    expected: Run
    differentiable: bool
    random: bool


def eager_case(function: Function, samples: list[Any]) -> Case | None:
    before = torch.get_rng_state()
    try:
        torch.manual_seed(0)
        seeded = torch.get_rng_state()
        expected = run(function, samples, 0, False)
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


def check_block(
    function: Function, cases: list[Case], outcome: Outcome, dtype: torch.dtype
) -> None:
    """All instances of these cases in one block; the class is noted in `outcome`."""
    done = run(function, [sample for case in cases for sample in case.samples], 0, True)
    outcome.worsen(*classify(done))
    first = 0
    for case in cases:
        part = done.part(first, len(case.samples))
        first += len(case.samples)
        compare(part, case, dtype, not case.random and outcome.name not in UNDEFINED)


def compare(got: Run, case: Case, dtype: torch.dtype, values: bool) -> None:
    expected = case.expected
    for m in range(len(case.samples)):
        same(got.results[m], expected.results[m], dtype, values)
        same(got.inputs[m], expected.inputs[m], dtype, values)  # of some ops also the result
        ours, theirs = (aliases(run.results[m], run.inputs[m]) for run in (got, expected))
        if ours != theirs:
            raise Different(f"results share memory with inputs: {ours}, eager's: {theirs}")
    if not values or not case.differentiable:
        return
    for members in (range(len(case.samples)), [len(case.samples) - 1]):  # all, and one of them
        ours, theirs = (gradients(run, case.samples, list(members)) for run in (got, expected))
        same_gradients(ours, theirs, dtype)


def check_cases(
    function: Function,
    cases: list[Case],
    outcome: Outcome,
    dtype: torch.dtype,
    each: bool,
) -> None:
    """All in one block, and each in one of its own: always, or to find out which one is wrong."""

    def attempt(which: list[Case], label: str) -> None:
        try:
            check_block(function, which, outcome, dtype)
        except Exception as error:
            kind = "" if isinstance(error, Different) else type(error).__name__ + ": "
            text = str(error).split("\nException raised from")[0].replace("\n", " ")
            outcome.problems.append(f"{label}: {kind}{text[:300]}")

    if len(cases) > 1:
        attempt(cases, "all samples")
    if each or outcome.problems or len(cases) == 1:
        for i, case in enumerate(cases):
            attempt([case], f"sample {i}")
    for i, case in enumerate(cases):
        if case.random and outcome.name not in UNDEFINED:
            outcome.random = True
            try:
                check_random(function, case.samples, dtype)
            except Exception as error:
                outcome.problems.append(f"sample {i}: {type(error).__name__}: {str(error)[:300]}")


def check(op: Any, dtype: torch.dtype, count: int, each: bool = True) -> Iterator[Outcome]:
    """The op, and its in-place variant if it has one."""
    name = str(dtype).removeprefix("torch.")
    generated = [s for s in samples_of(op, dtype, count) if any(tensors(arguments(x)) for x in s)]
    variants = [(False, op.op, generated)]
    if op.inplace_variant is not None:
        fitting = [s for s in generated if not any(x.broadcasts_input for x in s)]
        variants.append((True, in_place(op.inplace_variant), fitting))
    for writes, function, samples in variants:
        outcome = Outcome(op_name(op) + "_" * writes, name, writes)
        cases = [case for s in samples if (case := eager_case(function, s)) is not None]
        outcome.samples = len(cases)
        if cases:
            check_cases(function, cases, outcome, dtype, each)
        yield outcome


def check_index(index: int, dtypes: list[str], count: int, each: bool) -> list[Outcome]:
    """All dtypes of entry `index` of the database."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    op = op_db[index]
    supported = op.supported_dtypes("cpu")
    return [
        outcome
        for name in dtypes
        if DTYPES[name] in supported
        for outcome in check(op, DTYPES[name], count, each)
    ]
