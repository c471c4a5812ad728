"""Indexed reads and writes stay pending if the values of masks and indices are known."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable

import pytest
import torch
import torch_autobatch as ab
from helpers_capture import DOUBLE, rand
from torch import Tensor, nn

Function = Callable[[Tensor], Tensor]


def mask_of(h: Tensor) -> Tensor:
    return torch.arange(len(h)) % 2 == 0


def filled(h: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    """Returns zeros of the size of `h`, after `write`."""
    out = torch.zeros_like(h)
    write(out)
    return out


def set_item(h: Tensor, index: object, value: object) -> Tensor:
    return filled(h, lambda c: c.__setitem__(index, value))


def ones_and_zeros(h: Tensor) -> Tensor:
    """A mask that is filled in the block."""
    mask = torch.zeros(len(h), dtype=torch.bool)
    mask[1:] = True
    mask[-1] = False
    return mask


def lower(h: Tensor) -> Tensor:
    return torch.ones(len(h), 4).tril() > 0


READS: dict[str, Function] = {
    "mask": lambda h: h[mask_of(h)],
    "mask, slice": lambda h: h[mask_of(h), 1:3],
    "slice, mask": lambda h: h[:, torch.tensor([True, False, True, True])],
    "mask of two dimensions": lambda h: h[lower(h)],
    "mask of the block": lambda h: h[ones_and_zeros(h)],
    "mask of a factory": lambda h: h[torch.ones(len(h), dtype=torch.bool)],
    "no element": lambda h: h[torch.zeros(len(h), dtype=torch.bool)],
    "mask and index": lambda h: h[mask_of(h), torch.zeros(int(mask_of(h).sum()), dtype=torch.long)],
    "index": lambda h: h[torch.arange(len(h) - 1)],
    "negative": lambda h: h[torch.tensor([-1, -2, 0])],
    "pair": lambda h: h[torch.tensor([0, 2]), torch.tensor([3, -1])],
    "lists": lambda h: h[[1], range(1)],
    "list": lambda h: h[[0, -1]],
    "None": lambda h: h[None, torch.tensor([0, 1]), :, None],
    "apart": lambda h: h.view(1, -1, 4)[torch.tensor([0, 0]), :, torch.tensor([1, 2])],
    "masked_select": lambda h: h.masked_select(lower(h)),
    "masked_select of one row": lambda h: h.masked_select(torch.tensor([True, False, True, True])),
    "nonzero": lambda h: h[torch.nonzero(mask_of(h)).squeeze(1)],
    "where": lambda h: h[torch.where(ones_and_zeros(h))],
    "count": lambda h: h / ones_and_zeros(h).sum().item(),
    "bincount": lambda h: h * torch.bincount(torch.zeros(len(h), dtype=torch.long), minlength=4),
    "one_hot": lambda h: h * torch.nn.functional.one_hot(torch.zeros(1, dtype=torch.long), 4),
    "unique": lambda h: h[torch.ones(3, dtype=torch.long).unique()],
}

WRITES: dict[str, Function] = {
    "mask": lambda h: set_item(h, mask_of(h), h[mask_of(h)] * 2),
    "mask, slice": lambda h: set_item(h, (mask_of(h), slice(None)), h[mask_of(h), :]),
    "mask, part": lambda h: set_item(h, (mask_of(h), slice(1, 3)), h[mask_of(h), :2]),
    "mask of two dimensions": lambda h: set_item(h, lower(h), h[lower(h)]),
    "mask, number": lambda h: h * set_item(h, mask_of(h), 3.0),
    "mask of the block": lambda h: set_item(h, ones_and_zeros(h), h[ones_and_zeros(h)]),
    "no element": lambda h: h + set_item(h, torch.zeros(len(h), dtype=torch.bool), h[:0]),
    "index": lambda h: set_item(h, torch.arange(0, len(h), 2), h[::2]),
    "negative": lambda h: set_item(h, torch.tensor([-1, 0]), h[:2]),
    "pair": lambda h: set_item(h, (torch.tensor([0, 2]), torch.tensor([3, -1])), h[0, :2]),
    "list": lambda h: set_item(h, [0, 2], h[1:3]),
    "None": lambda h: set_item(h, (None, [0, 2]), h[1:3]),
    "in place": lambda h: h.clone().index_put_((mask_of(h),), h[mask_of(h)] * 2),
    "accumulate": lambda h: h.clone().index_put_(
        (torch.tensor([0, 0, 1]),), h[:3], accumulate=True
    ),
    "accumulate by mask": lambda h: h.index_put((mask_of(h),), h[mask_of(h)], accumulate=True),
    "a row of it": lambda h: filled(h, lambda c: c[0].__setitem__([1, 3], h[1, :2])),
    "twice": lambda h: filled(
        h, lambda c: (c.__setitem__(mask_of(h), 1.0), c.__setitem__(~mask_of(h), h[~mask_of(h)]))
    ),
}


def check(function: Function, at_once: int = 0) -> ab.Report:
    """Asserts that there is one flush, with the values and gradients of eager mode."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 4).double()
    instances = [rand(3 + i % 5, 3) for i in range(12)]
    outcomes = []
    for enabled in (False, True):
        linear.zero_grad()
        with ab.batch(enabled=enabled) as scope:
            results = [function(linear(x)) for x in instances]
        sum(((r * r).sum() for r in results), torch.zeros((), dtype=DOUBLE)).backward()
        outcomes.append([*results, *(p.grad for p in linear.parameters())])
    torch.testing.assert_close(*outcomes, rtol=1e-9, atol=1e-9)
    report = scope.report()
    assert len(report.flushes) == 1
    assert sum(row.count for row in report.at_once) == at_once
    return report


