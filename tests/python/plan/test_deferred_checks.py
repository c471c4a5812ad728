"""Checks of values that are deferred to the flush: which checks are deferred, and that all run."""

# ruff: noqa: PT012  (a block that fails is of several statements)

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import helpers_checks as cases
import pytest
import torch
import torch.distributions as D
import torch_autobatch as ab
from helpers_checks import InvalidError
from torch import Tensor, nn


@pytest.fixture
def layer() -> nn.Linear:
    return nn.Linear(4, 4, dtype=torch.float64)


@pytest.fixture(autouse=True)
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compile`` disables the checks of distributions for the rest of the process."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)


def inputs(count: int = 8, rows: int = 1) -> list[Tensor]:
    return [torch.rand(rows + i % 3, 4, dtype=torch.float64) + 0.5 for i in range(count)]


def flushes(report: ab.Report) -> int:
    return sum(flush.count for flush in report.flushes)


def error_of(run: Callable[[], Any], **kinds: Any) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        run()
    return caught.value


def soft(layer: nn.Linear, x: Tensor) -> Tensor:
    return nn.functional.softplus(layer(x)) + 0.1


def same_as_eager(
    layer: nn.Linear, function: Callable[[Tensor], Tensor], checks: int, reads: int = 0
) -> None:
    xs = inputs()
    results = []
    for enabled in (False, True):
        layer.zero_grad()
        with ab.batch(enabled=enabled) as scope:
            outputs = [function(x) for x in xs]
        torch.stack([o.sum() for o in outputs]).sum().backward()
        results.append(
            ([o.detach() for o in outputs], [p.grad.clone() for p in layer.parameters()])
        )
    for mine, eagers in zip(results[1], results[0], strict=True):
        for a, b in zip(mine, eagers, strict=True):
            torch.testing.assert_close(a, b)
    report = scope.report()
    assert report.checks == checks * len(xs)
    assert flushes(report) == 1 + reads * len(xs)


# --- distributions: by default ---


def test_distributions_are_one_flush(layer: nn.Linear) -> None:
    def normal(x: Tensor) -> Tensor:
        return D.Normal(layer(x), soft(layer, x)).log_prob(x)

    same_as_eager(layer, normal, checks=2)


def test_other_distributions(layer: nn.Linear) -> None:
    def function(x: Tensor) -> Tensor:
        scale = soft(layer, x)
        total = D.Gamma(scale, scale).log_prob(x) + D.Beta(scale, scale).log_prob(x / 9)
        total = total + D.Categorical(logits=layer(x)).log_prob(torch.zeros(len(x)))[:, None]
        return total + D.kl_divergence(D.Normal(layer(x), scale), D.Normal(x, scale))

    same_as_eager(layer, function, checks=10)


def test_covariance_matrices(layer: nn.Linear) -> None:
    """The check for square matrices is computed from constants. If a matrix is not symmetric, a
    function returns early, and its caller raises the error."""

    def function(x: Tensor) -> Tensor:
        h = layer(x[0])
        matrix = torch.outer(h, h) + torch.eye(4, dtype=torch.float64)
        return D.MultivariateNormal(layer(x[0]), covariance_matrix=matrix).log_prob(x[0])

    same_as_eager(layer, function, checks=3)


def test_the_error_is_eagers(layer: nn.Linear) -> None:
    x = torch.full((3,), -1.0)
    y = torch.ones(1, 4, dtype=torch.float64)

    def run(enabled: bool) -> None:
        with ab.batch(enabled=enabled):
            layer(y)
            scale = x + torch.zeros(3)
            D.Normal(torch.zeros(3), scale.relu() - 1).log_prob(torch.ones(3))

    expected, error = error_of(lambda: run(False)), error_of(lambda: run(True))
    assert type(error) is type(expected) is ValueError
    assert str(error) == str(expected)


