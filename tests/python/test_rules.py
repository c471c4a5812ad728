"""Every op rule against eager: values, shapes, and the gradients of inputs and parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
DOUBLE = torch.float64


def rand(*sizes: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(sizes, dtype=dtype)


def tensors_of(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in tensors_of(v)]


def assert_same(what: str, value: Tensor | None, expected: Tensor | None) -> None:
    assert (value is None) == (expected is None), f"{what}: {value}, eager has {expected}"
    if value is None or expected is None:
        return
    assert value.dtype == expected.dtype, f"{what}: {value.dtype}, eager has {expected.dtype}"
    assert value.layout == expected.layout, f"{what}: {value.layout}, eager has {expected.layout}"
    value, expected = value.detach().to_dense(), expected.detach().to_dense()
    exact = not (expected.is_floating_point() or expected.is_complex())
    finite = expected[expected.isfinite()]
    largest = 1.0 if exact or finite.numel() == 0 else max(finite.abs().max().item(), 1.0)
    tolerance = 0 if exact else RELATIVE.get(expected.dtype, 1e-2)
    torch.testing.assert_close(
        value,
        expected,
        rtol=tolerance,
        atol=tolerance * largest,
        equal_nan=True,
        msg=lambda message: f"{what}: {message}",
    )


def run(
    function: Callable[..., Any],
    instances: Sequence[Any],
    parameters: Sequence[Tensor],
    enabled: bool,
) -> tuple[list[Tensor], list[Tensor | None], ab.Report]:
    def fresh(value: Any, grad: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        differentiable = value.is_floating_point() or value.is_complex()
        return value.detach().clone().requires_grad_(grad and differentiable)

    torch.manual_seed(0)
    leaves = [fresh(p, True) for p in parameters]
    inputs = [[fresh(v, True) for v in (x if isinstance(x, tuple) else (x,))] for x in instances]
    with ab.batch(enabled=enabled) as scope:
        results = [function(*leaves, *x) for x in inputs]
    flat = tensors_of(results)
    total = torch.zeros((), dtype=DOUBLE)
    for i, r in enumerate(flat):
        if r.requires_grad:  # a different weight for each element
            real = torch.view_as_real(r.resolve_conj()) if r.is_complex() else r
            weights = torch.arange(1, real.numel() + 1, dtype=DOUBLE).view(real.shape) / (i + 2)
            total = total + (real.double() * weights).sum()
    if total.requires_grad:
        total.backward()
    wanted = leaves + [v for x in inputs for v in x if isinstance(v, Tensor)]
    return flat, [v.grad for v in wanted], scope.report()


def check(
    function: Callable[..., Any], *instances: Any, parameters: Sequence[Tensor] = ()
) -> ab.Report:
    """``function(*parameters, *instance)`` gives eager's results and gradients."""
    expected, expected_grads, _ = run(function, instances, parameters, False)
    results, grads, report = run(function, instances, parameters, True)
    assert len(results) == len(expected)
    for i, (result, other) in enumerate(zip(results, expected, strict=True)):
        assert_same(f"result {i}", result, other)
        assert result.requires_grad == other.requires_grad
    for i, (grad, other_grad) in enumerate(zip(grads, expected_grads, strict=True)):
        assert_same(f"gradient {i}", grad, other_grad)
    return report


def rules_of(report: ab.Report) -> dict[str, str]:
    return {s.op: s.rule for s in report.signatures}


def raises_as_eager(function: Callable[[], Any]) -> str:
    """The error of ``function`` in a block is of eager's type, begins as eager's; its message."""
    with pytest.raises((RuntimeError, IndexError, ValueError)) as expected:
        function()
    with pytest.raises(type(expected.value)) as raised, ab.batch():
        _held = function()  # a value that nobody holds isn't computed
    assert str(raised.value).startswith(str(expected.value).splitlines()[0])
    return str(raised.value)


# --- pointwise ---

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "exp": torch.exp,
    "log": lambda x: (x.abs() + 0.1).log(),
    "sqrt": lambda x: (x.abs() + 0.1).sqrt(),
    "rsqrt": lambda x: (x.abs() + 0.1).rsqrt(),
    "neg": torch.neg,
    "abs": torch.abs,
    "square": torch.square,
    "sin": torch.sin,
    "cos": torch.cos,
    "reciprocal": torch.reciprocal,
    "silu": F.silu,
    "logsigmoid": F.logsigmoid,
    "softplus": lambda x: F.softplus(x, 2.0, 1.0),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.5),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.3),
    "clone": torch.clone,
    "add": lambda x: x + 2,
    "sub": lambda x: x - 1.5,
    "rsub": lambda x: 2 - x,
    "rsub_alpha": lambda x: torch.rsub(x, 3, alpha=2),
    "mul": lambda x: 3 * x,
    "div": lambda x: x / 3,
    "rdiv": lambda x: 2 / x,
    "pow": lambda x: x**2,
    "pow_0": lambda x: x**0,
    "pow_negative": lambda x: x.pow(-3),
}


@pytest.mark.parametrize("name", UNARY)
def test_unary(name: str) -> None:
    op = UNARY[name]
    shapes = [(3,), (4,), (2, 3), (), (1, 3), (3, 1), (0, 3), (3,), (2, 3)]
    report = check(lambda x: op(op(x * 1.5)), *[rand(*s) for s in shapes])
    assert set(rules_of(report).values()) == {"native"}
    # Strided, transposed and expanded operands.
    check(lambda x: op(x[:, ::2]), rand(2, 4), rand(3, 4), rand(2, 5))
    check(lambda x: op(x.t() * 1.0), rand(2, 3), rand(2, 3), rand(4, 5))
    check(lambda x: op(x.expand(2, 3)), rand(3), rand(1, 3), rand(2, 1))


def test_unary_different_lengths_are_one_batch() -> None:
    report = check(lambda x: x.tanh(), rand(3), rand(5), rand(1), rand(0))
    (row,) = report.signatures
    assert (row.instances, row.batches, row.largest) == (4, 1, 4)


def test_unary_constants_are_in_the_signature() -> None:
    alphas = [0.1, 0.2, 0.1, 0.5]
    report = check(lambda x, a: F.elu(x, a), *[(rand(3), a) for a in alphas])
    assert report.batches == 3
    check(lambda x, a: x * a + a, *[(rand(3), a) for a in alphas])
    check(lambda x, a: F.leaky_relu(x, a), *[(rand(3), a) for a in alphas])
    check(lambda x, which: which(x), (rand(3), F.relu), (rand(3), F.elu), (rand(3), F.silu))


BROADCASTS = [
    ((3,), (3,)),
    ((4,), (4,)),
    ((2, 3), (3,)),
    ((4, 3), (3,)),
    ((2, 3), (1, 3)),
    ((2, 3), (2, 1)),
    ((3,), (2, 3)),
    ((3,), (4, 3)),
    ((), (3,)),
    ((2, 3), ()),
    ((1,), (3,)),
    ((2, 1), (1, 3)),
    ((3, 1), (1, 4)),
    ((2, 2, 3), (3,)),
    ((2, 2, 3), (2, 3)),
    ((2, 2, 3), (2, 1, 1)),
    ((), ()),
    ((1,), ()),
    ((0, 3), (3,)),
    ((1, 3), (1, 1, 3)),
]
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "add_alpha": lambda x, y: torch.add(x, y, alpha=3),
    "sub_alpha": lambda x, y: torch.sub(x, y, alpha=0.5),
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "pow": lambda x, y: x.abs() ** y,
}


@pytest.mark.parametrize("name", BINARY)
def test_binary(name: str) -> None:
    op = BINARY[name]
    pairs = [(rand(*a), rand(*b)) for a, b in BROADCASTS * 2]
    check(lambda x, y: op(x.tanh(), y.sin()), *pairs)


