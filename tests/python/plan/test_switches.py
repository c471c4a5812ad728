"""Every pass and fast path can be turned off, alone or all together; results match eager mode."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch_autobatch as ab
from helpers_switches import names, uses, without
from torch import Tensor, nn
from torch_autobatch import _C

ROOT = Path(__file__).resolve().parents[3]
DOUBLE = torch.float64
IS_311 = sys.version_info[:2] == (3, 11)
HAS_KERNEL = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")

# Makes inputs and modules of some width, and returns the function that is run in a block.
Program = Callable[[int], Callable[[], list[Tensor]]]


def rand(*sizes: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.rand(sizes, dtype=dtype)


class Gates(nn.Module):
    """A cell with a linear layer for each gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (layer(x) for layer in self.layers)
        return torch.tanh(a.sigmoid() * b + c)


def linear(width: int) -> nn.Linear:
    return nn.Linear(width, width, dtype=DOUBLE)


def sums(width: int) -> Callable[[], list[Tensor]]:
    layer, xs = linear(width), [rand(width) for _ in range(8)]

    def run() -> list[Tensor]:
        total = torch.zeros(width, dtype=DOUBLE)
        for x in xs:
            total = total + layer(x)
        return [total]

    return run


def weights(width: int) -> Callable[[], list[Tensor]]:
    weight, xs = rand(width, width).requires_grad_(), [rand(n, width) for n in (2, 3, 4)]
    return lambda: [x @ weight.softmax(0) for x in xs]


def cats(_: int) -> Callable[[], list[Tensor]]:
    layer, gain = nn.Linear(32, 16, bias=False), nn.Linear(24, 16, bias=False)
    pieces = [[rand(16, 24, dtype=torch.float32) for _ in range(2)] for _ in range(4)]
    return lambda: [layer.weight @ torch.cat([x * gain.weight for x in pair]) for pair in pieces]


def experts(width: int) -> Callable[[], list[Tensor]]:
    layers, xs = [linear(width) for _ in range(3)], [rand(2, width) for _ in range(7)]
    return lambda: [layers[i % 3](x) for i, x in enumerate(xs)]


def crossed(width: int) -> Callable[[], list[Tensor]]:
    """The second layer reads the results of the first one in another order."""
    one, other = linear(width), linear(width)
    xs = [rand(1, width) for _ in range(6)]

    def run() -> list[Tensor]:
        first = [one(x) for x in xs]
        return [other(first[i]) for i in (3, 0, 5, 1, 4, 2)]

    return run


def large(width: int) -> Callable[[], list[Tensor]]:
    """Large products, each of which a separate batch reads."""
    layer, xs = linear(width), [rand(2000, width) for _ in range(16)]

    def run() -> list[Tensor]:
        state = torch.zeros(2000, width, dtype=DOUBLE)
        for product in [layer(x) for x in xs]:
            state = torch.tanh(state + product)
        return [state]

    return run


def cell(width: int) -> Callable[[], list[Tensor]]:
    called, xs = ab.cell(Gates(width)), [rand(1, width) for _ in range(4)]
    return lambda: [called(x) for x in xs]


def modules(width: int) -> Callable[[], list[Tensor]]:
    gates, xs = Gates(width), [rand(1, width) for _ in range(4)]
    return lambda: [gates(x) for x in xs]


def calls(width: int) -> Callable[[], list[Tensor]]:
    layer, xs = linear(width), [rand(width) for _ in range(4)]
    return lambda: [torch.sigmoid(layer(x)) for _ in range(3) for x in xs]


def numbers(width: int) -> Callable[[], list[Tensor]]:
    layer, xs = linear(width), [rand(width) for _ in range(4)]
    return lambda: [layer(x) * torch.tensor(float(i)) for i, x in enumerate(xs)]


def lengths(width: int) -> Callable[[], list[Tensor]]:
    layer, xs = linear(width), [rand(n, width) for n in range(2, 12)]
    return lambda: [layer(x).sum(0) / len(x) for x in xs]


def dropped(width: int) -> Callable[[], list[Tensor]]:
    """Most results become unreachable immediately."""
    layer, start = linear(width), rand(width)

    def run() -> list[Tensor]:
        x = start
        for _ in range(40):
            x = torch.sin(layer(x))
        return [x]

    return run


def instances(width: int) -> Callable[[], list[Tensor]]:
    layer, xs = linear(width), [rand(width) for _ in range(4)]
    return lambda: ab.map(lambda x: layer(x), xs)  # needs a Python function, because it has a frame


def conversions(width: int) -> Callable[[], list[Tensor]]:
    layer, starts = linear(width), [torch.tensor([0, n % 3]) for n in range(4)]
    called = ab.cell(lambda x, start: layer(x)[int(start.max()) :].sum(0), dynamic=True)
    return lambda: [called(rand(3 + n, width), start) for n, start in enumerate(starts)]


