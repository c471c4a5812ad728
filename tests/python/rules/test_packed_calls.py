"""PackedSequence of pending values: no flush, and sizes add no batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_rules import DOUBLE, rand
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)

WIDTH = 4
NETWORKS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm": lambda: nn.LSTM(WIDTH, 3),
    "lstm both ways, two layers": lambda: nn.LSTM(WIDTH, 3, 2, bidirectional=True),
    "lstm with projection": lambda: nn.LSTM(WIDTH, 3, proj_size=2),
    "lstm without bias": lambda: nn.LSTM(WIDTH, 3, bias=False),
    "gru": lambda: nn.GRU(WIDTH, 3, bidirectional=True),
    "tanh": lambda: nn.RNN(WIDTH, 3),
    "relu": lambda: nn.RNN(WIDTH, 3, nonlinearity="relu"),
}
# The lengths of the sequences of each example.
EXAMPLES = {"one": [[3], [5], [1]], "several": [[2, 5, 3], [4, 4], [1, 6]]}


def padded(sequences: list[Tensor], batch_first: bool, **options: Any) -> Any:
    lengths = [len(s) for s in sequences]
    x = pad_sequence(sequences, batch_first=batch_first)
    return pack_padded_sequence(x, lengths, batch_first, enforce_sorted=False, **options)


def tensors_in(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in tensors_in(v)]


def compare(run: Callable[[list[Tensor]], Any], lengths: list[list[int]], params: Any) -> ab.Report:
    """Runs the examples in a block first, and compares results and gradients with eager mode."""
    data = [[rand(n, WIDTH) for n in example] for example in lengths]
    weights = list(params)
    with ab.batch(adaptive=False) as scope:
        ours = [tensors_in(run(example)) for example in data]
    eager = [tensors_in(run(example)) for example in data]
    torch.testing.assert_close(ours, eager)
    for mine, theirs in zip(ours, eager, strict=True):
        assert [t.stride() for t in mine] == [t.stride() for t in theirs]

    def gradients(results: list[list[Tensor]]) -> tuple[Tensor, ...]:
        total = sum(t.sin().sum() for r in results for t in r if t.requires_grad)
        return torch.autograd.grad(total, weights, allow_unused=True)

    torch.testing.assert_close(gradients(ours), gradients(eager))
    return scope.report()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["", "states given"])
@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("network", NETWORKS)
def test_as_eager(network: str, examples: str, given: bool, batch_first: bool) -> None:
    rnn, before = NETWORKS[network]().double(), nn.Linear(WIDTH, WIDTH).double()

    def run(sequences: list[Tensor]) -> Any:
        packed = padded([before(s) for s in sequences], batch_first)
        states = None
        if given:
            width = rnn.proj_size or rnn.hidden_size
            count = rnn.num_layers * (2 if rnn.bidirectional else 1)
            states = torch.full((count, len(sequences), width), 0.3, dtype=DOUBLE)
            if rnn.mode == "LSTM":
                cell = torch.full((count, len(sequences), rnn.hidden_size), 0.2, dtype=DOUBLE)
                states = (states, cell)
        out, last = rnn(packed, states)
        rows, lengths = pad_packed_sequence(out, batch_first)
        return rows, lengths, packed.data, packed.batch_sizes, last

    report = compare(run, EXAMPLES[examples], [*rnn.parameters(), *before.parameters()])
    assert [f.reason for f in report.flushes] == ["the end of the block"]


def test_dropout_between_layers_draws_as_eager() -> None:
    rnn = nn.LSTM(WIDTH, 3, 2, dropout=0.5).double()
    weight = rand(WIDTH).requires_grad_()

    def run(n: int) -> Tensor:
        return rnn(pack_padded_sequence(weight * torch.ones(n, 1, WIDTH), [n]))[0].data

    torch.manual_seed(0)
    with ab.batch(adaptive=False) as scope:
        ours = [run(n) for n in (3, 5)]
    torch.manual_seed(0)
    torch.testing.assert_close(ours, [run(n) for n in (3, 5)])
    assert sum(f.count for f in scope.report().flushes) == 1


def test_pack_sequence() -> None:
    rnn, before = nn.GRU(WIDTH, 3).double(), nn.Linear(WIDTH, WIDTH).double()

    def run(sequences: list[Tensor]) -> Any:
        packed = pack_sequence([before(s) for s in sequences], enforce_sorted=False)
        return rnn(packed)[1]

    report = compare(run, EXAMPLES["several"], [*rnn.parameters(), *before.parameters()])
    assert sum(f.count for f in report.flushes) == 1


def test_sizes_do_not_add_batches() -> None:
    rnn = nn.LSTM(8, 8, bidirectional=True).double()

    def encode(x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x.sin()[None], [x.shape[0]], batch_first=True)
        return pad_packed_sequence(rnn(packed)[0], batch_first=True)[0]

    def launches(lengths: list[int]) -> int:
        with ab.batch(adaptive=False) as scope:
            results = [encode(rand(n, 8)) for n in lengths]
        assert len(results) == len(lengths)
        return scope.report().launches

    assert launches([3, 5, 4, 7]) == launches([5, 5, 5, 5])


@pytest.mark.parametrize("lengths", [[2, 3], [3, 0], [3]])
def test_errors_are_eagers(lengths: list[int]) -> None:
    x = rand(4, 2, WIDTH).requires_grad_()

    def pack(x: Tensor) -> Tensor:
        return pack_padded_sequence(x.sin(), lengths).data

    with pytest.raises(RuntimeError) as eager:
        pack(x)
    with pytest.raises(RuntimeError) as ours, ab.batch():
        pack(x)
    assert str(eager.value).split("\n", maxsplit=1)[0][:40] in str(ours.value)


def test_in_a_map() -> None:
    rnn = nn.LSTM(WIDTH, 3).double()

    def run(x: Tensor) -> Tensor:
        for _ in range(2):
            packed = pack_padded_sequence(x[:, None].sin(), [x.shape[0]])
            x = torch.cat([rnn(packed)[0].data, x[:, :1]], 1)
            x = x if x.sum().item() > 0 else -x
        return x

    xs = [rand(n, WIDTH) for n in (3, 5, 2)]
    with torch.no_grad():
        torch.testing.assert_close(ab.map(run, xs), [run(x) for x in xs])