@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "where"])
def test_binary_with_a_shared_side(
    name: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    op, (a, b) = BINARY[name], shapes
    check(lambda p, x: op(p, x.tanh()), *[rand(*b) for _ in range(3)], parameters=[rand(*a)])
    check(lambda p, x: op(x.tanh(), p), *[rand(*a) for _ in range(3)], parameters=[rand(*b)])
    check(
        lambda p, q, x: op(p * 1, q.tanh()) + x.sum(),
        *[rand(2) for _ in range(3)],
        parameters=[rand(*a), rand(*b)],
    )


def test_binary_of_a_value_with_itself() -> None:
    check(lambda x: (h := x.tanh()) * h + h / h, rand(3), rand(2, 3), rand(3))


@pytest.mark.parametrize("left", [torch.float32, DOUBLE, torch.bfloat16])
@pytest.mark.parametrize("right", [torch.float32, DOUBLE, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shapes", [((3,), (3,)), ((3,), ()), ((), (3,))], ids=str)
def test_type_promotion(
    left: torch.dtype, right: torch.dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    pairs = [(rand(*shapes[0]).to(left), (rand(*shapes[1]) * 3).to(right)) for _ in range(3)]
    check(lambda x, y: x.tanh() + y, *pairs)
    check(lambda x, y: x.tanh() * y * 2.5, *pairs)


def test_integers_and_booleans() -> None:
    xs = [rand(3, 3) for _ in range(3)]
    check(lambda x: x.tanh().argmax(-1) * 2 + 1, *xs)
    check(lambda x: x.tanh().argmax(-1) / 2, *xs)
    check(lambda x: (x.tanh() > 0) & (x.sin() < 0.5), *xs)
    check(lambda x: ((x.tanh() > 0).sum(), (x.tanh() > 0).any(0), ~(x.tanh() > 0)), *xs)
    check(lambda x: F.one_hot(x.tanh().argmax(-1), 3), *xs)


def test_complex() -> None:
    xs = [torch.randn(3, dtype=torch.complex64) for _ in range(3)]
    check(lambda x: (x * x).exp().abs(), *xs)
    check(lambda x: (x * 2j).conj() + 1, *xs)
    check(lambda p, x: F.linear(x, p), *xs, parameters=[torch.randn(2, 3, dtype=torch.complex64)])


def test_a_complex_exponent_makes_a_complex_result() -> None:
    check(lambda x: x.tanh() ** 1j, rand(3).abs(), rand(3).abs())


def test_division_by_small_numbers_does_not_overflow() -> None:
    def small(value: float) -> Tensor:
        return torch.tensor([value])

    check(lambda x, y: x / y, (small(1e-30), small(1e-25)), (small(1e-30), small(2e-25)))


# --- matrix products ---

Sizes = tuple[int, ...]
LINEAR: dict[str, tuple[Callable[..., Tensor], list[Sizes], list[Sizes]]] = {
    "linear": (
        lambda w, b, x: F.linear(x, w, b),
        [(4, 3), (4,)],
        [(3,), (2, 3), (5, 3), (2, 2, 3), (0, 3)],
    ),
    "linear_vector": (lambda w, x: F.linear(x, w), [(3,)], [(3,), (2, 3)]),
    "addmm": (lambda b, w, x: torch.addmm(b, x, w), [(4,), (3, 4)], [(2, 3), (5, 3), (0, 3)]),
    "addmm_scaled": (
        lambda b, w, x: torch.addmm(b, x, w, beta=2, alpha=0.5),
        [(4,), (3, 4)],
        [(2, 3), (5, 3)],
    ),
    "addmm_bias_matrix": (lambda b, w, x: torch.addmm(b, x, w), [(1, 4), (3, 4)], [(2, 3), (5, 3)]),
    "addmv": (lambda b, w, x: torch.addmv(b, w, x), [(4,), (4, 3)], [(3,), (3,)]),
    "on_the_right": (lambda w, x: x @ w, [(3, 4)], [(3,), (2, 3), (5, 3), (2, 2, 3), (2, 2, 2, 3)]),
    "on_the_left": (lambda w, x: w @ x, [(4, 3)], [(3,), (3, 1), (3, 2), (2, 3, 2), (3, 0)]),
    "transposed": (lambda w, x: x @ w.t(), [(4, 3)], [(3,), (2, 3)]),
    "sliced": (lambda w, x: x @ w[:, :2], [(3, 3)], [(3,), (2, 3)]),
    "computed": (lambda w, x: x @ (w * 2).tanh(), [(3, 3)], [(3,), (2, 3)]),
    "also_as_data": (
        lambda w, x: F.linear(x, w) + F.linear(w, x.view(-1, 3)).sum(),
        [(4, 3)],
        [(3,), (2, 3)],
    ),
    "with_itself": (lambda w, x: w @ w + x.sum(), [(3, 3)], [(3,), (2, 3)]),
    "twice": (lambda w, x: F.linear(F.linear(x, w), w) @ w, [(3, 3)], [(3,), (2, 3)]),
    "expanded": (lambda w, x: F.linear(x, w.expand(4, 3)), [(1, 3)], [(3,), (2, 3)]),
    "bmm": (lambda w, x: torch.bmm(x, w), [(2, 3, 3)], [(2, 3, 3), (2, 1, 3)]),
    "baddbmm": (lambda w, x: torch.baddbmm(x, x @ w, x), [(3, 3)], [(2, 3, 3), (2, 3, 3)]),
    "dot": (lambda w, x: torch.dot(w, x), [(3,)], [(3,), (3,)]),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_product_with_a_weight(name: str, dtype: torch.dtype) -> None:
    function, weights, inputs = LINEAR[name]
    xs = [rand(*s, dtype=dtype) for s in inputs * 2]
    check(function, *xs, parameters=[rand(*s, dtype=dtype) for s in weights])
    check(
        lambda *a: function(*a[:-1], a[-1].sin()),
        *xs,
        parameters=[rand(*s, dtype=dtype) for s in weights],
    )


def test_one_weight_is_one_product_whatever_the_number_of_rows() -> None:
    xs = [rand(n, 3) for n in (1, 4, 2, 7)]
    report = check(lambda w, b, x: F.linear(x, w, b), *xs, parameters=[rand(4, 3), rand(4)])
    assert (report.batches, rules_of(report)) == (1, {"aten::linear": "native"})


def test_different_weights_do_not_mix() -> None:
    weights = [rand(4, 3), rand(4, 3)]
    pairs = [(rand(2, 3), i % 2) for i in range(6)]
    check(lambda v, w, x, i: F.linear(x, (v, w)[i]), *pairs, parameters=weights)


@pytest.mark.parametrize("a", [(3,), (2, 3), (1, 3), (5, 2, 3)], ids=str)
@pytest.mark.parametrize("b", [(3,), (3, 4), (3, 1), (5, 3, 4)], ids=str)
def test_product_of_computed_values(a: Sizes, b: Sizes) -> None:
    check(
        lambda x, y: torch.matmul(x.tanh(), y.sin()),
        *[(rand(*a), rand(*b)) for _ in range(3)],
        (rand(*a[:-1], 2), rand(*b[:-2], 2, *b[-1:]) if len(b) > 1 else rand(2)),
    )


WRONG_RANKS = [
    (torch.mm, (3,), (3, 4)),
    (torch.mm, (2, 3), (3,)),
    (torch.mm, (2, 2, 3), (2, 3, 2)),
    (torch.bmm, (2, 3), (3, 2)),
    (torch.mv, (2, 3), (3, 2)),
    (torch.mv, (2, 3), (3, 1)),
    (torch.mv, (3,), (3,)),
    (torch.dot, (2, 3), (3, 2)),
    (torch.dot, (3,), (3, 3)),
]


@pytest.mark.parametrize(
    ("op", "a", "b"), WRONG_RANKS, ids=[f"{op.__name__}{a}{b}" for op, a, b in WRONG_RANKS]
)
def test_product_of_wrong_ranks_is_an_error(op: Any, a: Sizes, b: Sizes) -> None:
    x, y = rand(*a).requires_grad_(), rand(*b).requires_grad_()
    raises_as_eager(lambda: op(x, y))
    raises_as_eager(lambda: op(x.tanh(), y.tanh()))
    raises_as_eager(lambda: op(x.tanh(), y))
    raises_as_eager(lambda: op(x, y.tanh()))


# --- recurrent cells ---


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("rows", [(), (1,), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32])
def test_cell(cell: Any, bias: bool, given: bool, rows: Sizes, dtype: torch.dtype) -> None:
    model = cell(3, 4, bias=bias).to(dtype)
    names = [name for name, _ in model.named_parameters()]
    count = len(names)

    def sequence(*args: Tensor) -> Any:
        parameters, xs, states = args[:count], args[count], args[count + 1 :]
        state: Any = None
        if given:
            state = tuple(states) if cell is nn.LSTMCell else states[0]
        weights = dict(zip(names, parameters, strict=True))
        for x in xs.unbind():
            state = torch.func.functional_call(model, weights, (x, state))
        return state[:1] if cell is nn.LSTMCell and len(xs) == 2 else state  # c unused in some

    instances = [
        (rand(n, *rows, 3, dtype=dtype), rand(*rows, 4, dtype=dtype), rand(*rows, 4, dtype=dtype))
        for n in (1, 3, 2, 4)
    ]
    report = check(sequence, *instances, parameters=[p.detach() for p in model.parameters()])
    if cell is not nn.RNNCell:
        assert rules_of(report)[f"aten::{cell.__name__[:-4].lower()}_cell"] == "native"


# --- joins and views ---

Op = Callable[[Tensor], Any]
SHAPE: dict[str, Op] = {
    "cat_0": lambda x: torch.cat([x, x * 2, x[:1]]),
    "cat_1": lambda x: torch.cat([x, x[:, :1]], 1),
    "cat_last": lambda x: torch.cat([x[:, 1:], x], -1),
    "cat_empty": lambda x: torch.cat([x[:0], x]),
    "cat_legacy_empty": lambda x: torch.cat([torch.zeros(0, dtype=DOUBLE), x]),
    "cat_expanded": lambda x: torch.cat([x, x[:1].expand(3, -1)]),
    "cat_outside": lambda x: torch.cat([x, torch.ones(1, 3, dtype=DOUBLE)]),
    "stack_0": lambda x: torch.stack([x, x * 2]),
    "stack_1": lambda x: torch.stack([x, x * 2, x], 1),
    "stack_last": lambda x: torch.stack([x, x * 2], -1),
    "stack_scalars": lambda x: torch.stack([row.sum() for row in x]),
    "stack_transposed": lambda x: torch.stack([x.t(), x.t() * 2]),
    "hstack": lambda x: torch.hstack([x, x]),
    "select": lambda x: (x[0], x[:, 1], x.select(-1, -1), x[-1]),
    "slice": lambda x: (x[1:, :2], x[::2], x[:, 5:], x[..., None, 0]),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "chunk": lambda x: (*x.chunk(2, 1), *x.chunk(5, 0)),
    "split": lambda x: (*x.split(2, 1), *x.split([1, 2], 1)),
    "tensor_split": lambda x: x.tensor_split(2),
    "view": lambda x: x.view(-1),
    "reshape_copy": lambda x: x.t().reshape(-1),
    "squeeze": lambda x: (x[:1].squeeze(), x[:1].squeeze(0), x[:1].squeeze((0, 1)), x.squeeze(0)),
    "unsqueeze": lambda x: (x.unsqueeze(0), x.unsqueeze(-1), x.unsqueeze(1)),
    "transpose": lambda x: (x.transpose(0, 1), x.t(), x.T, x.mT),
    "permute": lambda x: x.unsqueeze(0).permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, 1),
    "expand": lambda x: (x[:1].expand(4, -1), x.expand(2, *x.shape), x[:1].expand_as(x)),
    "flatten": lambda x: (x.flatten(), x.unsqueeze(0).flatten(1), x.t().flatten()),
    "unflatten": lambda x: x.unflatten(1, (1, 3)),
    "unbind": lambda x: x.unbind(1),
    "detach": lambda x: x.detach() * x,
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 1)),
    "contiguous": lambda x: x.t().contiguous(),
    "chain": lambda x: x[1:].t().unsqueeze(0).expand(2, -1, -1).transpose(0, 1)[:, 0].chunk(3)[1],
}


@pytest.mark.parametrize("name", SHAPE)
def test_shapes(name: str) -> None:
    op = SHAPE[name]
    xs = [rand(2, 3), rand(2, 3), rand(4, 3)]
    check(op, *xs)
    check(lambda x: op(x.sin()), *xs)
    check(lambda x: [r.sin() for r in tensors_of(op(x.sin()))], *xs)
    check(lambda x: op((x * 2).t().t()[:2]), *xs)
    check(lambda p, x: [r * x.sum() for r in tensors_of(op(p))], *xs, parameters=[rand(2, 3)])


def test_cat_of_two_types() -> None:
    check(lambda x: torch.cat([x.sin(), x.float()]), rand(2, 3), rand(4, 3), rand(2, 3))


def test_stack_and_cat_of_any_length_are_one_batch() -> None:
    xs = [rand(n, 3) for n in (1, 5, 2)]
    report = check(lambda x: torch.stack([row.tanh() for row in x]), *xs)
    (row,) = [s for s in report.signatures if s.op == "aten::stack"]
    assert row.batches == 1


# --- lookups ---


@pytest.mark.parametrize(
    "options",
    [{}, {"padding_idx": 1}, {"padding_idx": -1}, {"scale_grad_by_freq": True}, {"sparse": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_embedding(options: dict[str, Any], dtype: torch.dtype) -> None:
    indices = [[1, 1, 2], [0, 4], [2], [3, 3, 0], 4, [[1, 2], [4, 4]], []]
    report = check(
        lambda w, i: F.embedding(i, w, **options).tanh(),
        *[torch.tensor(i, dtype=dtype) for i in indices],
        parameters=[rand(5, 3)],
    )
    if not {"sparse", "scale_grad_by_freq"} & set(options):
        (row,) = [s for s in report.signatures if s.op == "aten::embedding"]
        assert (row.rule, row.instances, row.batches) == ("native", 7, 1)


def test_embedding_of_computed_indices() -> None:
    check(lambda w, x: F.embedding((x @ w).argmax(-1), w), *[rand(n, 5) for n in (1, 3, 2)],
          parameters=[rand(5, 5)])  # fmt: skip


def test_embedding_index_out_of_range_is_an_error() -> None:
    weight = rand(5, 3).requires_grad_()
    message = raises_as_eager(lambda: F.embedding(torch.tensor([7]), weight))
    assert "aten::embedding" in message


# --- softmax, reductions ---


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("op", [F.softmax, F.log_softmax])
def test_softmax(op: Any, dim: int) -> None:
    xs = [rand(2, 3, 4), rand(2, 3, 4), rand(5, 3, 4), rand(2, 3, 1), rand(2, 0, 4)]
    check(lambda x: op(x * 2, dim), *xs)
    check(lambda x: op(x.transpose(0, 2) * 2, dim), *xs)
    check(lambda x: op(x * 2, dim, dtype=torch.float32), *xs)


@pytest.mark.parametrize("op", [torch.sum, torch.mean])
@pytest.mark.parametrize(
    "dim", [0, 1, -1, (0,), (0, 1), (1, 2), (0, 2), (0, 1, 2), (2, 0)], ids=str
)
@pytest.mark.parametrize("keepdim", [True, False])
def test_reduction(op: Any, dim: Any, keepdim: bool) -> None:
    xs = [rand(2, 3, 4), rand(2, 3, 4), rand(5, 3, 4), rand(2, 3, 1), rand(1, 1, 1)]
    check(lambda x: op(x * 2, dim=dim, keepdim=keepdim), *xs)
    check(lambda x: op((x * 2).transpose(0, 2), dim=dim, keepdim=keepdim), *xs)
    check(lambda x: op(x * 2, dim=dim, keepdim=keepdim, dtype=torch.float32), *xs)


@pytest.mark.parametrize("op", [torch.sum, torch.mean])
def test_full_reduction(op: Any) -> None:
    xs = [rand(2, 3), rand(4), rand(), rand(0, 3), rand(2, 3), rand(3, 2).t()]
    check(lambda x: op(x * 2), *xs)
    check(lambda x: op(x * 2, dtype=torch.float32), *xs)
    report = check(lambda x: op(x.tanh()), rand(7), rand(3), rand(1))
    assert report.batches == 2  # tanh, then all lengths together


@pytest.mark.parametrize("op", [torch.sum, torch.mean])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reduction_of_different_lengths_is_as_precise_as_eager(op: Any, dtype: torch.dtype) -> None:
    longest = 1_000_000 if dtype is torch.float32 else 3000
    xs = [torch.full((n,), 0.1, dtype=dtype) for n in (longest, longest - 100)]
    check(lambda p, x: op(x * p), *xs, parameters=[torch.ones((), dtype=dtype)])


# --- losses ---

LABELS = [[1, 2, 3], [2, 2], [0], [4, 1, 2, 2], [2]]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [-100, 2, 255])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses_of_class_indices(reduction: str, ignore: int, weighted: bool) -> None:
    weight = rand(5).abs() if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "ignore_index": ignore, "weight": weight}
    labels = [torch.tensor(t) for t in LABELS]
    if ignore == 255:
        labels = [torch.where(t == 2, 255, t) for t in labels]  # all ignored in two: nan
    pairs = [(rand(len(t), 5), t) for t in labels]

    def loss(function: Any, **more: Any) -> Callable[..., Tensor]:
        return lambda p, x, t: function(x * p, t, **options, **more)

    scale = [rand(5)]
    report = check(loss(F.cross_entropy), *pairs, parameters=scale)
    assert rules_of(report)["aten::cross_entropy_loss"] == "native"
    check(lambda p, x, t: F.nll_loss((x * p).log_softmax(-1), t, **options), *pairs,
          parameters=scale)  # fmt: skip
    check(loss(F.cross_entropy), *[(x[0], t[0]) for x, t in pairs], parameters=scale)
    check(loss(F.cross_entropy, label_smoothing=0.1), *pairs, parameters=scale)
    images = [(rand(2, 5, len(t)), t.repeat(2, 1)) for t in labels]
    check(lambda x, t: F.cross_entropy(x * 2, t, **options), *images)


def test_losses_of_probabilities() -> None:
    pairs = [(rand(n, 5), rand(n, 5).softmax(1).detach()) for n in (2, 3, 2)]
    check(lambda p, x, t: F.cross_entropy(x * p, t), *pairs, parameters=[rand(5)])
    check(lambda p, x, t: F.cross_entropy(x[0] * p, t[0]), *pairs, parameters=[rand(5)])


def test_label_out_of_range_is_an_error() -> None:
    x = rand(2, 3).requires_grad_()
    raises_as_eager(lambda: F.cross_entropy(x, torch.tensor([0, 3])))


# --- random ops ---


def test_dropout_drops_the_fraction_and_scales_the_rest() -> None:
    x = torch.ones(4000, requires_grad=True)
    with ab.batch():
        results = [F.dropout(x * 1, 0.25) for _ in range(5)]
    torch.stack(results).sum().backward()
    for r in results:
        assert set(r.detach().unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
        assert abs((r == 0).float().mean().item() - 0.25) < 0.04
    assert not torch.equal(results[0], results[1])
    torch.testing.assert_close(x.grad, torch.stack(results).detach().sum(0))


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False), (1.0, True), (1.0, False)])
def test_dropout_without_chance(p: float, training: bool) -> None:
    check(lambda x: F.dropout(x.tanh(), p, training), rand(3), rand(5))


def test_dropout_obeys_the_seed() -> None:
    x = torch.ones(100, requires_grad=True)

    def draw(seed: int) -> Tensor:
        torch.manual_seed(seed)
        with ab.batch():
            results = [F.dropout(x * 1) for _ in range(3)]
        return torch.stack(results)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli": torch.bernoulli,
    "normal": lambda p: torch.normal(p, 1.0),
    "multinomial": lambda p: torch.multinomial(p, 100, replacement=True),
    "gumbel_softmax": F.gumbel_softmax,
    "rand_like": torch.rand_like,
    "dropout": F.dropout,
    "alpha_dropout": lambda p: F.alpha_dropout(p, 0.5, True),
    "rrelu": lambda p: F.rrelu(-p, training=True),
}


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("grad", [True, False])
def test_each_instance_draws_its_own_numbers(name: str, grad: bool) -> None:
    weight = nn.Parameter(torch.zeros(200, 3))
    with ab.batch(), torch.set_grad_enabled(grad):
        shared = F.linear(torch.ones(3), weight).sigmoid()
        draws = [RANDOM[name](shared) for _ in range(3)]
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])