def test_the_error_is_eagers_of_pending_values(layer: nn.Linear) -> None:
    def run(enabled: bool) -> None:
        with torch.no_grad(), ab.batch(enabled=enabled):
            h = layer(torch.ones(2, 4, dtype=torch.float64))
            D.Normal(h, h.abs() * 0).log_prob(h)  # LINE

    expected, error = error_of(lambda: run(False)), error_of(lambda: run(True))
    assert type(error) is ValueError
    assert str(error) == str(expected)
    line = next(
        i for i, s in enumerate(Path(__file__).read_text().splitlines(), 1) if "# LINE" in s
    )
    assert f"{Path(__file__).name}:{line}" in error.__notes__[0]
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].filename.endswith("distribution.py")
    assert frames[-1].name == "__init__"


def test_user_checks_are_read_by_default(layer: nn.Linear) -> None:
    with ab.batch() as scope:
        outputs = [cases.positive(soft(layer, x)) for x in inputs()]
    assert len(outputs) == 8
    assert scope.report().checks == 0
    assert flushes(scope.report()) == 8
    with ab.batch(defer_checks=False) as scope:
        _ = [D.Normal(x, soft(layer, x)) for x in inputs()]
    assert scope.report().checks == 0


def test_torch_assert_waits(layer: nn.Linear) -> None:
    with ab.batch() as scope:
        h = layer(inputs()[0])
        torch._assert((h == h).all(), "holds")
    assert scope.report().checks == 1
    with pytest.raises(AssertionError, match="fails"), ab.batch() as scope:
        h = layer(inputs()[0])
        torch._assert((h != h).all(), "fails")
    assert scope.report().checks == 1


@pytest.mark.parametrize("op", [torch._is_all_true, torch._is_any_true])
def test_the_truth_of_each_instance(layer: nn.Linear, op: Callable[[Tensor], Tensor]) -> None:
    """functorch's rules for these ops treat all instances as one."""
    thresholds = [0.0, 1e9, 0.0, 0.05]
    with torch.no_grad(), ab.batch() as scope:
        outputs = [op(soft(layer, x) > t) for x, t in zip(inputs(4), thresholds, strict=True)]
    for x, t, output in zip(inputs(4), thresholds, outputs, strict=True):
        assert output.item() == (soft(layer, x) > t).all().item() == (t < 1)
    row = next(row for row in scope.report().signatures if "_is_a" in row.op)
    assert (row.rule, row.batches) == ("native", 1)


# --- all code: by option ---


@pytest.mark.parametrize("check", cases.CHECKS)
def test_checks_wait(layer: nn.Linear, check: Callable[[Tensor], Tensor]) -> None:
    with ab.batch(defer_checks=True) as scope:
        outputs = [check(soft(layer, x)) for x in inputs()]
    assert scope.report().checks == 8 * (2 if check in (cases.no_nan, cases.by_item) else 1)
    assert flushes(scope.report()) == 1
    for x, output in zip(inputs(), outputs, strict=True):
        assert output.shape == x.shape


@pytest.mark.parametrize("check", cases.CHECKS)
def test_failures_are_eagers(layer: nn.Linear, check: Callable[[Tensor], Tensor]) -> None:
    xs = inputs()

    def run(enabled: bool) -> None:
        with torch.no_grad(), ab.batch(enabled=enabled, defer_checks=True):
            for i, x in enumerate(xs):
                h = soft(layer, x)
                check(h * 0 + (1.0 if i < 5 else float("nan")))

    expected, error = error_of(lambda: run(False)), error_of(lambda: run(True))
    assert type(error) is type(expected)
    assert str(error) == str(expected)
    assert "deferred this check" in error.__notes__[0]
    assert not ab._C.is_pending(layer(inputs()[0]))  # no block is open


def test_the_first_in_the_program_is_raised(layer: nn.Linear) -> None:
    """The order in which the checks are computed does not matter."""
    with pytest.raises(InvalidError, match="first"), ab.batch(defer_checks=True):
        h = layer(torch.ones(1, 4, dtype=torch.float64))
        cases.positive(-(h * h).exp().tanh().exp(), "first")
        cases.positive(h * 0, "second")


