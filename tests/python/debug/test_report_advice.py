"""The advice of a report, and its text."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_switches import without
from torch import Tensor, nn
from torch_autobatch import _report

linear = nn.Linear(4, 4)
ONES = torch.ones(4)


DATA = torch.rand(16, 4)  # different for each instance, because equal ops on equal data run once


def run(code: Callable[[int], object], times: int = 16) -> ab.Report:
    """Returns the report of a block with this number of examples, whose results are kept."""
    with ab.batch(adaptive=False) as scope:
        kept = [code(i) for i in range(times)]
    assert len(kept) == times
    return scope.report()


# --- findings ---


def test_nothing_to_advise() -> None:
    report = run(lambda i: linear(DATA[i]).tanh())
    assert report.findings == []
    first, second, third = str(report).splitlines()[:3]
    assert first == "32 ops ran in 2 launches: 16.0 times fewer than without batching."
    assert second == "100 % of the ops ran together with others; 0 ran alone."
    assert third.startswith("No obstacle to larger batches was found. Most launches: ")
    assert "test_report_advice.py:" in third


def test_weights_differ() -> None:
    layers = [nn.Linear(4, 4) for _ in range(16)]
    matrices = [layer.weight for layer in layers]
    report = run(lambda i: torch.ones(3, 4) @ matrices[i])
    [finding] = report.findings
    assert finding.what == "weights of matmul differ (16): 16 ops in 16 launches"
    assert "stack the weights" in finding.remedy
    assert finding.source == "report = run(lambda i: torch.ones(3, 4) @ matrices[i])"


def test_layers_that_one_line_calls_keep_nothing_apart() -> None:
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    assert run(lambda i: layers(DATA[i]), 6).findings == []


def test_constants_differ() -> None:
    report = run(lambda i: F.leaky_relu(linear(DATA[i]), 0.1 * i))
    found = [f for f in report.findings if f.what.startswith("constants of leaky_relu differ")]
    [finding] = found
    assert "negative_slope=" in finding.what
    assert "16 ops in 16 launches" in finding.what
    assert "this argument cannot be a tensor" in finding.remedy


@pytest.mark.parametrize(
    ("code", "op", "differ"),
    [
        (lambda h, c: h * c, "mul", "other=0.5 and other=15.5"),
        (lambda h, c: c * h, "mul", "other=0.5 and other=15.5"),
        (lambda h, c: h / c, "div", "other=0.5 and other=15.5"),
        (lambda h, c: h + c, "add", "other=0.5 and other=15.5"),
        (lambda h, c: h - int(c), "sub", "other=0 and other=15"),
        (lambda h, c: h.clone().mul_(c), "mul", "other=0.5 and other=15.5"),
        (lambda h, c: h.clamp(min=c / 5), "clamp", "min=0.1 and min=3.1"),
        (lambda h, c: h**c, "pow", "exponent=0.5 and exponent=15.5"),
    ],
)
def test_numbers_of_the_program_differ(
    code: Callable[[Tensor, float], Tensor], op: str, differ: str
) -> None:
    with without("varying_numbers"):  # earlier tests have found numbers that vary
        report = run(lambda i: code(linear(DATA[i]), i + 0.5))
    found = [f for f in report.findings if f.what.startswith("constants")]
    [finding] = found
    assert re.match(rf"constants of {op}_? differ \({differ}\): 16 ops in ", finding.what)
    assert finding.remedy == "pass the argument that differs as a tensor"


def test_dtypes_differ() -> None:
    kinds = [torch.float32, torch.float64, torch.bfloat16]
    report = run(lambda i: linear(DATA[i]).to(kinds[i % 3]).cumprod(0))
    found = [f for f in report.findings if f.what.startswith("dtypes of cumprod differ")]
    assert [f.remedy for f in found] == ["use the same dtype in all examples"]
    assert "sizes" not in str(report)


def test_sizes_differ() -> None:
    report = run(lambda i: linear(torch.ones(1 + i, 4)).cumprod(0))
    [finding] = report.findings
    assert finding.what.startswith("sizes of cumprod differ")
    assert "docs/batched_ops.md" in finding.remedy


def test_an_op_that_runs_one_by_one() -> None:
    report = run(lambda i: torch.bernoulli(linear(ONES).sigmoid()))
    loops = [f for f in report.findings if "one by one" in f.what]
    rows = [row for row in report.signatures if row.rule == "loop"]
    assert len(loops) == len(rows)


def test_a_random_op_that_runs_one_by_one() -> None:
    report = run(lambda i: torch.poisson(linear(ONES).exp()))
    [finding] = [f for f in report.findings if "one by one" in f.what]
    assert finding.what.endswith("each call draws its own random numbers")
    assert finding.remedy == "draw the random numbers for all examples at once, before the block"


def test_what_was_not_captured() -> None:
    def code(i: int) -> Tensor:
        h = linear(ONES)
        alias = h.numpy(force=True) if i < 0 else h
        return alias.t_() if i < 0 else alias.unsqueeze(0).t_()

    report = run(code)
    assert all(f.site for f in report.findings)


def test_small_flushes() -> None:
    with ab.batch(max_pending=4, adaptive=False) as scope:
        kept = [linear(ONES).tanh() for _ in range(16)]
    assert len(kept) == 16
    [finding] = scope.report().findings
    assert finding.what.startswith("max_pending reached: ")
    assert "larger" in finding.remedy


def test_at_most_ten_worst_first() -> None:
    code = "\n".join(f"def read{k}(h): return [h.item() for _ in [0]]" for k in range(14))
    space: dict[str, Callable[[Tensor], object]] = {}
    exec(compile(code, "<made>", "exec"), space)
    with ab.batch(adaptive=False) as scope:
        for i in range(56):
            space[f"read{i % 14 if i % 2 else 1}"](linear(ONES).sum())
    found = scope.report().findings
    assert 5 < len(found) <= 10
    assert [f.launches for f in found] == sorted((f.launches for f in found), reverse=True)
    assert found[0].site == "<made>:2"


def test_the_worst_line_is_among_the_first_three_of_a_training_program() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with ab.batch(adaptive=False) as scope:
        losses, total = [], 0.0
        for i in range(32):
            loss = model(torch.full((1 + i % 3, 4), float(i))).square().mean()
            total += loss.item()
            losses.append(loss)
    torch.stack(losses).sum().backward()
    third = str(scope.report()).splitlines()[2]
    assert third.startswith("Worst line: ")
    assert ".item(): 32 early flushes" in third
    assert scope.report().findings[0].source == "total += loss.item()"


# --- text ---


def test_a_graph_networks_report_is_short() -> None:
    """Tests message passing with a realistic number of ops and lines."""
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def network(i: int) -> Tensor:
        h = torch.ones(3 + i % 5, 4)
        for layer in layers:
            messages = layer(h)
            messages = messages + h
            messages = messages.relu()
            messages = messages * 0.5
            mean = messages.mean(0)
            scale = mean.sigmoid()
            h = messages * scale
            h = h - mean
            h = F.layer_norm(h, (4,))
            h = h.cumprod(0)
            h = h.exp()
            h = torch.cat([h, h[:1]])
            h = h[1:].tanh()
            h = h.clamp(-1, 1)
            norm = h.norm(dim=-1, keepdim=True)
            h = h / (norm + 1)
            h = h.softmax(-1)
        return h.sum()

    report = run(network, 32)
    lines = str(report).splitlines()
    assert len(lines) <= 25
    assert "cumprod" in lines[2]
    assert "sizes of cumprod differ" in lines[2]
    assert lines[-1].endswith("more lines: report.table()")
    assert len(report.table().splitlines()) > 15


def test_rows_are_grouped_by_op_and_line() -> None:
    report = run(lambda i: linear(torch.ones(1 + i, 4)).cumprod(0))
    rows = [line for line in report.table().splitlines() if " cumprod" in line]
    assert len(rows) == 1
    assert len([row for row in report.signatures if row.op == "aten::cumprod"]) == 16


def test_the_counts_and_the_ratio_are_of_the_same_ops() -> None:
    with ab.batch(adaptive=False) as scope:
        kept = [linear(ONES).expand(2, 4).clone().t_() for _ in range(5)]
    first, second, _ = str(scope.report()).splitlines()[:3]
    assert len(kept) == 5
    nodes, launches = scope.report().nodes + 5, scope.report().launches + 5
    assert first.startswith(f"{nodes} ops ran in {launches} launches: ")
    assert second.endswith(f"{nodes - 5} ran alone, and 5 without being captured.")


def test_a_chain() -> None:
    with ab.batch(adaptive=False) as scope:
        h = ONES
        for _ in range(8):
            h = linear(h).tanh()
    assert h.shape == (4,)
    third = str(scope.report()).splitlines()[2]
    assert third.startswith(
        "A chain: each op reads the result of the previous op, in one example or a few; put"
    )


def test_writes_into_a_result_have_its_words() -> None:
    def code(i: int) -> Tensor:
        out = torch.zeros(3)
        out[i % 3] = linear(ONES).sum()
        return out.sum()

    assert " out[i] = x " in run(code).table()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "no op in the block reads a parameter or another tensor that requires grad."),
        ({"enabled": False}, "the block was not enabled (enabled=False)."),
    ],
)
def test_why_nothing_was_captured(options: dict[str, Any], why: str) -> None:
    data = torch.ones(4)
    with ab.batch(**options) as scope:
        data.tanh()
    assert str(scope.report()) == f"No op was captured: {why}"


def test_nothing_was_captured_in_a_pause() -> None:
    report = ab.Report(pauses=[_report.PauseReport("/home/me/train.py:3")])
    assert str(report).startswith("No op was captured: the block was paused, at me/train.py:3.")


def test_before_anything_ran() -> None:
    with ab.batch() as scope:
        h = linear(ONES)
        assert str(scope.report()).startswith("No op has run yet: 1 op captured.")
    assert str(ab.Report()).startswith("No op was captured")
    assert h.shape == (4,)


# --- as data ---


def test_it_is_plain_data() -> None:
    report = run(lambda i: linear(torch.ones(1 + i, 4)).cumprod(0))
    assert pickle.loads(pickle.dumps(report)) == report
    facts = report.to_dict()
    assert ab.Report.from_dict(facts) == report
    assert json.loads(json.dumps(facts)) == facts
    assert facts["signatures"][0]["op"] == report.signatures[0].op
    assert report != ab.Report()
    assert repr(report) == (
        f"<torch_autobatch.Report: {report.nodes} ops in {report.launches} launches, "
        f"{len(report.signatures)} signatures, 1 flushes>"
    )


def test_a_profile_is_plain_data() -> None:
    with ab.batch(profile=True) as scope:
        kept = [linear(ONES).tanh() for _ in range(4)]
    report = scope.report()
    assert len(kept) == 4
    facts = report.to_dict()
    assert json.loads(json.dumps(facts)) == facts
    assert ab.Report.from_dict(json.loads(json.dumps(facts))) == report
    assert report.trace is not None
    assert report.trace.batches != []


@pytest.mark.parametrize("name", ["Report", "SignatureReport", "FlushReport", "AtOnceReport"])
def test_every_field_is_documented(name: str) -> None:
    kind = getattr(_report, name)
    for field in dataclasses.fields(kind):
        assert f"{field.name}:" in kind.__doc__ or f"{field.name}," in kind.__doc__