# --- no native rule: functorch's, or a loop ---

GENERIC: dict[str, Op] = {
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "group_norm": lambda x: F.group_norm(x.unsqueeze(0), 1),
    "rms_norm": lambda x: F.rms_norm(x, (3,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "conv1d": lambda x: F.conv1d(x.unsqueeze(0), x[:, :2].unsqueeze(0)),
    "max_pool": lambda x: F.max_pool1d(x.unsqueeze(0), 2),
    "interpolate": lambda x: F.interpolate(x.unsqueeze(0), scale_factor=2),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x.sin()),
    "outer": lambda x: torch.outer(x[0], x[1]),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.sin()),
    "where": lambda x: (torch.where(x > 0, x, 0.0), torch.where(x > 0, 1.0, x)),
    "max": lambda x: (x.max(), *x.max(1), x.amax(0)),
    "min": lambda x: (x.min(), *x.min(1)),
    "topk": lambda x: x.topk(2, 1),
    "sort": lambda x: x.sort(1),
    "kthvalue": lambda x: x.kthvalue(1, 0),
    "median": lambda x: x.median(),
    "quantile": lambda x: x.quantile(0.3),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(1),
    "prod": lambda x: x.prod(1),
    "logsumexp": lambda x: (x.logsumexp(1), x.logsumexp((0, 1))),
    "norm": lambda x: (x.norm(), x.norm(dim=1), torch.linalg.norm(x)),
    "var": lambda x: (x.var(1), x.std()),
    "index": lambda x: (x[torch.tensor([0, 1, 0])], x[torch.tensor([0, 1]), torch.tensor([1, 2])]),
    "index_computed": lambda x: x[x.argmax(0)],
    "mask": lambda x: x[x > 0],
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "take": lambda x: x.take(torch.tensor([0, 3])),
    "gather": lambda x: x.gather(1, torch.tensor([[0], [1]])),
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 1])),
    "scatter": lambda x: x.scatter(0, torch.tensor([[0, 1, 0]]), 1.0),
    "scatter_add": lambda x: x.scatter_add(0, torch.tensor([[0, 1, 0]]), x[:1].sin()),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 0]), x[:2]),
    "pad": lambda x: F.pad(x, (1, 2)),
    "flip": lambda x: (x.flip(0), x.roll(1, 0)),
    "repeat": lambda x: (x.repeat(2, 1), x.repeat_interleave(2, 0)),
    "tril": torch.tril,
    "svdvals": torch.linalg.svdvals,
    "inverse": lambda x: torch.linalg.inv(x.t() @ x + torch.eye(3, dtype=DOUBLE)),
    "cholesky": lambda x: torch.linalg.cholesky(x.t() @ x + torch.eye(3, dtype=DOUBLE)),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "erf": lambda x: (x.erf(), x.expm1(), x.atan()),
    "floor": lambda x: (x.floor(), x.sign(), x.detach() // 1, x % 1),
    "selu": lambda x: (F.selu(x), F.celu(x, 0.3), F.relu6(x)),
    "rpow": lambda x: 2.0**x,
    "lerp": lambda x: torch.lerp(x, x.sin(), 0.3),
    "addcmul": lambda x: torch.addcmul(x, x, x.sin(), value=2),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij"),
    "mse_loss": lambda x: F.mse_loss(x, x.detach().sin()),
    "kl_div": lambda x: F.kl_div(x.log_softmax(1), x.softmax(1), reduction="batchmean"),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).double()),
    "complex": lambda x: torch.complex(x, x.sin()).abs(),
    "fft": lambda x: torch.fft.fft(x).abs(),
    "real_view": lambda x: torch.view_as_real(torch.complex(x, x)),
    "like": lambda x: torch.ones_like(x) * x + torch.zeros_like(x),
    "to": lambda x: (x.float(), x.long(), x.to(torch.bfloat16).double()),
}