def test_it_goes_before_an_error_that_comes_of_it(layer: nn.Linear) -> None:
    """Cholesky fails for the matrix whose check failed."""
    with pytest.raises(InvalidError, match="diagonal"), ab.batch(defer_checks=True):
        h = layer(torch.ones(1, 4, dtype=torch.float64))
        matrix = -torch.eye(4, dtype=torch.float64) * (h * h).sum()
        cases.positive(matrix.diagonal(), "diagonal")
        kept = torch.linalg.cholesky(matrix)
    assert kept is not None


def test_a_read_raises_it(layer: nn.Linear) -> None:
    reached = []
    with pytest.raises(InvalidError), ab.batch(defer_checks=True):
        h = layer(torch.ones(1, 4, dtype=torch.float64))
        cases.positive(-h.exp())
        h.sum().item()
        reached.append(1)
    assert reached == []


def test_an_error_of_the_program_goes_after_it(layer: nn.Linear) -> None:
    with pytest.raises(InvalidError), ab.batch(defer_checks=True):
        cases.positive(-layer(torch.ones(1, 4, dtype=torch.float64)).exp())
        raise KeyError("eager would not come here")
    with pytest.raises(KeyboardInterrupt), ab.batch(defer_checks=True):
        cases.positive(-layer(torch.ones(1, 4, dtype=torch.float64)).exp())
        raise KeyboardInterrupt


def test_it_is_not_lost_to_a_handler_that_it_was_not_under(layer: nn.Linear) -> None:
    results = []
    with pytest.raises(InvalidError), ab.batch(defer_checks=True):
        h = layer(torch.ones(1, 4, dtype=torch.float64))
        results.append(cases.read_in_try(-h.exp(), h))
    assert results == [-1.0]


def test_what_is_caught_is_read_at_once(layer: nn.Linear) -> None:
    for function in (cases.caught, cases.suppressed):
        with ab.batch(defer_checks=True) as scope:
            h = layer(torch.ones(1, 4, dtype=torch.float64))
            result = function(-h.exp())
        assert scope.report().checks == 0
        assert result.shape == (1, 4)
    done: list[int] = []
    with pytest.raises(InvalidError), ab.batch(defer_checks=True):
        h = layer(torch.ones(1, 4, dtype=torch.float64))
        try:
            cases.positive(-h.exp())
        except KeyError:
            done.append(0)
        done.append(1)
    assert done == []


def test_what_cannot_be_caught_waits(layer: nn.Linear) -> None:
    done: list[int] = []
    with ab.batch(defer_checks=True) as scope:
        for x in inputs():
            cases.all_kinds(soft(layer, x), done)
    assert scope.report().checks == 4 * 8
    assert flushes(scope.report()) == 1


def test_a_handler_around_the_block_catches_it(layer: nn.Linear) -> None:
    try:
        with ab.batch(defer_checks=True) as scope:
            cases.positive(-layer(torch.ones(1, 4, dtype=torch.float64)).exp())
    except InvalidError as error:
        caught = error
    assert "is not positive" in str(caught)
    assert scope.report().checks == 1


def test_what_a_function_in_c_asks_is_read(layer: nn.Linear) -> None:
    xs = inputs()
    for enabled in (True, False):
        with torch.no_grad(), ab.batch(enabled=enabled, defer_checks=True) as scope:
            for x in xs:
                cases.by_a_function_written_in_c(soft(layer, x))
        assert scope.report().checks == 0


def test_other_control_flow_is_read(layer: nn.Linear) -> None:
    with ab.batch(defer_checks=True) as scope:
        h = soft(layer, inputs()[0])
        assert cases.in_order(h) is h
    assert scope.report().checks == 0


