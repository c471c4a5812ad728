"""Memory that is written to after a captured op has read it: when backward recomputes the op, the
operand has the value that the op read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_capture import DOUBLE, Batch, assert_as_eager, rand, weight
from torch import Tensor


def set_alias(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.detach())


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda c: c,
    "view": lambda c: c[:],
    "detach": lambda c: c.detach(),
    "data": lambda c: c.data,
    "data of detach": lambda c: c.detach().data,
    "data of data": lambda c: c.data.data,
    "view of data": lambda c: c.data[:],
    "as_strided": lambda c: c.data.as_strided(c.shape, c.stride()),
    "set_": set_alias,
    "numpy": lambda c: torch.from_numpy(c.detach().numpy()),
}


def chart(alias: Callable[[Tensor], Tensor], w: Tensor, kept: list[Tensor] | None = None) -> Tensor:
    """Fills a chart from its earlier entries, as parsers do."""
    c = torch.full((2,), -1e5, dtype=DOUBLE)
    for _ in range(3):
        before = alias(c)
        if kept is not None:
            kept.append(before)
        c[:] = torch.stack([before, w * 1.0], -1).logsumexp(-1)
    return c


@pytest.mark.parametrize("held", [False, True], ids=["dropped", "held"])
@pytest.mark.parametrize("how", ["batch", "map", "verify"])
@pytest.mark.parametrize("name", ALIASES)
def test_create_graph_after_a_write_to_what_was_read(name: str, how: str, held: bool) -> None:
    w = torch.tensor([1.0, 2.0], dtype=DOUBLE, requires_grad=True)
    kept: list[Tensor] | None = [] if held else None

    def first(_: int = 0) -> Tensor:
        total = chart(ALIASES[name], w, kept).sum()
        return torch.autograd.grad(total, w, create_graph=True)[0]

    def second(g: Tensor) -> Tensor:
        return torch.autograd.grad(g.pow(2).sum(), w)[0]

    expected = first()
    if how == "map":
        (g,) = ab.map(first, [0])
    else:
        with ab.batch(verify=how == "verify"):
            g = first()
    torch.testing.assert_close(g, expected)
    torch.testing.assert_close(second(g), second(expected))


@pytest.mark.parametrize("inside", [True, False], ids=["in the block", "after it"])
@pytest.mark.parametrize("name", ["data", "data of detach", "view of data"])
def test_a_write_that_moves_no_version_counter(name: str, inside: bool) -> None:
    """Backward reads the new content of saved tensors, and the old content of derived values."""

    def program(batch: Batch) -> list[Tensor]:
        w, c = weight(3), rand(3)
        alias = ALIASES[name](c)
        with batch():
            saved = (w * alias).exp()  # eager saves the alias, and the result
            derived = (alias + w).sigmoid()  # eager saves the result only
            reduced = torch.stack([alias, w * 1]).logsumexp(0)
            log = saved.sum().item() + derived.sum().item() + reduced.sum().item()
            if inside:
                c.mul_(3)
        if not inside:
            c.mul_(3)
        out = [torch.tensor(log)]
        for y in (saved, derived, reduced):
            (g,) = torch.autograd.grad(y.sum(), w, create_graph=True)
            out += [g, *torch.autograd.grad(g.sum(), w, allow_unused=True)]
        return [t for t in out if t is not None]

    assert_as_eager(program)


@pytest.mark.parametrize("how", ["batch", "map"])
@pytest.mark.parametrize("inside", [True, False], ids=["in the block", "after it"])
def test_a_saved_result_that_numpy_writes_to(inside: bool, how: str) -> None:
    """Eager's gradient of tanh reads the result, whose memory the array shares."""
    w = weight(3)
    held = []

    def program(_: int = 0) -> Tensor:
        y = (w * 2).tanh()
        held.append(y)
        total = (y * 3).sum()
        y.detach().numpy()[:] = 0
        return torch.autograd.grad(total, w)[0] if inside else total

    if how == "map":
        result = ab.map(program, [0, 1])[1]
    else:
        with ab.batch(adaptive=False):
            result = program()
    if not inside:
        (result,) = torch.autograd.grad(result, w)
    torch.testing.assert_close(result, torch.full((3,), 6.0, dtype=DOUBLE))


@pytest.mark.parametrize("create_graph", [False, True])
def test_writes_to_a_real_tensor_after_reads(create_graph: bool) -> None:
    """Tests `as_strided` of a real tensor, and a buffer that is refilled step by step."""

    def program(batch: Batch) -> list[Tensor]:
        w, buffer = weight(4), rand(4)
        with batch():
            total = torch.zeros((), dtype=DOUBLE)
            for step in range(3):
                total = total + (buffer + w).softmax(0)[0]  # softmax saves only its result
                buffer.copy_(rand(4) * step)
            log = total.item()
        (g,) = torch.autograd.grad(total, w, create_graph=create_graph)
        return [torch.tensor(log), g]

    assert_as_eager(program)


