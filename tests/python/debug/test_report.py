"""The report: counts, signatures, flushes and unbatched ops, with the user's line."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import nn


def line_below() -> str:
    """Returns this file and the number of the line below the call."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"test_report.py:{frame.f_back.f_lineno + 1}"


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(3, 4)


def test_counts(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        results = [linear(torch.rand(n, 3)).tanh()[0] for n in (1, 2, 3)]
        del results[0]
        torch.sin(linear.weight)
    report = scope.report()
    assert report.ops == 7
    assert report.views == 3
    assert report.nodes == 4  # without dead values
    assert report.batches == 2
    assert report.launches == 2
    assert report.launches_saved == 2
    assert report.lower_bound == 2
    assert report.batches >= report.lower_bound


def test_before_and_inside_the_block(linear: nn.Linear) -> None:
    scope = ab.batch()
    assert (scope.report().ops, scope.report().batches) == (0, 0)
    with scope:
        result = linear(torch.rand(3))
        assert (scope.report().ops, scope.report().batches) == (1, 0)
    assert scope.report().batches == 1
    assert result.shape == (4,)


def test_a_row_for_each_signature(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        site = line_below()
        results = [linear(torch.rand(n, 3)) for n in (1, 2, 3, 1)]
        sorted_rows = [r.sort(0)[0] for r in results]
        inverse = [torch.linalg.det(r.t() @ r) for r in results]
    rows = {row.op: row for row in scope.report().signatures}
    row = rows["aten::linear"]
    assert (row.instances, row.batches, row.largest, row.launches) == (4, 1, 4, 1)
    assert (row.rule, row.note) == ("native", "")
    assert row.site.endswith(site)
    assert "[1, 3]" in row.shapes
    assert "[4, 3]" in row.shapes
    assert {r.rule for r in scope.report().signatures if r.op == "aten::sort"} <= {
        "functorch",
        "loop",
    }
    assert sum(r.instances for r in scope.report().signatures) == scope.report().nodes
    assert sum(r.batches for r in scope.report().signatures) == scope.report().batches
    assert sum(r.launches for r in scope.report().signatures) == scope.report().launches
    assert len(sorted_rows) == len(inverse) == 4


def test_early_flushes_name_the_reason_and_the_line(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        h = linear(torch.rand(3))
        site = line_below()
        h.sum().item()
        k = linear(h[:3])
    early, last = scope.report().flushes
    assert "item" in early.reason or "_local_scalar_dense" in early.reason
    assert early.site.endswith(site)
    assert (early.nodes, last.nodes) == (2, 1)
    assert "end" in last.reason
    assert k.shape == (4,)


def test_what_was_not_batched_is_counted_by_op(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        results = []
        for _ in range(3):
            h = linear(torch.rand(3))
            h.t_()
            results.append(h)
    (row,) = [r for r in scope.report().at_once if r.op.startswith("aten::t_")]
    assert row.count == 3
    assert "writes" in row.reason
    assert "test_report.py" in row.site


def test_the_hint_of_backward_in_a_loop(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        for _ in range(3):
            linear(torch.rand(3)).sum().backward()
    assert "scope.backward(loss)" in str(scope.report())
    with ab.batch() as scope:
        for _ in range(3):
            scope.backward(linear(torch.rand(3)).sum())
    assert "scope.backward" not in str(scope.report())


def test_text_names_ops_rules_and_lines(linear: nn.Linear) -> None:
    with ab.batch() as scope:
        losses = [F.cross_entropy(linear(torch.rand(3)), torch.tensor(i)) for i in range(3)]
    text = str(scope.report())
    assert len(losses) == 3
    for part in ("linear", "cross_entropy_loss", "native", "test_report.py"):
        assert part in text
    assert text.strip()
    assert repr(ab.Report())


@pytest.mark.parametrize("policy", ab.policy_names())
def test_batches_are_never_below_the_lower_bound(policy: str, linear: nn.Linear) -> None:
    square = nn.Linear(4, 4)
    with ab.batch(policy=policy) as scope:
        results = []
        for depth in (1, 5, 3, 2):
            h = linear(torch.rand(3))
            for _ in range(depth):
                h = square(h).tanh()
            results.append(h)
    assert scope.report().lower_bound == 11
    assert scope.report().batches == 11
    assert len(results) == 4


def test_a_reused_scope_reports_its_last_block(linear: nn.Linear) -> None:
    scope = ab.batch()
    for n in (2, 5):
        with scope:
            results = [linear(torch.rand(3)) for _ in range(n)]
        assert scope.report().ops == len(results)


def test_a_flush_is_named_in_the_profiler(linear: nn.Linear) -> None:
    with torch.profiler.profile() as profile, ab.batch():
        results = [linear(torch.rand(3)).tanh() for _ in range(5)]
    counts = {event.key: event.count for event in profile.key_averages()}
    flushes = {key: n for key, n in counts.items() if key.startswith("torch_autobatch::flush")}
    assert flushes == {"torch_autobatch::flush: the end of the block": 1}
    assert len(results) == 5