@pytest.mark.parametrize("name", GENERIC)
def test_op_without_a_native_rule(name: str) -> None:
    op = GENERIC[name]
    xs = [rand(2, 3), rand(2, 3), rand(4, 3), rand(2, 3)]
    check(op, *xs)
    check(lambda x: op(x.sin()), *xs)
    check(lambda x: op(x.sin()), xs[0])  # alone
    check(lambda p, x: op(p * x.sum()), *xs, parameters=[rand(2, 3)])


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "erf": torch.erf,
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "clamp": lambda x: x.clamp(-0.5, 0.5) * 1.1,
    "where": lambda x: torch.where(x > 0, x, x.sin()),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "cumprod": lambda x: x.cumprod(1),
    "normalize": F.normalize,
    "rnn": lambda x: torch.rnn_tanh_cell(
        x, x, torch.eye(3, dtype=DOUBLE), torch.eye(3, dtype=DOUBLE)
    ),
}


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("instances", [1, 3])
def test_a_generic_op_feeds_itself(name: str, instances: int) -> None:
    """What one batch saved for backward survives the next batch of the same signature."""
    op = CHAINS[name]
    xs = [rand(2, 3) for _ in range(instances)]
    check(lambda p, x: op(op(op(x * p))), *xs, parameters=[rand(3)])
    depths = [(rand(2, 3), n) for n in (1, 3, 2)]

    def nested(x: Tensor, depth: int) -> Tensor:
        for _ in range(depth):
            x = op(x)
        return x

    check(nested, *depths)