# For each switch: a program that uses it, and whether the switch exists on this machine.
PROGRAMS: dict[str, tuple[Program, bool]] = {
    "common_subexpressions": (weights, True),
    "fuse_sums": (sums, True),
    "fuse_cat_matmul": (cats, HAS_KERNEL),
    "varying_numbers": (lengths, True),
    "merge_by_weight": (experts, True),
    "member_order": (crossed, True),
    "chunk_batches": (large, True),
    "fuse_shared_input_linear": (cell, True),
    "elementwise_fusion": (cell, True),
    "leaf_modules": (modules, True),
    "module_attributes": (modules, IS_311),
    "direct_calls": (calls, True),
    "number_tensors": (numbers, True),
    "tensor_objects": (dropped, IS_311),
    "frame_memory": (instances, True),
    "number_conversions": (conversions, True),
}


def run(program: Program, width: int, *, enabled: bool) -> list[Tensor]:
    """Returns the results and the gradients of all parameters."""
    torch.manual_seed(0)
    parameters: list[nn.Parameter] = []
    with torch.nn.modules.module.register_module_parameter_registration_hook(
        lambda module, name, parameter: parameters.append(parameter)
    ):
        function = program(width)
    with ab.batch(enabled=enabled, adaptive=False):
        results = function()
        loss = torch.stack([result.sum() for result in results]).sum()
    loss.backward()
    return [*(result.detach() for result in results), *(p.grad for p in parameters)]


widths = itertools.count(8)  # a new width each time, because equal calls of cells share a graph


def compare(program: Program) -> None:
    """Checks that results and gradients match eager mode."""
    width = next(widths)
    expected = run(program, width, enabled=False)
    torch.testing.assert_close(run(program, width, enabled=True), expected)


def test_each_switch_has_a_program() -> None:
    assert sorted(PROGRAMS) == sorted(names())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.needs(name)) for name in PROGRAMS]
)
def test_results_are_the_same_without_it(name: str) -> None:
    program, is_here = PROGRAMS[name]
    before = uses(name)
    compare(program)
    assert (uses(name) > before) == is_here
    before = uses(name)
    with without(name):
        compare(program)
    assert uses(name) == before


@pytest.mark.parametrize("program", {p.__name__: p for p, _ in PROGRAMS.values()}.values())
def test_results_are_the_same_without_any(program: Program) -> None:
    before = [uses(name) for name in names()]
    with without(*names()):
        compare(program)
    assert [uses(name) for name in names()] == before


@pytest.mark.needs("fuse_sums", "fuse_cat_matmul", "merge_by_weight", "member_order")
def test_the_report_says_what_passes_did() -> None:
    functions = sums(8), crossed(8)
    with ab.batch(adaptive=False) as scope:
        results = [result for function in functions for result in function()]
    assert len(results) == 7
    report = scope.report()
    assert report.passes["fuse_sums"] == 1
    assert report.passes["member_order"] >= 1
    assert "chunk_batches" not in report.passes
    assert ab.Report.from_dict(report.to_dict()).passes == report.passes


def test_a_switch_is_not_changed_in_a_block() -> None:
    with ab.batch(), pytest.raises(RuntimeError, match="a block is open"):
        _C.set_switch("direct_calls", False)
    with pytest.raises(ValueError, match=r"there is no switch 'calls'; switches: .*direct_calls"):
        _C.set_switch("calls", False)


def python(code: str, disable: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "AUTOBATCH_DISABLE": disable},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("disable", "off"),
    [
        ("fuse_sums,direct_calls", {"fuse_sums", "direct_calls"}),
        ("passes", {n for n, (is_pass, *_) in _C.switches().items() if is_pass}),
        ("fast_paths", {n for n, (is_pass, *_) in _C.switches().items() if not is_pass}),
        ("all", set(_C.switches())),
    ],
)
def test_the_environment_variable(disable: str, off: set[str]) -> None:
    code = (
        "from torch_autobatch import _C\nprint(*(n for n, s in _C.switches().items() if not s[1]))"
    )
    done = python(code, disable)
    assert set(done.stdout.split()) == off, done.stderr


def test_an_unknown_name_in_the_environment() -> None:
    done = python("import torch_autobatch", "fuse_sums,fast_path")
    assert done.returncode != 0
    assert (
        "AUTOBATCH_DISABLE names 'fast_path', which is not a switch; expected one of all, passes"
        in done.stderr
    )


@pytest.mark.parametrize("disable", ["passes", "fast_paths"])
def test_random_programs_without(disable: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--programs", "60", "--cells"],
        cwd=ROOT,
        env={**os.environ, "AUTOBATCH_DISABLE": disable, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
