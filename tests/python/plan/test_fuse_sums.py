"""Chains and trees of additions run as one call with eager's values, gradients and errors."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_rules import assert_same, check, rand
from torch import Tensor

pytestmark = pytest.mark.needs("fuse_sums")

Sum = Callable[[Sequence[Tensor]], Tensor]


def chain(losses: Sequence[Tensor]) -> Tensor:
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def in_place(losses: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(losses[0])
    for loss in losses:
        total += loss
    return total


def tree(losses: Sequence[Tensor]) -> Tensor:
    if len(losses) == 1:
        return losses[0]
    half = len(losses) // 2
    return tree(losses[half:]) + tree(losses[:half])


def from_the_right(losses: Sequence[Tensor]) -> Tensor:
    return functools.reduce(lambda total, loss: loss + total, losses)


SUMS: dict[str, Sum] = {
    "chain": chain,
    "python": sum,
    "from_a_number": lambda losses: sum(losses, 0.0),
    "in_place": in_place,
    "tree": tree,
    "from_the_right": from_the_right,
    "stack": lambda losses: torch.stack(list(losses)).sum(),
}


def total_of(sum_of: Sum, enabled: bool, **options: Any) -> tuple[Tensor, list[Tensor], ab.Report]:
    torch.manual_seed(0)
    w = rand(3).requires_grad_()
    xs = [rand(n % 4 + 1, 3).requires_grad_() for n in range(12)]
    with ab.batch(enabled=enabled, **options) as scope:
        total = sum_of([(x.tanh() @ w).tanh().sum() for x in xs])
    torch.autograd.backward(total)
    return total, [w.grad, *[x.grad for x in xs]], scope.report()


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"policy": "depth"}], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_instances_is_one_call(name: str, options: dict[str, Any]) -> None:
    total, grads, report = total_of(SUMS[name], True, **options)
    expected, expected_grads, _ = total_of(SUMS[name], False)
    assert_same("total", total, expected)
    for grad, other in zip(grads, expected_grads, strict=True):
        assert_same("gradient", grad, other)
    assert report.batches <= 6, report
    assert not report.at_once


def test_sums_of_each_instance_run_together() -> None:
    """The sums of the instances have different numbers of terms."""

    def terms(x: Tensor) -> Any:
        return sum((row * 2).tanh() for row in x)

    xs = [rand(n, 3) for n in (4, 9, 6, 5)]
    report = check(terms, *xs)
    assert [s.batches for s in report.signatures if s.op == "aten::add.Tensor"] == [1], report


@pytest.mark.parametrize("empty", [False, True])
def test_sums_of_different_sizes_run_together(empty: bool) -> None:
    def add(x: Tensor) -> Tensor:
        rows = x.sin()
        terms = [rows * k for k in range(1, x.size(0) % 3 + 5)]  # 4 to 6 terms
        return chain(terms).tanh()

    lengths = [3, 5, 2, 0, 7, 4] if empty else [3, 5, 2, 7, 4]
    instances = [(rand(n, 3).requires_grad_(),) for n in lengths]
    report = check(add, *instances)
    sums = [row for row in report.signatures if row.op == "aten::add.Tensor"]
    assert sum(row.launches for row in sums) == 1


def test_what_is_held_stays_as_it_is() -> None:
    def partial_sums(x: Tensor) -> list[Tensor]:
        totals = [x[0].tanh()]
        for row in x[1:]:
            totals.append(totals[-1] + row.tanh())
        return totals

    check(partial_sums, rand(6, 2), rand(5, 2))


def test_what_is_read_otherwise_stays_as_it_is() -> None:
    def used(x: Tensor) -> Tensor:
        a = x[0].tanh() + x[1].tanh() + x[2].tanh()
        b = a + x[3].tanh() + x[4].tanh() + x[0].tanh() + x[1].tanh()
        return a * b + a.view(1, 2).sum()

    check(used, rand(6, 2), rand(5, 2))


def test_a_term_may_stand_twice() -> None:
    check(lambda x: x.tanh() + x + x + x.tanh() + x, rand(3), rand(3))


def test_other_shapes_types_and_factors_are_no_terms() -> None:
    def mixed(x: Tensor) -> Tensor:
        total = x[0].tanh() + x[1].tanh() + x[2].tanh() + x[3].tanh()
        total = torch.add(total, x[0], alpha=2) + x[1] + 1.5
        total = total + x.sum() + x[1].float() + x[2] + x[3] + x[0]
        return total + torch.arange(2) + x[1] + x[2] + x[3]

    check(mixed, rand(4, 2), rand(4, 2))


def test_integers_are_exact() -> None:
    w = rand(1).requires_grad_()
    xs = [2**60 + i for i in range(5)]
    with ab.batch():
        total = sum((w * 0).long() + x for x in xs)
    assert isinstance(total, Tensor)
    assert total.item() == sum(xs)


def test_grad_modes_do_not_mix() -> None:
    def partly(x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = x[0].tanh() + x[1].tanh() + x[2].tanh() + x[0]
        return fixed + x[0].tanh() + x[1].tanh() + x[2].tanh()

    check(partly, rand(3, 2), rand(3, 2))


def test_detached_sums_pass_no_gradient() -> None:
    def partly(x: Tensor) -> Tensor:
        a = x[0].tanh() + x[1].tanh() + x[2].tanh() + x[0]
        return a.detach() + x[0].tanh() + x[1].tanh() + x[2].tanh()

    check(partly, rand(3, 2), rand(3, 2))


def test_reading_the_running_total() -> None:
    torch.manual_seed(0)
    w = rand(3).requires_grad_()
    xs = [rand(2, 3) for _ in range(8)]
    values = {}
    for enabled in (True, False):
        w.grad = None
        seen = []
        with ab.batch(enabled=enabled):
            total = w.new_zeros(())
            for i, x in enumerate(xs):
                total = total + (x @ w).tanh().sum()
                if i % 3 == 2:
                    seen.append(total.item())
        torch.autograd.backward(total)
        values[enabled] = (torch.tensor(seen), total.detach(), w.grad)
    for value, expected in zip(values[True], values[False], strict=True):
        assert_same("value", value, expected)


def test_create_graph_and_a_second_backward() -> None:
    torch.manual_seed(0)
    w = rand(3).requires_grad_()
    xs = [rand(2, 3) for _ in range(6)]
    second = {}
    for enabled in (True, False):
        with ab.batch(enabled=enabled):
            total = chain([(x @ w).tanh().square().sum() for x in xs])
        (grad,) = torch.autograd.grad(total, w, create_graph=True)
        second[enabled] = torch.autograd.grad(grad.square().sum(), w)[0]
    assert_same("second derivative", second[True], second[False])
    with ab.batch():
        leaves = [rand().requires_grad_() for _ in range(6)]
        total = functools.reduce(operator.add, leaves)
    torch.autograd.backward(total)
    torch.autograd.backward(total)  # as in eager, there is no error, because no tensor is saved
    assert all(leaf.grad == 2 for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_as_near_to_the_exact_sum_as_eager(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    xs = [torch.rand(()) for _ in range(500)]
    exact = sum(x.to(dtype).double() for x in xs)
    with ab.batch():
        total = sum(x.to(dtype).requires_grad_() for x in xs)
    eager = sum(x.to(dtype) for x in xs)
    assert isinstance(total, Tensor)
    assert total.dtype == dtype
    assert (
        abs(total.double() - exact) <= abs(eager.double() - exact) + torch.finfo(dtype).eps * exact
    )


def test_an_error_names_the_line() -> None:
    w = rand(3).requires_grad_()
    with pytest.raises(RuntimeError, match="must match"), ab.batch():
        chain([w.tanh(), w.tanh(), w.tanh(), rand(4), w])


@pytest.mark.parametrize("instances", [1, 3])
def test_a_sum_that_fails_when_it_is_read(instances: int) -> None:
    """The end of the block finds a sum that was fused for a failed read."""
    w = rand(3, 1).requires_grad_()
    good: list[Tensor] = []
    with ab.batch():
        for _ in range(instances):
            a = w * 2
            bad = torch.nn.functional.embedding(torch.tensor([7, 0, 1]), w)
            total = a + a * 2 + a * 3 + bad
            with pytest.raises(IndexError, match="index out of range"):
                total.sum().item()
            good.append((a + a * 2 + a * 3 + a * 4).sum())
    for loss in good:
        assert_same("sum", loss, (w * 20).sum())
    torch.stack(good).sum().backward()
    assert_same("gradient", w.grad, torch.full_like(w, 20 * instances))


# --- sums of rows of one matrix ---


class Bags(torch.nn.Module):
    """Sums the rows at the indices of a bag, which are looked up separately."""

    def __init__(self, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(7, 3, dtype=dtype, **options)

    def forward(self, bag: Sequence[Tensor]) -> Tensor:
        return chain([self.embedding(index) for index in bag])


def bags_of(*lengths: int, shape: Sequence[int] = (1,)) -> list[list[Tensor]]:
    torch.manual_seed(1)
    return [[torch.randint(7, tuple(shape)) for _ in range(n)] for n in lengths]


def same_as_eager(results: Callable[[bool], Sequence[Tensor | None]]) -> None:
    """Runs a program with and without capture, and compares the results."""
    for k, (value, expected) in enumerate(zip(results(True), results(False), strict=True)):
        assert_same(f"value {k}", value, expected)


def train(model: Bags, bags: Sequence[Sequence[Tensor]], enabled: bool) -> tuple[Any, ab.Report]:
    model.zero_grad()
    with ab.batch(enabled=enabled) as scope:
        sums = [model(bag) for bag in bags]
    torch.autograd.backward([(s.double() ** 2).sum() for s in sums])
    return [*sums, model.embedding.weight.grad], scope.report()


def check_bags(model: Bags, bags: Sequence[Sequence[Tensor]]) -> ab.Report:
    values, report = train(model, bags, True)
    for value, expected in zip(values, train(model, bags, False)[0], strict=True):
        assert_same("sum or gradient", value, expected)
    return report


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 2), (0,)], ids=str)
@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"padding_idx": -1}], ids=str)
def test_sums_of_lookups_are_one_call(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    """Sums of lookups are fused for any number of terms, including two."""
    report = check_bags(Bags(**options), bags_of(2, 5, 40, 17, 2, shape=shape))
    assert [(s.op, s.batches) for s in report.signatures] == [("aten::embedding", 1)], report


def test_sums_of_rounded_lookups() -> None:
    """The sums have few terms, because eager rounds after each addition."""
    check_bags(Bags(dtype=torch.bfloat16), bags_of(2, 5, 8))


def test_frequencies_are_of_one_lookup() -> None:
    bags = bags_of(5, 4, shape=(3,))
    check_bags(Bags(scale_grad_by_freq=True), bags)


def test_what_else_reads_a_lookup() -> None:
    model = Bags()

    def read_twice(bag: Sequence[Tensor]) -> Tensor:
        rows = [model.embedding(index) for index in bag]
        return chain(rows) * rows[0]

    held: list[Tensor] = []

    def hold(bag: Sequence[Tensor]) -> Tensor:
        rows = [model.embedding(index) for index in bag]
        held.append(rows[1])
        return chain(rows)

    def hold_total(bag: Sequence[Tensor]) -> Tensor:
        rows = [model.embedding(index) for index in bag]
        held.append(chain(rows[:3]))
        return held[-1] + chain(rows[3:])

    def results(enabled: bool, use: Callable[[Sequence[Tensor]], Tensor]) -> list[Tensor | None]:
        model.zero_grad()
        held.clear()
        with ab.batch(enabled=enabled):
            sums = [use(bag) for bag in bags_of(5, 6, 9)]
        torch.autograd.backward([(s**2).sum() for s in (*sums, *held)])
        return [*sums, *held, model.embedding.weight.grad]

    for use in (read_twice, hold, hold_total):
        same_as_eager(functools.partial(results, use=use))


def test_matrices_and_grad_modes_do_not_mix_in_lookups() -> None:
    one, other = Bags(), Bags()
    other.embedding.weight.requires_grad_(False)

    def mixed(bag: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            fixed = one(bag)
            rest = [one.embedding(index) for index in bag]
        return chain([fixed, one(bag), other(bag), *rest, one.embedding(bag[0])])

    def results(enabled: bool) -> list[Tensor | None]:
        one.zero_grad()
        with ab.batch(enabled=enabled):
            sums = [mixed(bag) for bag in bags_of(5, 6, 9)]
        torch.autograd.backward([(s**2).sum() for s in sums])
        return [*sums, one.embedding.weight.grad]

    same_as_eager(results)


def test_an_index_out_of_range_in_a_sum() -> None:
    """Eager's error is raised. The sums of other instances are computed."""
    model = Bags()
    bags = bags_of(4, 5, 6)
    bags[1][2] = torch.tensor([7])
    sums: list[Tensor] = []
    with (
        pytest.raises(IndexError, match="index out of range in self") as error,
        ab.batch(),
    ):
        sums.extend(model(bag) for bag in bags)
    assert "aten::embedding" in str(error.value)
    assert __file__ in str(error.value)
    for k in (0, 2):
        assert_same("sum", sums[k], model(bags[k]))
    with pytest.raises(RuntimeError):
        sums[1].sum()