@pytest.mark.parametrize("name", READS)
def test_reads_by_known_indices(name: str) -> None:
    check(READS[name])


@pytest.mark.parametrize("name", WRITES)
def test_writes_by_known_indices(name: str) -> None:
    check(WRITES[name])


def test_a_mask_of_what_is_pending_needs_values() -> None:
    """The mask's values need a flush. The result still matches eager mode."""
    torch.manual_seed(0)
    linear = nn.Linear(3, 4).double()
    x = rand(5, 3)
    with ab.batch() as scope:
        h = linear(x)
        positive = h[h > 0]
    assert [entry.op for entry in scope.report().at_once] == ["aten::index.Tensor"]
    h = linear(x)
    torch.testing.assert_close(positive, h[h > 0])


def test_uint8_masks_warn_as_eager() -> None:
    linear = nn.Linear(3, 4).double()
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8)
    seen = []
    for enabled in (False, True):
        with ab.batch(enabled=enabled), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            h = linear(torch.ones(3, 3, dtype=DOUBLE))
            assert h[mask].shape == (2, 4)
        seen.append({str(w.message).split(" (Triggered")[0] for w in caught})
    assert seen[0] == seen[1]
    assert len(seen[0]) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda h: h[torch.tensor([0, 3])],
        lambda h: h[torch.tensor([0]), torch.tensor([-5])],
        lambda h: h[torch.tensor([True, False])],
        lambda h: h[torch.ones(4, dtype=torch.bool)],
        lambda h: h.__setitem__(torch.tensor([-4]), torch.zeros(4, dtype=DOUBLE)),
        lambda h: h.__setitem__(torch.tensor([True]), 0.0),
        lambda h: h.index_put_(
            (torch.tensor([0]), torch.tensor([4])), torch.zeros((), dtype=DOUBLE)
        ),
    ],
)
def test_an_index_out_of_range_is_eagers_error_at_its_line(use: Function) -> None:
    linear = nn.Linear(3, 4).double()
    messages = []
    for enabled in (False, True):
        with ab.batch(enabled=enabled):
            h = linear(torch.ones(3, 3, dtype=DOUBLE)) * 1
            with pytest.raises(IndexError) as error:
                use(h)
            after = h * 2
        messages.append(str(error.value).split(" (while running")[0].splitlines()[0])
        assert error.traceback[-1].lineno + 1 == inspect.getsourcelines(use)[1]
        torch.testing.assert_close(after, 2 * linear(torch.ones(3, 3, dtype=DOUBLE)))
    assert messages[0] == messages[1]


def test_an_outside_tensor_takes_values_by_a_mask() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 4).double()
    chart = torch.zeros(3, 4, dtype=DOUBLE)
    with ab.batch() as scope:
        h = linear(torch.ones(3, 3, dtype=DOUBLE))
        chart[torch.tensor([True, False, True])] = h[:2]
    assert len(scope.report().flushes) == 1
    expected = torch.zeros(3, 4, dtype=DOUBLE)
    expected[torch.tensor([True, False, True])] = linear(torch.ones(3, 3, dtype=DOUBLE))[:2]
    torch.testing.assert_close(chart, expected)


def test_a_mask_that_changes_is_read_when_it_is_used() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(3, 4).double()
    x = rand(4, 3)
    results: list[list[Tensor]] = []
    for enabled in (False, True):
        own: list[Tensor] = []
        outside = torch.zeros(4, dtype=torch.bool)
        with ab.batch(enabled=enabled) as scope:
            h = linear(x)
            inside = torch.zeros(4, dtype=torch.bool)
            for i in range(4):
                outside[i] = True
                inside[3 - i] = True
                own += [h[outside], h[inside], inside.clone()]
        results.append(own)
    assert len(scope.report().flushes) == 1
    torch.testing.assert_close(*results)
