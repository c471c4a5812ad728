"""Costs in a report: pauses, chains of reads, flushes, and ops with different signatures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_switches import without
from torch import Tensor, nn
from torch.autograd import Function

linear = nn.Linear(4, 4)
ONES = torch.ones(4)


def run(code: Callable[[int], object], times: int = 8) -> ab.Report:
    with ab.batch(adaptive=False) as scope:
        kept = [code(i) for i in range(times)]
    assert len(kept) == times
    return scope.report()


# --- pauses ---


def walk(x: Tensor, seen: list[float]) -> Tensor:
    for _ in range(40):
        x = linear(x)
        seen.append(x[0].item())
    return x.sum()


def encode(n: int) -> Tensor:
    rows = torch.stack([linear(ONES) for _ in range(n)])
    return rows.t().softmax(0) @ torch.ones(n)


def walks(adaptive: bool) -> ab.Report:
    """Runs many ops that batch well, and then reads a value at each step."""
    seen: list[float] = []
    with ab.batch(adaptive=adaptive) as scope:
        kept = [encode(n) for n in range(1, 60)]
        kept += [walk(ONES, seen) for _ in range(20)]
    assert len(kept) == 79
    return scope.report()


@pytest.mark.needs("direct_calls")
def test_a_read_after_which_the_block_paused_is_the_worst_line() -> None:
    report = walks(adaptive=True)
    calls = sum(pause.calls for pause in report.pauses)
    assert calls > 400
    first, second, third = str(report).splitlines()[:3]
    assert third.startswith("Worst line: ")
    assert ".item(): " in third
    assert f"deferring paused and about {calls:,} calls ran eagerly" in third
    ops, launches = report.nodes + calls, report.launches + calls
    assert first.startswith(f"About {ops:,} ops ran in {launches:,} launches: ")
    assert second.endswith(f"and about {calls:,} ran eagerly while deferring was paused.")


@pytest.mark.needs("direct_calls")
def test_what_runs_in_a_pause_is_about_what_would_have_been_captured() -> None:
    paused, deferred = walks(adaptive=True), walks(adaptive=False)
    ran = paused.nodes + sum(pause.calls for pause in paused.pauses)
    assert 0.8 * deferred.nodes < ran < 1.6 * deferred.nodes
    assert deferred.pauses == []


@pytest.mark.needs("direct_calls")
def test_a_pause_that_a_block_ends_is_counted() -> None:
    seen: list[float] = []
    with ab.batch(adaptive=True) as scope:
        walk(ONES, seen)
    [pause] = scope.report().pauses
    assert 0 < pause.calls < 256  # fewer than the shortest pause


@pytest.mark.usefixtures("no_trials")
def test_blocks_of_one_example_are_told_to_have_the_loop_inside() -> None:
    reports = []
    for _ in range(12):
        with ab.batch(adaptive=True) as scope:
            loss = linear(ONES).pow(2).sum()
        reports.append(scope.report())
    assert loss.shape == ()
    advice = "put the loop over the examples inside the block"
    assert advice in str(reports[0]).splitlines()[2]
    last = reports[-1]
    assert last.nodes == 0
    [found] = last.findings
    assert found.what.startswith("deferring paused: blocks that began here had no ops that could")
    assert advice in found.remedy
    assert "adaptive" not in str(last)


# --- reads in a chain ---


@pytest.mark.parametrize("grads", [True, False])
def test_a_chain_is_no_reads_fault(grads: bool) -> None:
    cell = nn.GRUCell(4, 4)
    cell.requires_grad_(grads)
    start = torch.zeros(1, 4, requires_grad=True)
    with ab.batch(adaptive=False) as scope, torch.set_grad_enabled(grads):
        h = start
        for i in range(100):
            h = cell(ONES[None], h)
            if i % 10 == 9:
                h.norm().item()
    report = scope.report()
    assert report.depth >= 100
    third = str(report).splitlines()[2]
    assert third.startswith("A chain: each op reads the result of the previous op")
    assert all(finding.launches <= 12 for finding in report.findings)


def test_reads_in_examples_that_do_not_depend_on_each_other_cost_what_they_cost() -> None:
    def code(i: int) -> Tensor:
        h = linear(ONES).tanh().sum()
        h.item()
        return h

    report = run(code, 20)
    assert report.depth == 3
    [finding] = report.findings
    assert finding.what == ".item(): 20 early flushes, about 57 launches more"


@pytest.mark.parametrize("grads", [True, False])
def test_what_an_earlier_block_computed_begins_no_chain(grads: bool) -> None:
    with torch.set_grad_enabled(grads):
        with ab.batch():
            features = [linear(ONES).tanh() for _ in range(10)]
        with ab.batch(adaptive=False) as scope:
            for h in features:
                linear(h).tanh().sum().item()
    assert scope.report().depth == 3
    assert scope.report().findings[0].launches == 27


def test_one_flush_has_no_depth() -> None:
    assert run(lambda i: linear(ONES).tanh()).depth == 0


# --- differences between ops ---


def test_launches_that_flushes_cause_are_not_claimed() -> None:
    q, k, q2, k2 = (nn.Linear(4, 4) for _ in range(4))

    def code(i: int, read: bool) -> Tensor:
        x = torch.ones(3, 4)
        for a, b in ((q, k), (q2, k2)):
            s = a(x) @ b(x).t()
            if read and s.max() > 99:
                break
        return s.sum()

    assert not any("weights" in f.what for f in run(lambda i: code(i, False), 24).findings)
    found = run(lambda i: code(i, True), 24).findings
    assert not any("weights" in f.what for f in found)
    assert found[0].what.startswith("if: ")


def test_calls_of_one_line_are_not_compared() -> None:
    def code(i: int) -> Tensor:
        x = linear(ONES)
        for _ in range(1 + i % 4):
            x = (x[:, None] + linear.weight).sum(0) + x
        if x.max() > 99:
            return 2 * x
        return x

    assert not any("sizes of add" in f.what for f in run(code, 24).findings)


# --- constants ---

AS_TENSOR = "pass the argument that differs as a tensor"


@pytest.mark.parametrize(
    "code",
    [
        lambda h, i: F.leaky_relu(h, 0.1 * i),
        lambda h, i: F.elu(h, 0.1 + i),
        lambda h, i: F.pad(h, (i, i)),
        lambda h, i: torch.full_like(h, 0.1 * i),
        lambda h, i: F.layer_norm(h, (4,), eps=1e-5 * (i + 1)),
        lambda h, i: torch.add(h, h, alpha=0.5 + i),
        lambda h, i: h.roll(i),
    ],
)
def test_a_tensor_is_not_advised_where_the_op_takes_none(
    code: Callable[[Tensor, int], Tensor],
) -> None:
    found = [f for f in run(lambda i: code(linear(ONES), i)).findings if "constants" in f.what]
    assert all("this argument cannot be a tensor" in finding.remedy for finding in found)


@pytest.mark.parametrize(
    "code",
    [
        lambda h, c: h * c,
        lambda h, c: h.clamp(min=c),
        lambda h, c: torch.lerp(h, 2 * h, c),
        lambda h, c: h**c,
    ],
)
def test_a_tensor_is_advised_where_it_helps(code: Callable[[Tensor, Any], Tensor]) -> None:
    with without("varying_numbers"):  # earlier tests have found numbers that vary
        report = run(lambda i: code(linear(ONES), 0.5 + i))
    numbers = [f for f in report.findings if "const" in f.what]
    assert [finding.remedy for finding in numbers] == [AS_TENSOR]
    tensors = run(lambda i: code(linear(ONES), torch.tensor(0.5 + i)))
    assert tensors.findings == []


# --- custom functions ---


class Scaled(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, k: Any) -> Tensor:
        return x * k

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.k = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.k, None


def test_constants_of_a_function_of_the_users() -> None:
    found = run(lambda i: Scaled.apply(linear(ONES), 0.5 + i)).findings
    [finding] = [f for f in found if "Scaled" in f.what]
    assert finding.what.startswith("constants of Scaled.apply differ: 8 ops in 8 launches")
    assert "pass tensors to apply()" in finding.remedy


# --- blocks that have ended ---


def test_a_block_that_ended_with_nothing_kept() -> None:
    with ab.batch() as scope:
        for _ in range(4):
            linear(ONES).tanh()
        assert str(scope.report()).startswith("No op has run yet: 8 ops captured.")
    assert str(scope.report()).startswith("No op ran: 8 ops captured. The program kept none")
    assert not scope.report().is_open


def test_a_generators_report_is_of_all_its_stretches() -> None:
    @ab.batch
    def losses() -> Any:
        for _ in range(4):
            yield linear(ONES).sum()

    kept = list(losses())
    assert len(kept) == 4
    assert ab.last_report().nodes == 8
    assert "put the loop over the examples inside the block" in str(ab.last_report())