def test_indices_of_a_sum_that_are_written_to() -> None:
    """Eager saves all indices, so a write to any of them is an error."""
    model = Bags()
    for k in (0, 37):
        bags = bags_of(4, 40)
        with ab.batch():
            sums = [model(bag) for bag in bags]
        bags[1][k].fill_(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            sums[1].sum().backward()
        sums[0].sum().backward()


def test_a_matrix_that_is_written_to_after_its_sums() -> None:
    """Backward does not read the matrix, so the write is allowed."""
    model = Bags()
    with ab.batch():
        sums = [model(bag) for bag in bags_of(4, 5)]
    with torch.no_grad():
        model.embedding.weight.zero_()
    torch.autograd.backward([s.sum() for s in sums])
    grad = model.embedding.weight.grad
    assert grad is not None
    assert grad.sum() == 27


def test_sums_of_lookups_differentiated_twice() -> None:
    model = Bags()
    bags = bags_of(4, 6)
    weight = model.embedding.weight
    second = {}
    for enabled in (True, False):
        with ab.batch(enabled=enabled):
            total = chain([(model(bag) ** 3).sum() for bag in bags])
        (grad,) = torch.autograd.grad(total, weight, create_graph=True)
        second[enabled] = torch.autograd.grad(grad.square().sum(), weight)[0]
    assert_same("second derivative", second[True], second[False])
    with ab.batch():
        sums = [model(bag) for bag in bags]
    sums[0].sum().backward(retain_graph=True)
    sums[0].sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        sums[0].sum().backward()


def test_lookups_of_a_sum_that_is_read_on_the_way() -> None:
    model = Bags()

    def results(enabled: bool) -> list[Tensor | None]:
        model.zero_grad()
        seen = []
        with ab.batch(enabled=enabled):
            totals = []
            for bag in bags_of(9, 12):
                total = model(bag[:4])
                seen.append(total.sum().item())
                totals.append(total + model(bag[4:]))
        torch.autograd.backward([(t**2).sum() for t in totals])
        return [torch.tensor(seen), *totals, model.embedding.weight.grad]

    same_as_eager(results)


def test_results_in_another_order_of_memory() -> None:
    x = torch.randn(2, 3, 5, requires_grad=True)

    def total(x: Tensor) -> Tensor:
        return sum(x.swapaxes(0, -1).unbind(0))  # strides (1, 2)

    with ab.batch():
        found = total(x)
    expected = total(x)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.cos().sum(), x), torch.autograd.grad(expected.cos().sum(), x)
    )