def test_the_value_at_the_check_counts(layer: nn.Linear) -> None:
    with ab.batch(defer_checks=True) as scope:
        ok = cases.overwritten(soft(layer, inputs()[0]))
    assert scope.report().checks == 1
    assert not ok
    with pytest.raises(InvalidError, match="before the write"), ab.batch(defer_checks=True):
        cases.overwritten(-soft(layer, inputs()[0]))


def test_a_computed_value_that_was_written_to_waits(layer: nn.Linear) -> None:
    """The read of the first value also computes the second one."""
    with ab.batch(defer_checks=True) as scope:
        xs = [torch.rand(2, 4, dtype=torch.float64) for _ in range(3)]
        first, second, third = ((soft(layer, x) > 0).all() for x in xs)
        assert first.tolist() is True
        second.logical_and_(third.logical_not())
        cases.refused(second)
    assert scope.report().checks == 1
    assert flushes(scope.report()) == 2
    assert not second


def test_what_a_check_keeps_is_not_made_real(layer: nn.Linear) -> None:
    """At the end, only the branch that raises refers to `x`."""
    results = []
    with ab.batch(defer_checks=True) as scope:
        for x in inputs():
            results.append(cases.positive(soft(layer, x)).sum())
    assert scope.report().checks == 8
    nodes = {id(r.grad_fn) for r in results}
    assert len(nodes) <= len(results)
    torch.stack(results).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    "options", [{"verify": True}, {"max_pending": 5}, {"granularity": "op"}, {"policy": "depth"}]
)
def test_options(layer: nn.Linear, options: dict[str, Any]) -> None:
    with ab.batch(defer_checks=True, **options) as scope:
        outputs = [cases.positive(soft(layer, x)).sum() for x in inputs()]
    assert scope.report().checks == 8
    for x, output in zip(inputs(), outputs, strict=True):
        assert output.requires_grad
        assert x.dim() == 2
    with pytest.raises(InvalidError), ab.batch(defer_checks=True, **options):
        _ = [cases.positive(layer(x) * 0).sum() for x in inputs()]


def test_inference_mode(layer: nn.Linear) -> None:
    with torch.inference_mode(), ab.batch(defer_checks=True) as scope:
        _ = [cases.positive(soft(layer, x)) for x in inputs()]
    assert scope.report().checks == 8
    assert flushes(scope.report()) == 1
    with pytest.raises(InvalidError), torch.inference_mode(), ab.batch(defer_checks=True):
        cases.positive(-soft(layer, inputs()[0]))


@pytest.mark.parametrize("check_cells", [False, True])
def test_in_a_cell(layer: nn.Linear, check_cells: bool) -> None:
    """Each call is checked, because the function runs op by op."""

    @ab.cell
    def step(x: Tensor) -> Tensor:
        return cases.positive(layer(x).exp() - 2).log()

    xs = [torch.full((1, 4), v, dtype=torch.float64) for v in (0.0, 0.0, 0.0)]
    with torch.no_grad():
        layer.weight.zero_(), layer.bias.fill_(1.0)
    with ab.batch(defer_checks=True, check_cells=check_cells) as scope:
        outputs = [step(x) for x in xs]
    assert len(outputs) == scope.report().checks == 3
    with torch.no_grad():
        layer.weight.fill_(1.0)
    with pytest.raises(InvalidError), ab.batch(defer_checks=True, check_cells=check_cells):
        _ = [step(x) for x in (*xs, xs[0] - 9)]


def test_decorator(layer: nn.Linear) -> None:
    @ab.batch(defer_checks=True)
    def run(sign: float) -> list[Tensor]:
        return [cases.positive(soft(layer, x) * sign) for x in inputs()]

    assert len(run(1.0)) == 8
    with pytest.raises(InvalidError):
        run(-1.0)


def test_module_code(layer: nn.Linear) -> None:
    """Without a source file, the value is read immediately."""
    code = compile("if not (x > 0).all():\n    raise ValueError", "<made up>", "exec")
    with ab.batch(defer_checks=True) as scope:
        exec(code, {"x": soft(layer, inputs()[0])})
    assert scope.report().checks == 0