@pytest.mark.parametrize(
    "model",
    [nn.LSTM(4, 4, 2, bidirectional=True), nn.GRU(4, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0)],
    ids=lambda m: type(m).__name__,
)
def test_module(model: nn.Module) -> None:
    model.double()
    names, values = zip(*model.named_parameters(), strict=True)

    def call(*args: Tensor) -> Any:
        weights = dict(zip(names, args[:-1], strict=True))
        result = torch.func.functional_call(model, weights, (args[-1],))
        return result[0] if isinstance(result, tuple) else result

    check(call, *[rand(n, 4) for n in (2, 5, 5, 1)], parameters=values)


def test_empty_inputs_get_empty_gradients() -> None:
    check(lambda b, x: x + b, rand(0, 3), rand(2, 3), rand(0, 3), parameters=[rand(3)])


ERRORS: dict[str, Op] = {
    "add": lambda x: x + torch.ones(5, dtype=DOUBLE),
    "matmul": lambda x: x @ torch.ones(7, 2, dtype=DOUBLE),
    "linear": lambda x: F.linear(x, torch.ones(7, 2, dtype=DOUBLE)),
    "stack": lambda x: torch.stack([x, x[0]]),
    "cat": lambda x: torch.cat([x, x.t()]),
    "select": lambda x: x[10],
    "view": lambda x: x.view(7),
    "reshape": lambda x: x.reshape(4, 4),
    "softmax": lambda x: x.softmax(5),
    "sum": lambda x: x.sum(4),
    "sum_twice": lambda x: x.sum((0, 0)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(9, dtype=torch.long)),
    "expand": lambda x: x.expand(7, 7),
    "permute": lambda x: x.permute(0, 0),
    "transpose": lambda x: x.transpose(0, 5),
    "unsqueeze": lambda x: x.unsqueeze(9),
    "narrow": lambda x: x.narrow(0, 1, 90),
    "split": lambda x: x.split([1, 1, 5], 1),
    "t": lambda x: x.unsqueeze(0).t(),
    "flatten": lambda x: x.flatten(1, 0),
    "unbind": lambda x: x.unbind(4),
    "dropout": lambda x: torch.dropout(x, -1.0, True),
    "layer_norm": lambda x: F.layer_norm(x, (9,)),
    "mean_of_integers": lambda x: x.argmax(-1).mean(),
}


@pytest.mark.parametrize("name", ERRORS)
def test_shape_errors_are_eagers_at_the_same_line(name: str) -> None:
    x = rand(2, 3).requires_grad_()
    with pytest.raises((RuntimeError, IndexError, ValueError)) as expected:
        ERRORS[name](x.tanh())
    with ab.batch():
        h = x.tanh()
        with pytest.raises(type(expected.value)) as raised:
            ERRORS[name](h)
        after = h * 2
    assert str(raised.value).startswith(str(expected.value).splitlines()[0])
    assert_same("after the error", after, x.tanh() * 2)


# --- every native rule: its values, its gradients, and how many batches it takes ---

BOTH = pytest.mark.parametrize("dtype", [DOUBLE, torch.float32], ids=["float64", "float32"])
RAGGED: list[Sizes] = [(2, 3), (5, 3), (1, 3), (2, 3)]


def check_native(
    function: Callable[..., Any],
    instances: Sequence[Any],
    parameters: Sequence[Tensor] = (),
    op: str | None = None,
    batches: int | None = None,
) -> ab.Report:
    """All rules are native; as many batches as one instance takes, or ``batches`` of ``op``."""
    report = check(function, *instances, parameters=parameters)
    assert set(rules_of(report).values()) == {"native"}, report
    assert not report.at_once, report
    if batches is None:
        assert report.batches == check(function, instances[0], parameters=parameters).batches
    else:
        assert sum(s.batches for s in report.signatures if s.op == op) == batches, report
    return report


def random_like(sizes: Any, dtype: torch.dtype) -> Any:
    """A random tensor of these sizes; a tuple of tensors for a tuple of sizes."""
    if sizes and not isinstance(sizes[0], int):
        return tuple(random_like(s, dtype) for s in sizes)
    return rand(*sizes, dtype=dtype)


@BOTH
@pytest.mark.parametrize("name", UNARY)
def test_native_unary(name: str, dtype: torch.dtype) -> None:
    xs = [rand(*s, dtype=dtype) for s in RAGGED]
    check_native(UNARY[name], xs)
    check_native(lambda x: UNARY[name](x.sigmoid()), xs)


aten = torch.ops.aten
SCALAR: dict[str, Callable[[Tensor], Tensor]] = {
    "add.Scalar": lambda x: aten.add.Scalar(x, 2, 3),
    "sub.Scalar": lambda x: aten.sub.Scalar(x, 2.5, 3),
    "mul.Scalar": lambda x: aten.mul.Scalar(x, 3),
    "div.Scalar": lambda x: aten.div.Scalar(x, 4),
    "rsub.Scalar": lambda x: aten.rsub.Scalar(x, 2, 3),
    "pow.Tensor_Scalar": lambda x: aten.pow.Tensor_Scalar(x, 3),
}


