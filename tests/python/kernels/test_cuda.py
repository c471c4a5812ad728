"""On a CUDA device: eager's values and gradients, no synchronisation, and few launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch_autobatch as ab
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


class TreeRNN(nn.Module):
    """Sums and shares scattered states, in both directions."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, hidden)
        self.node = nn.Linear(2 * hidden, 2 * hidden)

    def encode(self, tree: object) -> Tensor:
        if not isinstance(tree, tuple):
            word: Tensor = self.embedding(self.words[tree])  # type: ignore[index]
            return word
        left, right = map(self.encode, tree)
        a, b = self.node(torch.cat([left, right], 1)).chunk(2, 1)
        return torch.tanh(a) * torch.sigmoid(b) + left

    def forward(self, tree: object) -> Tensor:
        return self.encode(tree).pow(2).sum()

    def use(self, device: torch.device) -> TreeRNN:
        self.words = [torch.tensor([word], device=device) for word in range(9)]
        return self.to(device)


TREES = [1, (2, 3), ((4, 5), 6), (((1, 2), (3, 4)), (5, (6, 7))), (8, (1, (2, (3, 4)))), (2, 3)]


def run(model: TreeRNN, batched: bool) -> list[Tensor]:
    model.zero_grad()
    with ab.batch(enabled=batched):
        losses = [model(tree) for tree in TREES]
    torch.stack(losses).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [torch.stack(losses).detach(), *gradients]


