"""nn.LSTM, nn.GRU and nn.RNN called per instance run as one call with eager's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from helpers_backward import Block, grads_of, same
from helpers_rules import BOTH, DOUBLE, assert_same, check, raises_as_eager, rand, rules_of
from torch import Tensor, nn

LENGTHS = {
    "mixed": (3, 1, 5, 2, 5, 1),
    "equal": (4, 4, 4),
    "ones": (1, 1, 1, 1),
    "one": (3,),
}
OPS = {"LSTM": "aten::lstm.input", "GRU": "aten::gru.input", "RNN": "aten::rnn_tanh.input"}
IN, HIDDEN = 3, 4


def op_of(layer: nn.RNNBase) -> str:
    relu = getattr(layer, "nonlinearity", "") == "relu"
    return "aten::rnn_relu.input" if relu else OPS[type(layer).__name__]


def as_function(layer: nn.RNNBase) -> tuple[Callable[..., Any], list[Tensor]]:
    """Returns the layer as ``f(*weights, *inputs)``, and the weights."""
    names, weights = zip(*layer.named_parameters(), strict=True)

    def call(*values: Any) -> Any:
        given = dict(zip(names, values, strict=False))
        x, *states = values[len(names) :]
        hx = tuple(states) if len(states) == 2 else states[0] if states else None
        return torch.func.functional_call(layer, given, (x, hx) if states else (x,))

    return call, [w.detach() for w in weights]


def check_layer(layer: nn.RNNBase, instances: Sequence[Any]) -> ab.Report:
    """Checks the results against eager mode, for one native batch and one flush."""
    function, weights = as_function(layer)
    report = check(function, *instances, parameters=weights)
    rows = [s for s in report.signatures if s.op == op_of(layer)]
    assert [(s.rule, s.batches) for s in rows] == [("native", 1)], report
    assert not report.at_once, report
    assert sum(f.count for f in report.flushes) == 1, report
    return report


LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "bidirectional": {"bidirectional": True},
    "deep": {"num_layers": 3},
    "deep_bidirectional": {"num_layers": 2, "bidirectional": True, "bias": False},
    "batch_first": {"batch_first": True, "bidirectional": True},
}


@BOTH
@pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_unbatched(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    layer = LAYERS[kind](IN, HIDDEN, dtype=dtype, **options)
    for lengths in LENGTHS.values():
        check_layer(layer, [rand(n, IN, dtype=dtype) for n in lengths])


@BOTH
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_projection(layers: int, bidirectional: bool, dtype: torch.dtype) -> None:
    layer = nn.LSTM(IN, HIDDEN, layers, bidirectional=bidirectional, proj_size=2, dtype=dtype)
    for lengths in LENGTHS.values():
        check_layer(layer, [rand(n, IN, dtype=dtype) for n in lengths])
    runs = layers * (1 + bidirectional)
    xs = [(rand(n, IN), rand(runs, 2), rand(runs, HIDDEN)) for n in (2, 4, 1)]
    check_layer(layer.double(), xs)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_batched_with_states(kind: str, batch_first: bool) -> None:
    """Instances have one sequence or several, and the states are given."""
    layer = LAYERS[kind](
        IN, HIDDEN, 2, batch_first=batch_first, bidirectional=True, dtype=torch.float64
    )
    for widths in ((1, 1, 1, 1), (2, 1, 3, 2)):
        instances = []
        for length, width in zip((3, 1, 5, 3), widths, strict=True):
            x = rand(width, length, IN) if batch_first else rand(length, width, IN)
            states = [rand(4, width, HIDDEN) for _ in range(2 if kind == "lstm" else 1)]
            instances.append((x, *states))
        check_layer(layer, instances)
        check_layer(layer, [x[:1] for x in instances])


@pytest.mark.parametrize("batch_first", [False, True])
def test_strides_are_eagers(batch_first: bool) -> None:
    layer = nn.LSTM(IN, HIDDEN, 2, batch_first=batch_first, bidirectional=True)
    x = torch.randn(2, 5, IN)
    y, (h, c) = layer(x)
    with ab.batch():
        y2, (h2, c2) = layer(x)
        assert (y2.stride(), h2.stride(), c2.stride()) == (y.stride(), h.stride(), c.stride())
        assert y2.is_contiguous() == y.is_contiguous()
    assert (y2.stride(), h2.stride(), c2.stride()) == (y.stride(), h.stride(), c.stride())
    assert_same("output", y2, y)


@pytest.mark.parametrize("kind", LAYERS)
def test_input_computed_and_read_on(kind: str) -> None:
    """Tests views and ops around the layer, as in a tagger. One of several results is used."""
    layer = LAYERS[kind](IN, HIDDEN, bidirectional=True, dtype=DOUBLE)
    table = rand(7, IN)
    function, weights = as_function(layer)

    def call(*values: Tensor) -> Any:
        *given, embed, words = values
        x = nn.functional.embedding(words, embed).tanh()
        y, state = function(*given, x.unsqueeze(1))
        last = state[0] if kind == "lstm" else state
        return y.squeeze(1).relu().sum(0), torch.cat([last[0], last[1]], -1).sigmoid(), y[-1]

    words = [torch.randint(7, (n,)) for n in (4, 1, 6, 2)]
    report = check(call, *words, parameters=[*weights, table])
    rows = [s for s in report.signatures if s.op == op_of(layer)]
    assert [(s.rule, s.batches) for s in rows] == [("native", 1)], report


def test_same_layer_twice_is_two_batches() -> None:
    """The output of one call is the input of the next."""
    layer = nn.GRU(IN, IN, dtype=DOUBLE)
    function, weights = as_function(layer)

    def twice(*values: Tensor) -> Any:
        y, state = function(*values)
        return function(*values[: len(weights)], y, state)

    report = check(twice, *[rand(n, IN) for n in (3, 1, 4)], parameters=weights)
    assert sum(s.batches for s in report.signatures if s.op == "aten::gru.input") == 2


def test_states_passed_on_and_shared() -> None:
    """All instances share a learned initial state, or a state that does not require grad."""
    layer = nn.LSTM(IN, HIDDEN, dtype=DOUBLE)
    function, weights = as_function(layer)

    def call(*values: Tensor) -> Any:
        *given, start, x = values
        return function(*given, x, start.expand(1, HIDDEN), start.detach().expand(1, HIDDEN))

    report = check(call, *[rand(n, IN) for n in (3, 1, 4)], parameters=[*weights, rand(HIDDEN)])
    assert rules_of(report)["aten::lstm.input"] == "native"


FROZEN = ["none", "weight_ih_l0", "weight_hh_l0", "bias_ih_l1", "weight_hr_l1", "l0", "l1", "all"]


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("of_input", [False, True])
def test_parts_that_require_no_grad(frozen: str, of_input: bool) -> None:
    def scenario(block: Block) -> Any:
        layer = nn.LSTM(IN, HIDDEN, 2, bidirectional=True, proj_size=2, dtype=DOUBLE)
        for name, p in layer.named_parameters():
            p.requires_grad_(not (frozen == "all" or frozen in name))
        xs = [rand(n, IN).requires_grad_(of_input) for n in (3, 1, 4)]
        with block():
            results = [layer(x) for x in xs]
        total = torch.stack(
            [y.square().sum() + (h * c.sum(-1, True)).sum() for y, (h, c) in results]
        ).sum()
        flat = [t for y, (h, c) in results for t in (y, h, c)]
        assert all(t.requires_grad == flat[0].requires_grad for t in flat)
        if total.requires_grad:
            total.backward()
        return [flat[0].requires_grad, flat, grads_of(layer), [x.grad for x in xs]]

    same(scenario)


def test_only_projections_require_grad() -> None:
    """The cell state after one step does not depend on a projection, as in eager mode."""

    def scenario(block: Block) -> Any:
        layer = nn.LSTM(IN, HIDDEN, proj_size=2, dtype=DOUBLE)
        for name, p in layer.named_parameters():
            p.requires_grad_("hr" in name)
        with block():
            results = [layer(rand(n, IN)) for n in (1, 2)]
        return [t.requires_grad for y, (h, c) in results for t in (y, h, c)]

    assert not all(same(scenario))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    layer = nn.GRU(IN, HIDDEN, 2, bidirectional=True, dtype=DOUBLE)
    xs = [rand(n, IN) for n in (3, 1, 4)]
    with mode():
        expected = [layer(x) for x in xs]
        with ab.batch() as scope:
            results = [layer(x) for x in xs]
    for (y, h), (y2, h2) in zip(results, expected, strict=True):
        assert_same("output", y, y2)
        assert_same("state", h, h2)
        assert not y.requires_grad
    assert rules_of(scope.report())["aten::gru.input"] == "native"


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_left_out_instances_contribute_nothing(kind: str, bad: float) -> None:
    """The gradient depends only on the instances in the loss."""
    projection = {"proj_size": 2} if kind == "lstm" else {}

    def scenario(block: Block) -> Any:
        torch.manual_seed(3)
        layer = LAYERS[kind](IN, HIDDEN, 2, bidirectional=True, dtype=DOUBLE, **projection)
        xs = [rand(n, 2, IN) for n in (3, 5, 1, 4, 2)]
        xs[1][2, 0, 1] = bad
        xs[4][0, 1, 0] = bad
        for x in xs:
            x.requires_grad_()
        with block():
            results = [layer(x)[0] for x in xs]
        torch.stack([results[i].square().sum() for i in (2, 0, 3)]).sum().backward()
        grads = [*grads_of(layer), *[x.grad for x in xs]]
        for g in grads:
            assert g is None or g.isfinite().all()
        return grads

    same(scenario)


def test_backward_of_each_instance() -> None:
    def scenario(block: Block) -> Any:
        layer = nn.LSTM(IN, HIDDEN, 2, dtype=DOUBLE)
        with block():
            results = [layer(rand(n, IN)) for n in (3, 1, 4)]
        found = []
        for y, (_, c) in results:
            (y.sum() + c[0].square().sum()).backward(retain_graph=True)
            found += [g.clone() for g in grads_of(layer) if g is not None]
        for y, _ in reversed(results):
            y.square().sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            results[0][0].sum().backward()
        return [*found, grads_of(layer)]

    same(scenario)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_create_graph(kind: str, batch_first: bool) -> None:
    def scenario(block: Block) -> Any:
        layer = LAYERS[kind](IN, HIDDEN, 2, batch_first=batch_first, dtype=DOUBLE)
        xs = [rand(2, n, IN).requires_grad_() for n in (3, 1, 4)]
        with block():
            losses = [layer(x)[0].square().sum() for x in xs]
        grads = torch.autograd.grad(sum(losses), xs, create_graph=True)
        torch.stack([g.square().sum() for g in grads]).sum().backward()
        return [grads, grads_of(layer), [x.grad for x in xs]]

    same(scenario)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("batch_first", [False, True])
def test_create_graph_through_dropout(kind: str, batch_first: bool) -> None:
    """The drawn masks are reused, so first gradients equal those of an ordinary backward."""
    layer = LAYERS[kind](
        IN, HIDDEN, 3, dropout=0.5, bidirectional=True, batch_first=batch_first, dtype=DOUBLE
    )
    xs = [rand(2, n, IN).requires_grad_() for n in (3, 1, 4)]
    with ab.batch():
        losses = [layer(x)[0].square().sum() for x in xs]
    plain = torch.autograd.grad(sum(losses), xs, retain_graph=True)
    again = torch.autograd.grad(sum(losses), xs, create_graph=True)
    for g, expected in zip(again, plain, strict=True):
        assert_same("gradient", g.detach(), expected)
    torch.stack([g.square().sum() for g in again]).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in xs)


# --- dropout ---


def dropped_rows(p: float, training: bool) -> tuple[Tensor, Tensor]:
    """Returns an input before and after dropout, by two relu layers that are identities."""
    layer = nn.RNN(8, 8, 2, bias=False, nonlinearity="relu", dropout=p, dtype=DOUBLE)
    layer.train(training)
    with torch.no_grad():
        for name, w in layer.named_parameters():
            w.copy_(torch.eye(8) if "ih" in name else torch.zeros(8, 8))
    xs = [rand(n, 8).abs() + 0.5 for n in (40, 1, 100, 300)]
    for x in xs:
        x.requires_grad_()
    with ab.batch() as scope:
        results = [layer(x)[0] for x in xs]
    torch.cat(results).sum().backward()
    report = scope.report()
    rows = [s for s in report.signatures if s.op == "aten::rnn_relu.input"]
    assert [(s.rule, s.batches) for s in rows] == [("native", 1)], report
    grads = torch.cat([x.grad for x in xs if x.grad is not None])
    scale = torch.cat(results) / torch.cat(xs)
    assert_same("gradient", grads, scale)  # gradient of the same mask
    return scale.detach(), torch.cat(xs)


def test_dropout_between_layers() -> None:
    scale, _ = dropped_rows(0.25, True)
    kept = scale > 0
    assert_same("scale", scale[kept], torch.full_like(scale[kept], 1 / 0.75))
    assert abs(kept.double().mean().item() - 0.75) < 0.03
    # Draws are independent, for rows and for columns.
    assert kept.double().mean(0).std() < 0.1
    assert kept.double().mean(1).std() > 0.1


def test_dropout_extremes_and_eval() -> None:
    assert (dropped_rows(0.25, False)[0] == 1).all()
    assert (dropped_rows(1.0, True)[0] == 0).all()
    layer = nn.LSTM(IN, HIDDEN, 2, dropout=0.5, bidirectional=True, dtype=DOUBLE).eval()
    check_layer(layer, [rand(n, IN) for n in LENGTHS["mixed"]])


# --- cases that are left to eager ---


def test_errors_are_eagers() -> None:
    layer = nn.LSTM(IN, HIDDEN, dtype=DOUBLE)
    state = rand(1, HIDDEN)

    def ragged(bad: Tensor, *states: Tensor) -> Callable[[], Any]:
        hx = states or None
        return lambda: [layer(rand(2, IN)), layer(bad, hx)]

    assert "larger than 0" in raises_as_eager(ragged(rand(0, IN)))
    raises_as_eager(ragged(rand(2, IN + 1)))
    raises_as_eager(ragged(rand(2, IN, dtype=torch.float32)))
    raises_as_eager(ragged(rand(2, IN), state, rand(1, HIDDEN + 1)))
    raises_as_eager(ragged(rand(2, IN), rand(2, HIDDEN), state))
    weights = [rand(4 * HIDDEN, IN), rand(4 * HIDDEN, HIDDEN)]
    flags = (1, 0.0, False, False, False)
    x, h = rand(2, 1, IN), rand(1, 1, HIDDEN)
    raises_as_eager(lambda: torch._VF.lstm(x, (h, h), weights, True, *flags))
    raises_as_eager(lambda: torch._VF.lstm(x, (h,), weights, False, *flags))
    raises_as_eager(lambda: torch._VF.lstm(x, (h, h), [weights[1], weights[1]], False, *flags))


def test_no_sequences() -> None:
    """Tests instances without sequences."""
    layer = nn.GRU(IN, HIDDEN, dtype=DOUBLE)
    function, weights = as_function(layer)
    check(function, rand(2, 0, IN), rand(3, 1, IN), rand(2, 0, IN), parameters=weights)


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("kind", LAYERS)
def test_autocast_gives_eagers_dtypes(kind: str, onednn: bool) -> None:
    """Without AVX-512, oneDNN has no LSTM in bfloat16, and eager's error is raised."""
    layer = LAYERS[kind](IN, HIDDEN, 2)
    xs = [torch.randn(n, 1, IN) for n in (3, 1, 4)]

    def run() -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return [layer(x)[0] for x in xs]

    with torch.backends.mkldnn.flags(enabled=onednn):
        try:
            expected = run()
        except RuntimeError:
            assert onednn
            raises_as_eager(run)
            return
        with ab.batch():
            results = run()
    for y, y2 in zip(results, expected, strict=True):
        assert y.dtype == y2.dtype
        torch.testing.assert_close(y, y2, rtol=2e-2, atol=2e-2)