@BOTH
@pytest.mark.parametrize("name", SCALAR)
def test_native_scalar(name: str, dtype: torch.dtype) -> None:
    report = check_native(SCALAR[name], [rand(*s, dtype=dtype) for s in RAGGED])
    assert rules_of(report) == {f"aten::{name}": "native"}


NATIVE_BINARY = {name: BINARY[name] for name in ("add", "sub", "mul", "div", "add_alpha")}
RAGGED_PAIRS: dict[str, list[tuple[Sizes, Sizes]]] = {
    "same_shape": [(s, s) for s in RAGGED],
    "row_on_the_right": [(s, (3,)) for s in RAGGED],
    "row_on_the_left": [((3,), s) for s in RAGGED],
    "one_row_matrix": [(s, (1, 3)) for s in RAGGED if s[0] != 1],
    "scalar_tensor": [(s, ()) for s in RAGGED],
}


@BOTH
@pytest.mark.parametrize("pairs", RAGGED_PAIRS)
@pytest.mark.parametrize("name", NATIVE_BINARY)
def test_native_binary(name: str, pairs: str, dtype: torch.dtype) -> None:
    op = NATIVE_BINARY[name]
    instances = [(rand(*a, dtype=dtype), rand(*b, dtype=dtype) + 3) for a, b in RAGGED_PAIRS[pairs]]
    scalar = pairs == "scalar_tensor"
    report = check(lambda x, y: op(x.tanh(), y.exp()), *instances)
    assert set(rules_of(report).values()) == {"native"}
    if not scalar:
        one = check(lambda x, y: op(x.tanh(), y.exp()), instances[0])
        assert report.batches == one.batches


@BOTH
@pytest.mark.parametrize("name", NATIVE_BINARY)
def test_native_binary_with_a_shared_operand(name: str, dtype: torch.dtype) -> None:
    op = NATIVE_BINARY[name]
    xs = [rand(*s, dtype=dtype).exp() for s in RAGGED]
    p = [rand(3, dtype=dtype).exp()]
    check_native(lambda p, x: op(p, x), xs, p)
    check_native(lambda p, x: op(x, p), xs, p)
    check_native(lambda p, x: op(x.tanh(), p) + op(p, x.exp()), xs, p)
    column = [(rand(2, 1, dtype=dtype).exp(), rand(1, 3, dtype=dtype).exp()) for _ in range(3)]
    check_native(lambda x, y: op(x, y), column)


# name: function, parameters, instances, op, batches
PRODUCTS: dict[str, tuple[Callable[..., Tensor], list[Sizes], list[Any], str, int]] = {
    "linear": (lambda w, b, x: F.linear(x, w, b), [(4, 3), (4,)], RAGGED, "linear", 1),
    "linear_no_bias": (lambda w, x: F.linear(x, w), [(4, 3)], [(3,), *RAGGED], "linear", 1),
    "linear_pending": (lambda w, x: F.linear(x.tanh(), w), [(4, 3)], RAGGED, "linear", 1),
    "addmm": (lambda b, w, x: torch.addmm(b, x, w), [(4,), (3, 4)], RAGGED, "addmm", 1),
    "addmv": (lambda b, w, x: torch.addmv(b, w, x), [(4,), (4, 3)], [(3,)] * 3, "addmv", 1),
    "mm_right": (lambda w, x: x.mm(w), [(3, 4)], RAGGED, "mm", 1),
    "mm_left_outside": (lambda w, x: w.mm(x), [(4, 3)], [(3, 1)] * 4, "mm", 4),
    "mm_left_pending": (lambda w, x: w.mm(x.tanh()), [(4, 3)], [(3, 1)] * 4, "mm", 1),
    "mm_left_matrix": (lambda w, x: w.mm(x.tanh()), [(4, 3)], [(3, 2)] * 4, "mm", 1),
    "mm_computed": (lambda x, y: x.tanh().mm(y.tanh()), [], [((2, 3), (3, 4))] * 3, "mm", 1),
    "mm_computed_shapes": (
        lambda x, y: x.tanh().mm(y.tanh()),
        [],
        [((2, 3), (3, 4)), ((5, 3), (3, 4)), ((2, 3), (3, 4))],
        "mm",
        2,
    ),
    "mm_different_right": (lambda x, y: x.tanh().mm(y), [], [((2, 3), (3, 4))] * 3, "mm", 3),
    "matmul_vector_right": (lambda w, x: x @ w, [(3, 4)], [(3,), (2, 3), (2, 2, 3)], "matmul", 1),
    "matmul_vector_left": (lambda w, x: w @ x, [(4, 3)], [(3,)] * 4, "matmul", 1),
    "matmul_different_left": (lambda x, y: x @ y.tanh(), [], [((4, 3), (3, 2))] * 3, "matmul", 1),
    "matmul_vectors": (lambda x, y: x.tanh() @ y.tanh(), [], [((3,), (3,))] * 3, "matmul", 1),
    "matmul_3d": (lambda x, y: x.tanh() @ y.tanh(), [], [((2, 1, 3), (2, 3, 4))] * 3, "matmul", 1),
    "mv": (lambda w, x: w.mv(x), [(4, 3)], [(3,)] * 4, "mv", 1),
    "mv_pending": (lambda w, x: w.mv(x.tanh()), [(4, 3)], [(3,)] * 4, "mv", 1),
    "mv_computed": (lambda x, y: x.tanh().mv(y), [], [((4, 3), (3,))] * 3, "mv", 1),
    "bmm": (lambda x, y: x.tanh().bmm(y.tanh()), [], [((2, 1, 3), (2, 3, 4))] * 3, "bmm", 1),
    "bmm_shared": (lambda w, x: x.bmm(w), [(2, 3, 3)], [(2, 1, 3)] * 3, "bmm", 1),
    "dot": (lambda x, y: x.tanh().dot(y.tanh()), [], [((3,), (3,))] * 3, "dot", 1),
    "dot_shared": (lambda w, x: w.dot(x), [(3,)], [(3,)] * 3, "dot", 1),
    "dot_lengths": (lambda x: x.dot(x.tanh()), [], [(3,), (5,), (3,)], "dot", 2),
}


@BOTH
@pytest.mark.parametrize("name", PRODUCTS)
def test_native_product(name: str, dtype: torch.dtype) -> None:
    function, weights, instances, op, batches = PRODUCTS[name]
    parameters = [rand(*s, dtype=dtype) for s in weights]
    check_native(
        function, [random_like(s, dtype) for s in instances], parameters, f"aten::{op}", batches
    )


@BOTH
def test_a_batch_for_each_of_several_weights(dtype: torch.dtype) -> None:
    weights = [rand(4, 3, dtype=dtype), rand(4, 3, dtype=dtype)]
    pairs = [(rand(n, 3, dtype=dtype), i % 2) for i, n in enumerate((2, 1, 4, 2, 3))]
    check_native(lambda v, w, x, i: F.linear(x, (v, w)[i]), pairs, weights, "aten::linear", 2)
    check_native(lambda v, w, x, i: x @ (v, w)[i].t(), pairs, weights, "aten::matmul", 2)


JOINS: dict[str, tuple[Callable[..., Tensor], list[Sizes]]] = {
    "cat_0": (lambda x: torch.cat([x, x[:1], x]), RAGGED),
    "cat_1": (lambda x: torch.cat([x, x[:, :1]], 1), RAGGED),
    "cat_-1": (lambda x: torch.cat([x, x], -1), [(2, 3), (2, 4), (1, 3)]),
    "cat_count": (lambda x: torch.cat(list(x.split(1))), RAGGED),
    "cat_3d": (lambda x: torch.cat([x, x.sin()], 1), [(2, 3, 4), (1, 5, 2)]),
    "stack_0": (lambda x: torch.stack([x, x]), RAGGED),
    "stack_1": (lambda x: torch.stack([x, x], 1), RAGGED),
    "stack_-1": (lambda x: torch.stack([x, x], -1), RAGGED),
    "stack_count": (lambda x: torch.stack(list(x.unbind())), RAGGED),
    "stack_columns": (lambda x: torch.stack(list(x.unbind(1)), 1), [(2, 3), (4, 1), (1, 5)]),
}