def check(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.device == b.device
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.fixture
def model() -> TreeRNN:
    return TreeRNN().use(torch.device("cuda", 0))


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    model = TreeRNN().to(dtype).use(torch.device("cuda", 0))
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2
    check(run(model, True), run(model, False), tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cells_by_eagers_kernels(kind: type[nn.Module], bias: bool, dtype: torch.dtype) -> None:
    cell = kind(3, 5, bias=bias).to("cuda", dtype)  # type: ignore[call-arg]
    xs = [
        torch.randn(steps, rows, 3, device="cuda", dtype=dtype, requires_grad=True)
        for steps, rows in ((1, 2), (4, 1), (2, 2), (4, 3))
    ]

    def program() -> list[Tensor]:
        out = []
        for x in xs:
            state = None
            for step in x.unbind():
                state = cell(step, state)
            assert state is not None
            out += [state] if isinstance(state, Tensor) else [*state]
        return out

    def gradients(values: list[Tensor]) -> list[Tensor]:
        loss = torch.stack([(value * value.detach().cos()).sum() for value in values]).sum()
        return list(torch.autograd.grad(loss, [*xs, *cell.parameters()]))

    expected = program()
    with ab.batch() as scope:
        found = program()
    rows = [row for row in scope.report().signatures if "_cell" in row.op]
    assert {row.rule for row in rows} == {"native"}
    assert sum(row.batches for row in rows) == 4
    tolerance = 1e-5 if dtype in (torch.float32, torch.float64) else 2e-2
    check(found, expected, tolerance)
    check(gradients(found), gradients(expected), tolerance)


def test_an_lstm_cells_results_are_one_nodes() -> None:
    """On CUDA one eager kernel computes h' and c', so no gradient flows between h' and c'."""
    cell = nn.LSTMCell(3, 5).cuda()
    xs = [torch.randn(1, 3, device="cuda") for _ in range(3)]
    with ab.batch():
        states = [cell(x) for x in xs]
    h, c = zip(*states, strict=True)
    assert torch.autograd.grad(torch.cat(h).sum(), c, allow_unused=True) == (None, None, None)


def test_no_synchronisation(model: TreeRNN) -> None:
    run(model, True)  # the first calls may run ops on trial
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(model, True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_fewer_launches_than_eager(model: TreeRNN) -> None:
    def launches(batched: bool) -> int:
        run(model, batched)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run(model, batched)
        return sum(1 for e in profiler.events() if "LaunchKernel" in e.name)

    assert launches(True) < launches(False) / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_elementwise_ops_of_a_cell_are_one_launch(dtype: torch.dtype) -> None:
    """Tests forward and backward."""
    linear = nn.Linear(8, 32).cuda().to(dtype)

    @ab.cell
    def cell(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, o, u = linear(x + h).chunk(4, 1)
        c = i.sigmoid() * u.tanh() + f.sigmoid() * c
        return o.sigmoid() * c.tanh(), c

    xs = torch.randn(12, 1, 8, device="cuda", dtype=dtype).requires_grad_()

    def program(batched: bool) -> list[Tensor]:
        with ab.batch(enabled=batched):
            losses = []
            for steps in ((0, 1, 2), (3, 4), (5, 6, 7), (8, 9), (10, 11)):
                h, c = torch.zeros(2, 1, 8, device="cuda", dtype=dtype)
                for step in steps:
                    h, c = cell(xs[step], h, c)
                losses.append((h * c).sum())
        return [torch.stack(losses), *torch.autograd.grad(sum(losses), [xs])]

    program(True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        found = program(True)
    names = [e.name for e in profiler.events()]
    passes = [name for name in names if "autobatch" in name and "elementwise_kernel" in name]
    assert len(passes) == 9, names  # forward and backward in two of three steps
    tolerance = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    check(found, program(False), tolerance)


def test_deterministic(model: TreeRNN, deterministic: None) -> None:
    first = run(model, True)
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(run(model, True), first, strict=True))
    check(first, run(model, False))


def test_another_stream(model: TreeRNN) -> None:
    expected = run(model, False)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = run(model, True)
    torch.cuda.current_stream().wait_stream(stream)
    check(found, expected)


def test_streams_within_a_block(model: TreeRNN) -> None:
    """Captured ops are launched before the stream changes, and before an event is recorded."""
    expected = [model(tree).detach() for tree in TREES]
    stream = torch.cuda.Stream()
    for _ in range(20):
        with ab.batch():
            found = [model(tree) for tree in TREES]
            stream.wait_stream(torch.cuda.current_stream())  # this records an event
            with torch.cuda.stream(stream):
                doubled = [loss * 2 for loss in found]
            torch.cuda.current_stream().wait_stream(stream)
            halved = [loss / 2 for loss in doubled]
        check([loss.detach() for loss in found], expected)
        check([loss.detach() for loss in halved], expected)


def test_memory_is_not_reused_too_early(model: TreeRNN) -> None:
    """Tables in pinned memory and buffers are freed while the device still reads them."""
    expected = run(model, False)
    found = [run(model, True) for _ in range(50)]
    for one in found:
        check(one, expected)


def test_pinned_inputs(model: TreeRNN) -> None:
    xs = [torch.randn(n, 32).pin_memory() for n in (1, 3, 2)]

    def program() -> Tensor:
        ys = [model.node(x.to("cuda", non_blocking=True)).sum() for x in xs]
        return torch.stack(ys)

    expected = program()
    with ab.batch():
        found = program()
    check([found.detach()], [expected.detach()])


def test_autocast(model: TreeRNN) -> None:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        check(run(model, True), run(model, False), 5e-2)


def test_two_devices_in_one_block() -> None:
    other = torch.device("cuda", 1) if torch.cuda.device_count() > 1 else torch.device("cpu")
    models = [TreeRNN().use(torch.device("cuda", 0)), TreeRNN().use(other)]

    def program() -> list[Tensor]:
        return [m(tree) for tree in TREES for m in models]

    def finish(losses: list[Tensor]) -> list[Tensor]:
        torch.stack([loss.cpu() for loss in losses]).sum().backward()
        grads = [p.grad.clone() for m in models for p in m.parameters()]  # type: ignore[union-attr]
        for m in models:
            m.zero_grad()
        return [*(loss.detach() for loss in losses), *grads]

    expected = finish(program())
    with ab.batch():
        losses = program()
    check(finish(losses), expected)


def capture_graph(program: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            program()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = program()
    return graph, out


def test_a_block_in_a_cuda_graph(model: TreeRNN) -> None:
    """The graph contains the batched calls, and no table whose memory may be reused."""

    def program() -> Tensor:
        with torch.no_grad(), ab.batch():
            losses = [model(tree) for tree in TREES]
        return torch.stack(losses)

    graph, out = capture_graph(program)
    for p in model.parameters():
        p.data.mul_(0.5)
    for _ in range(3):
        run(model, True)  # reuses free pinned memory
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        expected = torch.stack([model(tree) for tree in TREES])
    check([out], [expected])
