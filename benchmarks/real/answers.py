"""Compares a case with eager mode: losses, gradients, buffers, and eager results afterwards."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import measure
from benchmarks.measure import MismatchError, Step
from benchmarks.real.case import Case, Maker, build, precision

EAGER, OWN, BLOCK, MAP, CELLS = "eager", "own", "block", "map", "cells"
OURS = (BLOCK, MAP, CELLS)
VARIANTS: dict[str, Callable[..., Step]] = {
    EAGER: measure.eager,
    OWN: measure.hand,
    BLOCK: functools.partial(measure.loop, granularity="op"),
    MAP: functools.partial(measure.ours, granularity="op"),
    CELLS: measure.loop,
}
TRAINING, INFERENCE = "training", "inference"


def variants(case: Case) -> list[str]:
    return [EAGER, *[OWN] * (case.own is not None), BLOCK, MAP, *[CELLS] * bool(case.cells)]


def phases(case: Case) -> list[str]:
    return [*[TRAINING] * case.trains, *[INFERENCE] * case.infers]


def run(case: Case, variant: str, phase: str) -> Step:
    """Runs one step on the case's examples, from a fixed seed."""
    torch.manual_seed(0)
    return measure.run_step(VARIANTS[variant], case, case.examples, phase == TRAINING)


def run_from_start(case: Case, variant: str, phase: str, buffers: dict[str, Tensor]) -> Step:
    """Does the same as ``run``, after setting the buffers. The results include the buffers."""
    own = dict(case.model.named_buffers())
    with torch.no_grad():
        for name, value in buffers.items():
            own[name].copy_(value)
    step = run(case, variant, phase)
    after = {f"(buffer) {name}": value.clone() for name, value in case.model.named_buffers()}
    step.gradients = step.gradients | after
    return step


def differences(expected: Step, step: Step, with_buffers: bool) -> dict[str, float]:
    """Returns the differences of the losses, each gradient and each buffer."""
    found = {"losses": measure.difference(expected.losses, step.losses)}
    gradients = [g for n, g in expected.gradients.items() if g is not None and n[0] != "("]
    # The gradient of a bias before a softmax or a normalisation is zero up to rounding.
    least = 1e-3 * max((g.abs().max().item() for g in gradients), default=0.0)
    for name, value in expected.gradients.items():
        other = step.gradients.get(name)
        if name[0] != "(":
            found[f"gradient of {name}"] = measure.difference(value, other, least)
        elif with_buffers and value is not None and other is not None:
            same = torch.equal(value, other)
            found[name] = 0.0 if same else measure.difference(value.double(), other.double())
    return found


def check(case: Case, variant: str, phase: str, dtype: torch.dtype) -> float:
    """Returns the largest difference from eager, relative to the largest magnitude.

    Raises a MismatchError if the difference exceeds rounding, or if eager results have changed.
    """
    with precision(dtype):
        buffers = {name: value.clone() for name, value in case.model.named_buffers()}
        expected = run_from_start(case, EAGER, phase, buffers)
        try:
            step = run_from_start(case, variant, phase, buffers)
        finally:
            again = run_from_start(case, EAGER, phase, buffers)
            if max(differences(expected, again, with_buffers=True).values()) > 0:
                raise MismatchError(f"after {variant} eager gives other answers than before")
    # With the package's own batching, the statistics of batch norm are those of the minibatch.
    found = differences(expected, step, with_buffers=variant != OWN)
    where, worst = max(found.items(), key=lambda item: item[1])
    allowed = case.tolerance if dtype == torch.float64 else measure.TOLERANCE
    if worst > max(allowed, case.own_tolerance if variant == OWN else 0.0):
        raise MismatchError(f"{where} differs from eager's by {worst:.1e}")
    return worst


def check_both(make: Maker, case: Case, variant: str, phase: str) -> float:
    """Runs the check. If it finds a difference, repeats the check in double precision."""
    try:
        return check(case, variant, phase, torch.float32)
    except MismatchError:
        return check(build(make, torch.float64), variant, phase, torch.float64)


def failures(make: Maker) -> list[str]:
    """Returns the differences of a model from eager, in double precision, for all variants."""
    case, found = build(make, torch.float64), []
    for phase in phases(case):
        for variant in variants(case)[1:]:
            try:
                check(case, variant, phase, torch.float64)
            except Exception as error:
                found.append(f"{phase}, {variant}: {what(error)}")
    return found


def what(error: BaseException) -> str:
    """Formats an error in one line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