def test_what_eager_saved_itself_and_was_written_to_is_an_error() -> None:
    w, buffer = weight(4), rand(4)
    with ab.batch():
        total = (buffer * w).sum()
        total.item()
        buffer.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(total, w, create_graph=True)


def test_verify_finds_memory_that_changed_without_a_trace() -> None:
    w, c = weight(3), rand(3)
    with ab.batch(verify=True):
        y = (c + w).sigmoid().sum()
    c.untyped_storage().fill_(0)
    message = r"verify: aten::add\.Tensor captured at .*test_overwrites.*set_\(\)"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(y, w, create_graph=True)


def test_verify_knows_views_of_written_memory() -> None:
    w = weight(3)
    with ab.batch(verify=True):
        c = torch.zeros(3, dtype=DOUBLE)
        c.copy_(w * 2)
        y = c[1:] + 1
    torch.testing.assert_close(y, w[1:] * 2 + 1)


# --- views that need no value ---


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "diagonal": lambda x: x.as_strided((4,), (5,)),
    "stripe": lambda x: x.as_strided((3, 2), (5, 1), 1),
    "transposed": lambda x: x.as_strided((4, 4), (1, 4)),
    "no elements of its own": lambda x: x.as_strided((3, 2), (2, 2)),
    "repeated": lambda x: x.as_strided((3, 4), (0, 1)),
    "of a view": lambda x: x[1:].as_strided((2, 2), (4, 1), 4),
    "outside of a view": lambda x: x[1:].as_strided((2, 2), (4, 1), 0),
    "of a column": lambda x: x[:, 1].as_strided((2,), (4,), 1),
    "empty": lambda x: x.as_strided((0, 2), (2, 1)),
    "a number": lambda x: x.as_strided((), (), 7),
}
DEFERRED = {"diagonal", "stripe", "transposed", "of a view", "a number"}


@pytest.mark.parametrize("name", STRIDED)
def test_as_strided(name: str) -> None:
    flushes = []

    def program(batch: Batch) -> list[Tensor]:
        w = weight(4, 4)
        with batch() as scope:
            views = [STRIDED[name]((w * k).tanh()) for k in range(1, 4)]
            results = [v.exp() for v in views]
        flushes.append(len(scope.report().flushes))
        grads = torch.autograd.grad(torch.stack(results).sum(), w, create_graph=True)
        return [*views, *results, *grads]

    assert_as_eager(program)
    assert (flushes[1] == 1) == (name in DEFERRED)


def test_as_strided_out_of_bounds_is_eagers_error() -> None:
    w = weight(4, 4)
    with ab.batch(), pytest.raises(RuntimeError, match="out of bounds"):
        (w * 2).as_strided((5, 5), (4, 1))


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_chart_that_is_written_through_as_strided(create_graph: bool) -> None:
    """The parsers of supar fill charts in this way."""
    flushes = []

    def program(batch: Batch) -> list[Tensor]:
        w = weight(4, 4)
        with batch() as scope:
            x = w * 1.0
            c = torch.zeros(4, 4, dtype=DOUBLE)
            c.diagonal().copy_(x.diagonal())
            for k in range(1, 4):
                v = c.as_strided((4 - k,), (5,), k - 1).clone()
                c.diagonal(k).copy_(v + x.diagonal(k))
            total = c[0, 3]
        flushes.append(len(scope.report().flushes))
        return [c, *torch.autograd.grad(total, w, create_graph=create_graph)]

    assert_as_eager(program)
    assert flushes[1] == 1


# --- .data, is_leaf and requires_grad_ need no value ---


def test_data_is_captured() -> None:
    flushes = []

    def program(batch: Batch) -> list[object]:
        w = weight(3)
        with batch() as scope:
            h = w.tanh()
            d = h.data
            y = (h + d).exp() + h.data[1:].sum()
            facts = [d.requires_grad, h.is_leaf, y.is_leaf]
        flushes.append(len(scope.report().flushes))
        grads = torch.autograd.grad(y.sum(), w)
        facts += [d._version, h._version, d.grad_fn is None, d._is_view()]
        with torch.no_grad():
            d.add_(1)
        facts += [d._version, h._version]
        return [h, d, y, *grads, *facts]

    assert_as_eager(program)
    assert flushes[1] == 1


def test_views_of_data_share_its_version_counter() -> None:
    def program(batch: Batch) -> list[object]:
        w = weight(4)
        with batch():
            h = w.tanh()
            d, other = h.data, h.data
            part = d[1:]
        part.zero_()
        return [h, d, part, d._version, part._version, other._version, h._version]

    assert_as_eager(program)


@pytest.mark.parametrize("write", ["d.zero_()", "d[0] = 5", "h.detach_()", "d.add_(w.detach())"])
def test_writes_through_data(write: str) -> None:
    def program(batch: Batch) -> list[Tensor]:
        w = weight(3)
        with batch():
            h = w * 2
            d = h.data
            exec(write, {}, {"d": d, "h": h, "w": w})
            y = (h + d) * w
        grads = [] if not y.requires_grad else torch.autograd.grad(y.sum(), w)
        return [h, d, y, *grads]

    assert_as_eager(program)