@BOTH
@pytest.mark.parametrize("name", JOINS)
def test_native_join(name: str, dtype: torch.dtype) -> None:
    join, sizes = JOINS[name]
    xs = [rand(*s, dtype=dtype) for s in sizes]
    op = f"aten::{name.split('_')[0]}"
    check_native(lambda x: join(x.tanh()), xs, (), op, 1)
    check_native(lambda p, x: join(x * p), xs, [rand(dtype=dtype)], op, 1)


@BOTH
def test_chained_views_make_no_nodes(dtype: torch.dtype) -> None:
    def views(x: Tensor) -> list[Tensor]:
        a, b = x[:12].view(3, 4).t().chunk(2)
        return [a.unsqueeze(0).transpose(0, 2).squeeze(2)[1:], b[-1].expand(1, 3).select(0, 0)]

    def of_both(p: Tensor, x: Tensor) -> Tensor:
        mine, theirs = views(x.tanh()), views(p)
        return torch.stack([(m * t).sum() for m, t in zip(mine, theirs, strict=True)])

    xs = [rand(12, dtype=dtype) for _ in range(3)]
    report = check(of_both, *xs, parameters=[rand(12, dtype=dtype)])
    names = {"aten::tanh", "aten::mul.Tensor", "aten::sum", "aten::stack"}
    assert rules_of(report) == dict.fromkeys(names, "native")
    assert report.nodes == len(xs) * (1 + 2 + 2 + 1)
    assert report.views > 0
    check(lambda x: views(views(x.tanh())[0].reshape(-1).repeat(3)), *xs)


@BOTH
def test_native_embedding(dtype: torch.dtype) -> None:
    indices = [torch.tensor(i) for i in ([1, 1, 2], [0], 4, [[3, 1], [2, 2]])]
    for padding in (None, 1, -1):
        check_native(
            lambda w, i, padding=padding: F.embedding(i, w, padding),
            indices,
            [rand(5, 3, dtype=dtype)],
            "aten::embedding",
            1,
        )


@BOTH
@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell])
def test_native_cell(cell: Any, dtype: torch.dtype) -> None:
    model = cell(3, 4).to(dtype)
    names = [name for name, _ in model.named_parameters()]
    gates = {nn.LSTMCell: "aten::lstm_cell", nn.GRUCell: "aten::gru_cell"}[cell]
    many = cell is nn.LSTMCell

    def last(*args: Tensor) -> Tensor:
        weights = dict(zip(names, args, strict=False))
        xs, h = args[len(names) :]
        state: Any = (h, h) if many else h
        for x in xs.unbind():
            state = torch.func.functional_call(model, weights, (x, state))
        return state[0] if many else state

    instances = [
        (rand(steps, rows, 3, dtype=dtype), rand(rows, 4, dtype=dtype))
        for steps, rows in ((1, 2), (4, 1), (2, 2), (4, 3))
    ]
    parameters = [p.detach() for p in model.parameters()]
    check_native(last, instances, parameters, gates, 4)  # a batch for each step of the longest


@BOTH
@pytest.mark.parametrize("op", [F.softmax, F.log_softmax])
def test_native_softmax(op: Any, dtype: torch.dtype) -> None:
    xs = [rand(*s, dtype=dtype) for s in RAGGED]
    name = {F.softmax: "aten::softmax.int", F.log_softmax: "aten::log_softmax.int"}[op]
    check_native(lambda x: op(x.tanh(), -1), xs, (), name, 1)
    check_native(lambda x: op(x.tanh(), 0), xs, (), name, 3)  # by shape: (2, 3), (5, 3), (1, 3)
    check_native(lambda x: op(x, 1), [rand(2, 3, 4, dtype=dtype) for _ in range(3)], (), name, 1)


@BOTH
@pytest.mark.parametrize("op", [torch.sum, torch.mean])
@pytest.mark.parametrize("keepdim", [True, False])
def test_native_reduction(op: Any, keepdim: bool, dtype: torch.dtype) -> None:
    xs = [rand(*s, dtype=dtype) for s in RAGGED]
    check_native(lambda x: op(x), xs)
    for dims in (0, (0,), (0, 1), (-2, -1)):
        check_native(lambda x, dims=dims: op(x, dim=dims, keepdim=keepdim), xs)
    report = check(lambda x: op(x, dim=1, keepdim=keepdim), *xs)
    assert (set(rules_of(report).values()), report.batches) == ({"native"}, 3)


@BOTH
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_native_loss(reduction: str, dtype: torch.dtype) -> None:
    pairs = [(rand(len(t), 5, dtype=dtype), torch.tensor(t)) for t in LABELS]
    pairs.append((rand(3, 5, dtype=dtype), torch.tensor([2, 2, 2])))  # all ignored
    single = [(rand(5, dtype=dtype), torch.tensor(t)) for t in (1, 2, 4)]
    weight = rand(5, dtype=dtype).exp()
    for options in ({}, {"weight": weight}, {"ignore_index": 2}):
        for name, prepare in (
            ("cross_entropy", lambda x: x.tanh()),
            ("nll_loss", lambda x: x.log_softmax(-1)),
        ):
            loss = getattr(F, name)
            for instances in (pairs, single):
                report = check(
                    lambda x, t, loss=loss, prepare=prepare, options=options: loss(
                        prepare(x), t, reduction=reduction, **options
                    ),
                    *instances,
                )
                assert set(rules_of(report).values()) == {"native"}
                assert report.batches == 2


@BOTH
def test_native_dropout_of_different_lengths_is_one_batch(dtype: torch.dtype) -> None:
    x = [rand(n, 3, dtype=dtype).abs().add(1).requires_grad_() for n in (50, 200, 7)]
    with ab.batch() as scope:
        results = [F.dropout(y * 1, 0.4) for y in x]
    assert rules_of(scope.report())["aten::dropout"] == "native"
    assert scope.report().batches == 2
    for y, r in zip(x, results, strict=True):
        kept = r != 0
        torch.testing.assert_close(r[kept], y[kept] / 0.6)
        (gradient,) = torch.autograd.grad(r.sum(), y)
        torch.testing.assert_close(gradient, kept.to(dtype) / 0.6)
    with ab.batch():
        same, none = F.dropout(h := x[0] * 1, 0.4, training=False), F.dropout(h, 1.0)
    assert torch.equal(same, x[0])
    assert not none.any()


# --- what has no native rule says so ---

NOT_NATIVE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "layer_norm": (lambda x: F.layer_norm(x, (3,)), "functorch"),
    "avg_pool1d": (lambda x: F.avg_pool1d(x[None], 2), "functorch"),
    "cumsum": (lambda x: x.cumsum(0), "functorch"),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), "functorch"),
    "logsumexp": (lambda x: x.logsumexp(0), "functorch"),
    "clamp": (lambda x: x.clamp(-0.5, 0.5), "functorch"),
    "topk": (lambda x: x.topk(2)[0], "functorch"),
    "amax": (lambda x: x.amax(0), "functorch"),
    "maximum": (lambda x: torch.maximum(x, x.flip(0)), "functorch"),
    "gather": (lambda x: x.gather(1, torch.tensor([[0], [1]])), "functorch"),
    "selu": (F.selu, "functorch"),
    "erf": (torch.erf, "functorch"),
    "atan2": (lambda x: torch.atan2(x, x.flip(1)), "functorch"),
}