# --- in a map ---


def test_in_a_map(layer: nn.Linear) -> None:
    def function(x: Tensor) -> Tensor:
        h = soft(layer, x)
        return D.Normal(h, cases.positive(h)).log_prob(x).sum()

    xs = inputs()
    with ab.batch(defer_checks=True) as scope:
        results = ab.map(function, xs)
    assert scope.report().checks == 3 * len(xs)
    for result, x in zip(results, xs, strict=True):
        torch.testing.assert_close(result, function(x))


def fails_at(layer: nn.Linear, wrong: dict[int, float]) -> Callable[[tuple[int, Tensor]], Tensor]:
    def function(pair: tuple[int, Tensor]) -> Tensor:
        i, x = pair
        h = cases.positive(soft(layer, x) * wrong.get(i, 1.0), f"instance {i}")
        if i % 2:
            h.sum().item()
        return h.sum()

    return function


@pytest.mark.parametrize("joined", [False, True])
def test_the_first_instance_that_fails(layer: nn.Linear, joined: bool) -> None:
    pairs = list(enumerate(inputs()))
    function = fails_at(layer, {2: -1.0, 3: -1.0, 6: -1.0})
    block = ab.batch(enabled=joined, defer_checks=True)
    with pytest.raises(InvalidError, match="instance 2 is") as caught, block:
        ab.map(function, pairs, defer_checks=True)
    assert caught.value.__notes__[-1] == "in instance 2 of ab.map"
    assert len(ab.map(fails_at(layer, {}), pairs)) == len(pairs)


@pytest.mark.parametrize("joined", [False, True])
def test_each_instance_has_its_own(layer: nn.Linear, joined: bool) -> None:
    pairs = list(enumerate(inputs()))
    with ab.batch(enabled=joined, defer_checks=True):
        results = ab.map(
            fails_at(layer, {2: -1.0, 3: -1.0}), pairs, defer_checks=True, return_exceptions=True
        )
    for i, result in enumerate(results):
        if i in (2, 3):
            assert isinstance(result, InvalidError)
            assert f"instance {i} is" in str(result)
            assert result.__notes__.count(f"in instance {i} of ab.map") == 1
        else:
            assert isinstance(result, Tensor)
            assert result.item() > 0


def test_backward_in_an_instance_comes_after_its_check(layer: nn.Linear) -> None:
    def function(pair: tuple[int, Tensor]) -> None:
        i, x = pair
        h = cases.positive(soft(layer, x) * (-1.0 if i == 1 else 1.0))
        h.sum().backward()

    pairs = list(enumerate(inputs(4)))
    results = ab.map(function, pairs, defer_checks=True, return_exceptions=True)
    assert [type(r) for r in results] == [type(None), InvalidError, type(None), type(None)]
    mine = layer.weight.grad.clone()
    layer.zero_grad()
    for i, x in pairs:
        if i != 1:
            soft(layer, x).sum().backward()
    torch.testing.assert_close(mine, layer.weight.grad)


def test_an_instance_that_catches_it_late_fails(layer: nn.Linear) -> None:
    def function(x: Tensor) -> float:
        h = soft(layer, x)
        return cases.read_in_try(-h, h)

    with pytest.raises(InvalidError) as caught:
        ab.map(function, inputs(), defer_checks=True)
    assert caught.value.__notes__[-1] == "in instance 0 of ab.map"


def test_a_check_before_a_map(layer: nn.Linear) -> None:
    """The check belongs to the block, and not to an instance."""
    done = []
    with pytest.raises(InvalidError, match="before") as caught, ab.batch(defer_checks=True):
        h = layer(torch.ones(1, 4, dtype=torch.float64))
        cases.positive(-h.exp(), "before")
        done += ab.map(lambda x: layer(x).sum().item(), inputs())
    assert done == []
    assert not any("instance" in note for note in caught.value.__notes__)