def test_half_precision() -> None:
    layer = nn.LSTM(IN, HIDDEN, dtype=torch.bfloat16)
    function, weights = as_function(layer)
    xs = [rand(n, IN, dtype=torch.bfloat16) for n in (3, 1)]
    with torch.no_grad():
        expected = [function(*weights, x)[0] for x in xs]
        with ab.batch():
            results = [function(*weights, x)[0] for x in xs]
    for y, y2 in zip(results, expected, strict=True):
        assert y.dtype == y2.dtype
        torch.testing.assert_close(y, y2, rtol=2e-2, atol=2e-2)


def test_weights_computed_in_the_block() -> None:
    layer = nn.GRU(IN, HIDDEN, dtype=DOUBLE)
    function, weights = as_function(layer)

    def call(*values: Tensor) -> Any:
        return function(*[w * 2 for w in values[:-1]], values[-1])

    check(call, *[rand(n, IN) for n in (3, 1, 4)], parameters=weights)


def test_layers_apart() -> None:
    """Two layers of the same sizes share no batch. Neither do two configurations of one layer."""
    layers = [nn.LSTM(IN, HIDDEN, dtype=DOUBLE) for _ in range(2)]
    flags = [(1, 0.0, True, False, first) for first in (False, True)]
    xs = [rand(2, 2, IN) for _ in range(4)]
    state = rand(1, 2, HIDDEN)

    def call() -> list[Tensor]:
        out = [layers[i % 2](x)[0] for i, x in enumerate(xs)]
        for i, x in enumerate(xs):
            weights: list[Tensor] = list(layers[0].parameters())
            out.append(torch._VF.lstm(x, (state, state), weights, True, *flags[i % 2])[0])
        return out

    expected = call()
    with ab.batch() as scope:
        results = call()
    for y, y2 in zip(results, expected, strict=True):
        assert_same("output", y, y2)
    rows = [s for s in scope.report().signatures if s.op == "aten::lstm.input"]
    assert [s.batches for s in rows] == [1, 1, 1], scope.report()