@BOTH
@pytest.mark.parametrize("name", NOT_NATIVE)
def test_generic_rule(name: str, dtype: torch.dtype) -> None:
    op, rule = NOT_NATIVE[name]
    xs = [rand(2, 3, dtype=dtype) for _ in range(4)]
    report = check(lambda x: op(x.tanh()), *xs)
    generic = [s for s in report.signatures if s.rule != "native"]
    assert generic
    assert {s.rule for s in generic} == {rule}
    assert all((s.instances, s.batches) == (4, 1) for s in generic)


def test_a_random_op_that_is_differentiated_is_a_loop() -> None:
    x = rand(2, 3).requires_grad_()
    with ab.batch() as scope:
        results = [F.rrelu(x * 1, training=True) for _ in range(3)]
    rows = {s.op: s for s in scope.report().signatures}
    assert (rows["aten::rrelu"].rule, rows["aten::rrelu"].launches) == ("loop", 3)
    assert len(results) == 3


# --- [dynet]: what other systems have merged by mistake ---

SIMILAR: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "activations": [torch.relu, F.elu, torch.tanh, torch.sigmoid, F.silu],
    "elu": [lambda x, a=a: F.elu(x, a) for a in (1.0, 0.5, 2.0)],
    "leaky_relu": [lambda x, a=a: F.leaky_relu(x, a) for a in (0.1, 0.01)],
    "hardtanh": [lambda x, a=a: F.hardtanh(x, -a, a) for a in (0.1, 0.3)],
    "gelu": [F.gelu, lambda x: F.gelu(x, approximate="tanh")],
    "softmax": [lambda x, d=d: x.softmax(d) for d in (0, 1)],
    "softmax_kinds": [lambda x: x.softmax(0), lambda x: x.log_softmax(0)],
    "softmax_ranks": [lambda x: x.softmax(1), lambda x: x.unsqueeze(0).softmax(1)[0]],
    "cat": [lambda x, d=d: torch.cat([x, x * 2], d) for d in (0, 1)],
    "stack": [lambda x, d=d: torch.stack([x, x * 2], d) for d in (0, 1, 2)],
    "sum": [lambda x, d=d: x.sum(d) for d in (0, 1)],
    "keepdim": [lambda x, k=k: x.mean(0, keepdim=k) for k in (True, False)],
    "add": [lambda x, c=c: x + c for c in (1, 1.5, 2)],
    "mul": [lambda x, c=c: x * c for c in (0.1, 0.2)],
    "sides": [lambda x: x - 2, lambda x: 2 - x, lambda x: x / 2, lambda x: 2 / x],
    "alpha": [lambda x, a=a: torch.add(x, x.sin(), alpha=a) for a in (1, 2)],
    "pow": [lambda x, a=a: x**a for a in (2, 3)],
    "signed_zero": [lambda x, c=c: x * 0 + c for c in (0.0, -0.0)],
    "views": [lambda x, d=d: x.select(d, 0).sin() for d in (0, 1)],
}


@pytest.mark.parametrize("name", SIMILAR)
def test_similar_ops_are_not_merged(name: str) -> None:
    """[dynet] Ops that differ in kind, axis or constant only, in one block and in turn."""
    ops = SIMILAR[name]
    x = rand(3, 3)
    check(lambda x: [op(x.tanh()) for op in ops], x, x + 1, x - 1)
    check(lambda x, i: ops[i](x.tanh()), *[(x + i, i % len(ops)) for i in range(6)])
    for op in [*ops, *ops[::-1]]:
        check(lambda x, op=op: op(x.tanh()), x, x + 1)


def test_a_constant_tensor_is_not_the_first_members() -> None:
    """[dynet] Of operands of one shape each instance reads its own, and shared ones are shared."""
    constants = [torch.full((3,), float(i), dtype=DOUBLE) for i in range(4)]
    check(lambda p, x, i: x.tanh() * constants[i] + p, *[(rand(3), i) for i in range(4)],
          parameters=[rand(3)])  # fmt: skip
    check(lambda p, x, i: F.linear(x, p * constants[i]), *[(rand(3), i) for i in range(4)],
          parameters=[rand(2, 3)])  # fmt: skip


# --- found by the op sweep ---


def test_statistics_that_pending_ops_read_are_written_after_them() -> None:
    """Batch norm's schema doesn't say that it writes to its running statistics."""
    bn = nn.BatchNorm1d(3)
    weight = torch.ones(3, requires_grad=True)
    with ab.batch():
        before = weight * bn.running_mean
        bn(torch.randn(4, 3) + 5)
        after = weight * bn.running_mean
    assert torch.equal(before, torch.zeros(3))
    assert torch.equal(after, bn.running_mean)
    assert (after != 0).all()


def test_a_copy_on_another_device_is_there() -> None:
    """`to` names a device that the operands are not on."""
    weight = torch.ones(3, requires_grad=True)
    with ab.batch():
        x = weight * 2
        copies = [x.to("meta"), x.to("meta", torch.float64)]
        same = x.to("cpu", torch.float64)
    assert all(copy.is_meta for copy in copies)
    assert torch.equal(same, torch.full((3,), 2.0, dtype=DOUBLE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.int64, torch.bool])  # fmt: skip # noqa: E501
def test_casts_of_any_length_are_one_batch(dtype: torch.dtype) -> None:
    """`x.to(dtype)` of instances of different lengths, and its gradient."""
    weight = torch.ones(3, dtype=DOUBLE, requires_grad=True)
    with ab.batch() as scope:
        results = [(weight * torch.rand(n, 3, dtype=DOUBLE)).to(dtype) for n in (1, 4, 2)]
        back = [x.to(DOUBLE).sum() for x in results]
    assert all(x.dtype == dtype for x in results)
    rows = [row for row in scope.report().signatures if row.op == "aten::_to_copy"]
    assert [(row.rule, row.largest) for row in rows] == [("native", 3)] * 2
    if dtype.is_floating_point or dtype.is_complex:
        (gradient,) = torch.autograd.grad(sum(back), weight)
        assert gradient.dtype == DOUBLE
        assert (gradient != 0).all()
    else:
        assert not back[0].requires_grad


def test_computed_weights_are_one_batch() -> None:
    """A weight that differs from instance to instance does not split the batch."""
    base = torch.rand(4, 3, dtype=DOUBLE, requires_grad=True)

    def instances() -> list[Tensor]:
        return [F.layer_norm(rand(5, 3).sin(), (3,), base[i] * 2, base[i] * 3) for i in range(4)]

    torch.manual_seed(1)
    expected = instances()
    torch.manual_seed(1)
    with ab.batch() as scope:
        results = instances()
    for result, right in zip(results, expected, strict=True):
        assert torch.allclose(result, right)
    (row,) = [row for row in scope.report().signatures if row.op == "aten::layer_norm"]
    assert (row.rule, row.largest) == ("functorch", 4)
    ours, theirs = (torch.autograd.grad(torch.stack(r).sum(), base) for r in (results, expected))
    assert torch.allclose(ours[0], theirs[0])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.atleast_2d(x),
        lambda x: torch.broadcast_tensors(x, x[:, None])[0],
        lambda x: torch.meshgrid(x, x, indexing="ij")[0],
        lambda x: torch.unsafe_split(x, 2)[0],
        lambda x: x.sum_to_size(3),
        lambda x: torch.conj_physical(x),
        lambda x: F.alpha_dropout(x, 0.0, True),
        lambda x: F.dropout2d(x.view(1, 3, 1, 1), training=False),
    ],
)
def test_views_that_no_schema_tells_share_memory(view: Callable[[Tensor], Tensor]) -> None:
    """Writing to the result is writing to the operand, as in eager."""
    with ab.batch():
        x = torch.ones(3, requires_grad=True).detach() * torch.ones((), requires_grad=True)
        x = x.detach()
        result = view(x)
    with torch.no_grad():
        result.view(-1)[:1].fill_(7) if result.is_contiguous() else result[0].fill_(7)
    assert x[0] == 7