HIDDEN_WRITES: dict[str, str] = {
    "a result that its op saved": "h = (x @ w).tanh(); y = h * 2; d = h.data",
    "an operand that was saved": "h = x @ w; y = h * h; d = h.data",
    "both": "h = (x @ w).exp(); y = h * h; d = h.data",
    "what no formula reads": "h = x @ w; y = h + h.sum(); d = h.data",
    "of a tensor that is dropped": "h = (x @ w).exp(); y = h * h; d = h.detach().data; del h",
    "of a view": "h = (x @ w).exp(); y = h[1:] * h[:-1]; d = h[1].data",
    "through a view of data": "h = (x @ w).tanh(); y = h * h; d = h.data[1:]",
    "a constant of the block": "h = torch.ones(3, 4, dtype=x.dtype); y = (x @ w) * h; d = h.data",
    "after it was computed": "h = (x @ w).tanh(); y = h * h; h.sum().item(); d = h.data",
    "a constant that was read and dropped": "h = torch.ones(3, 4, dtype=x.dtype); y = (x @ w) * h; "
    "h.tolist(); d = h.data; del h",
    "a result that was read and dropped": "h = (x @ w).tanh(); y = h * h; h.tolist(); d = h.data; "
    "del h",
    "of a softmax": "h = (x @ w).softmax(-1); y = h.log(); d = h.data",
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", HIDDEN_WRITES)
def test_gradients_after_writes_through_data(name: str, count: int, create_graph: bool) -> None:
    """No version counter changes, so eager's formulas read the written values."""

    def program(batch: Batch) -> list[Tensor]:
        torch.manual_seed(0)
        w = torch.randn(4, 4, dtype=torch.float64).requires_grad_()
        results, held = [], []
        with batch():
            for _ in range(count):
                names = {"torch": torch, "x": torch.randn(3, 4, dtype=torch.float64), "w": w}
                exec(HIDDEN_WRITES[name], names)
                results.append(names["y"])
                held.append(names.pop("d"))
            for d in held:
                d.add_(0.25)
        del held, names, d
        total = torch.stack([y.square().sum() for y in results]).sum()
        (g,) = torch.autograd.grad(total, w, create_graph=create_graph)
        second = torch.autograd.grad(g.square().sum(), w) if create_graph else ()
        return [total, g, *second]

    assert_as_eager(program)


def test_detach_of_detach_is_captured() -> None:
    flushes = []

    def program(batch: Batch) -> list[object]:
        w = weight(3)
        with batch() as scope:
            h = w.tanh()
            once = h.detach()
            twice = once.detach()
            y = h * twice + once[1:].detach().sum()
        flushes.append(len(scope.report().flushes))
        with torch.no_grad():
            twice.add_(1)
        facts = [twice._version, once._version, h._version, twice._is_view(), once._is_view()]
        return [h, once, twice, y, *facts]

    assert_as_eager(program)
    assert flushes[1] == 1


def test_requires_grad_and_is_leaf_of_results() -> None:
    flushes = []

    def program(batch: Batch) -> list[object]:
        w, results = weight(3), []
        with batch() as scope:
            for k in range(3):
                h = (w * k).requires_grad_()
                results.append(h if not h.is_leaf else h * 0)
                with pytest.raises(RuntimeError, match="leaf"):
                    h.requires_grad_(False)
        flushes.append(len(scope.report().flushes))
        return [*results, *torch.autograd.grad(torch.stack(results).sum(), w)]

    assert_as_eager(program)
    assert flushes[1] == 1


def test_a_detached_result_that_becomes_a_leaf() -> None:
    def program(batch: Batch) -> list[object]:
        w = weight(3)
        with batch():
            h = (w * 2).detach()
            facts = [h.is_leaf]
            h.requires_grad_()
            facts += [h.is_leaf, h.requires_grad]
            y = (h * h).sum()
            (g,) = torch.autograd.grad(y, h)
        return [h, y, g, *facts]

    assert_as_eager(program)


@pytest.mark.parametrize("read", [Tensor.tolist, lambda h: h.numpy().copy(), lambda h: h.sum()])
def test_a_constant_that_was_read_and_then_written(read: Callable[[Tensor], Any]) -> None:
    """The op that used the constant before the read has saved the same memory."""

    def program(batch: Batch) -> list[Tensor]:
        w = torch.randn(4, 4, dtype=torch.float64).requires_grad_()
        results, constants = [], []
        with batch():
            for _ in range(3):
                h = torch.ones(3, 4, dtype=torch.float64)
                results.append((torch.randn(3, 4, dtype=torch.float64) @ w) * h)
                read(h)
                constants.append(h)
            for h in constants:
                h.data.add_(0.25)
        total = torch.stack([y.square().sum() for y in results]).sum()
        return [total, *torch.autograd.grad(total, w)]

    assert_as_eager(program)
