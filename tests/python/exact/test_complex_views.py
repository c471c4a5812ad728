"""view_as_complex, view_as_real and conj: views that read the memory of their base differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from exactly import Blocks, differentiate, rand, same, weight
from helpers_ragged import Case, check_lengths
from torch import Tensor

# Each function makes a pending real tensor [.., 2] from parameters [3, 4].
REAL: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda w: (w * 2).view(3, 2, 2),
    "row": lambda w: (w * 2)[1].view(2, 2),
    "columns": lambda w: torch.cat([w, w * 3], 1)[:, 4:].unflatten(1, (2, 2)),
    "transposed": lambda w: (w * 2).view(3, 2, 2).transpose(0, 1),
    "every second": lambda w: torch.cat([w, w * 3], 1).view(3, 4, 2)[:, ::2],
    "expanded": lambda w: (w * 2).view(3, 2, 2)[:, :1].expand(3, 4, 2),
    "parameter": lambda w: w.view(3, 2, 2),
    "row of a parameter": lambda w: w[1].view(2, 2),
    "chunk": lambda w: torch.cat([w, w * 3], 1).chunk(2, 1)[1].unflatten(1, (2, 2)),
}
# Each function makes a pending complex tensor from parameters [3, 4].
COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda w: torch.complex(w, w * 2),
    "row": lambda w: torch.complex(w, w * 2)[1],
    "columns": lambda w: torch.complex(w, w * 2)[:, 1:3],
    "transposed": lambda w: torch.complex(w, w * 2).t(),
    "scalar": lambda w: torch.complex(w, w * 2)[1, 1],
    "expanded": lambda w: torch.complex(w, w * 2)[:, :1].expand(3, 5),
}
OPS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    **{f"complex of {n}": (f, torch.view_as_complex) for n, f in REAL.items()},
    **{f"real of {n}": (f, torch.view_as_real) for n, f in COMPLEX.items()},
    **{f".imag of {n}": (f, lambda z: z.imag) for n, f in COMPLEX.items()},
    **{f"conjugate of {n}": (f, torch.conj) for n, f in COMPLEX.items()},
}


def flushes(report: ab.Report) -> int:
    return sum(f.count for f in report.flushes)


@pytest.mark.parametrize("held", ["both", "view", "none"])
@pytest.mark.parametrize("name", OPS)
def test_values_gradients_and_memory(name: str, held: str) -> None:
    make, view = OPS[name]

    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with block():
            x = make(w)
            y = view(x)
            z = (y * y).abs().sum()
        differentiate(z)
        shown = {"both": (x, y), "view": (y,), "none": ()}[held]
        return shown, [(t.stride(), t.storage_offset(), t._is_view()) for t in (x, y)], z, w

    # Elements of an expanded tensor share memory. Elements of a copy do not.
    assert flushes(same(program)) == (2 if "expanded" in name else 1)


# Eager refuses writes to the others.
WRITABLE = [n for n in OPS if not any(word in n for word in ("expanded", "chunk", "parameter"))]


@pytest.mark.parametrize("when", ["in the block", "after it"])
@pytest.mark.parametrize("to", ["base", "view", "other view", "detached"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", WRITABLE)
def test_writes_reach_all_tensors_on_the_memory(name: str, grad: bool, to: str, when: str) -> None:
    make, view = OPS[name]

    def write(x: Tensor, y: Tensor, z: Tensor) -> None:
        targets = {"base": x, "view": y, "other view": z, "detached": y.detach()}
        targets[to][..., 0:1].mul_(3) if targets[to].dim() > 0 else targets[to].mul_(3)

    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with torch.set_grad_enabled(grad):
            with block():
                x = make(w)
                y, z = view(x), view(x)
                if when == "in the block":
                    write(x, y, z)
                after = y * 2 + z
            if when == "after it":
                write(x, y, z)
            later = y * 3 + z
        if grad:
            differentiate(after, later, x, y)
        return x, y, z, after, later, w

    same(program)


def test_a_write_to_a_parameter_reaches_the_views_of_it() -> None:
    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with block():
            y = torch.view_as_complex(w.view(3, 2, 2))
            before = y * 2
            with torch.no_grad():
                w[0] = 5
            after = y * 2
        differentiate(before, after)
        return y, before, after, w

    same(program)


@pytest.mark.parametrize("read", ["view", "base", "other"])
def test_reads_in_the_block(read: str) -> None:
    """If one tensor becomes real, the other one does too, so that a write changes both."""

    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with block():
            x = (w * 2).view(3, 2, 2)
            y, other = torch.view_as_complex(x), w.exp()
            value = {"view": y, "base": x, "other": other}[read].abs().sum().item()
            with torch.no_grad():
                x[0] = 0
            later = y * value
        differentiate(later)
        return value, x, y, later, w

    same(program)


def test_two_views_of_a_base_that_is_gone() -> None:
    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with block():
            x = (w * 2).view(3, 2, 2)
            y, z = torch.view_as_complex(x), torch.view_as_complex(x)
            del x
        y.mul_(2)
        differentiate(z, y)
        return y, z, w

    same(program)


def test_view_of_a_view() -> None:
    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with block():
            x = (w * 2).view(3, 2, 2)
            y = torch.view_as_complex(x)
            z = torch.view_as_real(y)
        z[0].mul_(3)
        differentiate(x, y, z)
        return x, y, z, w

    same(program)


def test_a_write_to_a_saved_value_is_eagers_error() -> None:
    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with block():
            x = (w * 2).view(3, 2, 2)
            y = torch.view_as_complex(x)
            z = (y * y).abs().sum()
        with torch.no_grad():
            x.add_(1)
        z.backward()

    same(program, raises=RuntimeError)


def test_errors_are_eagers() -> None:
    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with block():
            return torch.view_as_complex(w * 2)

    same(program, raises=RuntimeError)


@pytest.mark.parametrize("name", OPS)
def test_gradients_in_the_block(name: str) -> None:
    make, view = OPS[name]

    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with block():
            y = view(make(w))
            (g,) = torch.autograd.grad((y * y).abs().square().sum(), w, create_graph=True)
            loss = g.square().sum()
        differentiate(loss)
        return g.contiguous(), loss, w

    same(program)


SEES_CONJUGATE: dict[str, Callable[[Tensor], Tensor]] = {
    "resolve_conj": lambda z: z.resolve_conj(),
    "conj": lambda z: z.conj(),
    "real": lambda z: z.real,
    "imag": lambda z: z.imag,
    "conj_physical": torch.conj_physical,
    "abs": torch.abs,
    "mH": lambda z: z.mH,
    "view": lambda z: z.view(-1),
    "angle": torch.angle,
    "clone": torch.clone,
    "matmul": lambda z: z @ z.mT,
    "vdot": lambda z: torch.vdot(z[0], z[1]),
    "view_as_real": torch.view_as_real,
}


@pytest.mark.parametrize("op", SEES_CONJUGATE)
def test_a_conjugate_is_one_for_all_ops(op: str) -> None:
    def program(block: Blocks) -> Any:
        w = weight(3, 4)
        with block():
            y = torch.complex(w, w * 2).conj()
            z = SEES_CONJUGATE[op](y)
            later = (y * y).abs()
        differentiate(later, z)
        return z, y.is_conj(), z.is_conj(), y, later, w

    same(program, raises=RuntimeError if op == "view_as_real" else None)


def test_product_with_the_conjugate_is_one_batch() -> None:
    def power(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.sin().unflatten(-1, (-1, 2)))
        return (z * z.conj()).real

    check_lengths(Case(power, lambda n: rand(n, 8), empty=False))


def test_inference_mode_and_hooks() -> None:
    def program(block: Blocks) -> Any:
        w, seen = weight(3, 4), []
        with torch.inference_mode(), block():
            first = torch.view_as_complex((w * 2).view(3, 2, 2))
        with block():
            y = torch.view_as_complex((w * 2).view(3, 2, 2))
            y.retain_grad()
            y.register_hook(lambda g: seen.append(g))
            z = (y * 2).abs().sum()
        differentiate(z)
        return first, y.grad, seen, w

    same(program)


TURNS = torch.polar(torch.ones(40, 4, dtype=torch.float64), torch.rand(40, 4).double())


def rotated(x: Tensor) -> Tensor:
    """Computes rotary embeddings of a sequence [n, 8], as reference implementations do."""
    turns = TURNS[: x.shape[0]]
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(1)


def test_sizes_do_not_add_batches() -> None:
    check_lengths(Case(lambda x: rotated(x.sin()), lambda n: rand(n, 8), empty=False))


def test_in_a_map_with_reads() -> None:
    w = rand(8, 8)

    def run(x: Tensor) -> Tensor:
        for _ in range(2):
            x = rotated(x @ w)
            x = x if x.sum().item() > 0 else -x
        return x

    xs = [rand(n, 8) for n in (3, 5, 2, 5)]
    expected = [run(x) for x in xs]
    with torch.no_grad():
        torch.testing.assert_close(ab.map(run, xs), expected)


def test_in_a_dynamic_cell() -> None:
    layer = torch.nn.Linear(8, 8).double()
    cell = ab.cell(lambda x: rotated(layer(x)), dynamic=True)
    xs = [rand(n, 8) for n in (3, 5, 2, 5, 7, 4)]
    with ab.batch() as scope:
        results = [cell(x) for x in xs]
    torch.testing.assert_close(results, [rotated(layer(x)) for x in xs])
    assert flushes(scope.report()) == 1