@pytest.mark.parametrize("lengths", [(1, 4), (4, 1), (2, 3)])
@pytest.mark.parametrize("weight", ["weight_hh_l0", "weight_ih_l1", "weight_hh_l5_reverse"])
def test_write_after_the_block_is_eagers_error(weight: str, lengths: Sequence[int]) -> None:
    """Tests weights that backward reads, including those of only the first steps or last layers."""

    def scenario(block: Block) -> Any:
        layer = nn.GRU(IN, HIDDEN, 6, bidirectional=True, dtype=DOUBLE)
        xs = [rand(n, IN) for n in lengths]
        with block():
            total = torch.stack([layer(x)[0].sum() for x in xs]).sum()
        with torch.no_grad():
            getattr(layer, weight).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()
        return []

    same(scenario)


def test_biases_may_be_written_to_after_the_block() -> None:
    def scenario(block: Block) -> Any:
        layer = nn.LSTM(IN, HIDDEN, 2, dtype=DOUBLE)
        with block():
            total = torch.stack([layer(rand(n, IN))[0].sum() for n in (3, 1)]).sum()
        with torch.no_grad():
            layer.bias_hh_l0.mul_(2)
            layer.bias_ih_l1.mul_(2)
        total.backward()
        return grads_of(layer)

    same(scenario)


def test_verify() -> None:
    layer = nn.LSTM(IN, HIDDEN, 2, bidirectional=True)
    xs = [torch.randn(n, IN) for n in (3, 1, 4)]
    with ab.batch(verify=True):
        results = [layer(x)[0] for x in xs]
    for x, y in zip(xs, results, strict=True):
        assert_same("output", y, layer(x)[0])
