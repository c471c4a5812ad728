"""Dynamic cells with sizes seen before: a template captures the calls of the program."""

import copy
import types

import pytest
import torch
import torch_autobatch as ab
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_autobatch import _C, _cell_templates


@pytest.fixture
def bodies(monkeypatch):
    """Returns the cells whose templates programs use."""
    made = []

    def make(*args):
        made.append(_C.Cell(*args))
        return made[-1]

    monkeypatch.setattr(
        _cell_templates, "_C", types.SimpleNamespace(Cell=make, set_eager=_C.set_eager)
    )
    return made


def uses(bodies):
    return sum(body.uses for body in bodies)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        positions = torch.arange(x.shape[0], device=x.device)
        h = F.gelu(self.a(self.norm(x))) * (positions.unsqueeze(1) + 1)
        return self.b(h).tanh(), h.sum(0)


def run(model, lengths, enabled=True):
    model.zero_grad()
    torch.manual_seed(3)
    xs = [torch.randn(n, 4) for n in lengths]
    with ab.batch(enabled=enabled, adaptive=False):
        outs = [model(x) for x in xs]
        sum(y.square().sum() + h.sum() for y, h in outs).backward()
    values = [value.detach() for out in outs for value in out]
    return values + [p.grad.clone() for p in model.parameters()]


def test_sizes_that_come_again_are_captured_by_templates_in_later_blocks_too(bodies):
    torch.manual_seed(0)
    model = Mixer()
    cell = ab.cell(copy.deepcopy(model), dynamic=True)
    for block in range(4):
        before = uses(bodies)
        ours, theirs = run(cell, [2, 3, 5, 2, 3, 5, 7]), run(model, [2, 3, 5, 2, 3, 5, 7], False)
        torch.testing.assert_close(ours, theirs)
        if block >= 2:
            assert uses(bodies) - before == 7


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_have_templates_of_their_own(bodies, mode):
    torch.manual_seed(0)
    model = Mixer()
    cell = ab.cell(copy.deepcopy(model), dynamic=True)
    xs = [torch.randn(n, 4) for n in (2, 3, 2, 3, 2, 3, 2, 3)]
    for _ in range(2):
        run(cell, [2, 3, 2, 3])
    with mode(), ab.batch(adaptive=False):
        ours = [cell(x) for x in xs]
    assert uses(bodies) > 0
    torch.testing.assert_close(ours, [model(x) for x in xs])
    assert ours[-1][0].requires_grad == (mode is torch.enable_grad)


def test_weights_that_change_between_blocks(bodies):
    torch.manual_seed(0)
    model = Mixer()
    cell = ab.cell(copy.deepcopy(model), dynamic=True)
    for step in range(6):
        ours, theirs = run(cell, [2, 3, 2, 3]), run(model, [2, 3, 2, 3], False)
        torch.testing.assert_close(ours, theirs)
        with torch.no_grad():
            for m in (model, cell):
                for p in m.parameters():
                    p.sub_(0.1 * p.grad)
        if step == 3:
            model.a.weight.data = cell.a.weight.data.clone()
            cell.a.weight.data = cell.a.weight.data.clone()
    assert uses(bodies) > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_tied_weights(bodies, mode):
    """Without autograd, each `weight.T` is another tensor over the weight's memory."""
    embedding, linear = nn.Embedding(9, 4), nn.Linear(4, 4)

    def score(ids):
        return linear(embedding(ids)).tanh() @ embedding.weight.T, embedding.weight.T.sum()

    cell = ab.cell(score, dynamic=True)
    calls = [torch.arange(n) for n in (3, 5, 4, 3, 5, 4)]
    for _ in range(5):
        with mode(), ab.batch(adaptive=False):
            found = [cell(ids) for ids in calls]
        torch.testing.assert_close(found, [score(ids) for ids in calls])
        with torch.no_grad():
            embedding.weight.mul_(0.5)
    assert uses(bodies) >= 20


def test_a_weight_that_is_frozen_gets_no_gradient(bodies):
    torch.manual_seed(0)
    cell = ab.cell(Mixer(), dynamic=True)
    for _ in range(3):
        run(cell, [2, 3, 2, 3])
    assert uses(bodies) > 0
    cell.a.weight.requires_grad_(False)
    cell.zero_grad()
    with ab.batch(adaptive=False):
        y, h = cell(torch.randn(2, 4))
        (y.sum() + h.sum()).backward()
    assert cell.a.weight.grad is None
    assert cell.b.weight.grad is not None


def test_another_order_of_cells_in_the_block(bodies):
    """The identities of weights depend on the order in which a block uses them."""
    torch.manual_seed(0)
    one, two = ab.cell(Mixer(), dynamic=True), ab.cell(Mixer(), dynamic=True)
    plain = copy.deepcopy(one.state_dict()), copy.deepcopy(two.state_dict())
    models = [Mixer(), Mixer()]
    for model, state in zip(models, plain, strict=True):
        model.load_state_dict(state)
    xs = [torch.randn(n, 4) for n in (2, 3, 2, 3)]
    for order in ([0, 1], [1, 0], [0, 1], [1, 0]):
        with ab.batch(adaptive=False):
            ours = [[(one, two)[i](x)[0] for i in order] for x in xs]
        theirs = [[models[i](x)[0] for i in order] for x in xs]
        torch.testing.assert_close(ours, theirs)
    assert uses(bodies) > 0


def test_one_tensor_twice_and_results_that_are_arguments(bodies):
    weight = torch.randn(4, 4, requires_grad=True)

    def function(a, b):
        c = torch.tanh(a @ weight) * torch.sigmoid(b @ weight)
        return a, c, c + b, c

    cell = ab.cell(function, dynamic=True)
    for _ in range(4):
        a, b = torch.randn(3, 4), torch.randn(3, 4)
        with ab.batch(adaptive=False):
            for n in (3, 2):
                ours = cell(a[:n], b[:n])
                same = cell(a[:n], a[:n])
                assert ours[1] is ours[3]
        torch.testing.assert_close(ours, function(a[:2], b[:2]))
        torch.testing.assert_close(same, function(a[:2], a[:2]))
    assert uses(bodies) > 0


def test_dropout_draws_each_time(bodies):
    torch.manual_seed(0)
    layer = nn.Linear(8, 8)

    def function(x):
        return F.dropout(layer(layer(x).relu()).tanh(), 0.5) * 2

    cell = ab.cell(function, dynamic=True)
    for _ in range(4):
        x = torch.randn(6, 8)
        with ab.batch(adaptive=False):
            ys = [cell(x) for _ in range(4)] + [cell(x[:3])]
        assert not torch.equal(ys[-2], ys[-3])


def test_values_that_are_asked_for_are_asked_each_time(bodies):
    layer = nn.Linear(4, 4)

    def function(ids, x):
        if 0 in ids:
            x = -x
        return layer(layer(x).tanh()).relu() * 2 + x

    cell = ab.cell(function, dynamic=True)
    with_zero, without = torch.tensor([0, 1]), torch.tensor([2, 1])
    xs = [torch.randn(n, 4) for n in (2, 3, 2, 3, 2, 3)]
    for _ in range(3):
        with ab.batch(adaptive=False):
            ours = [cell(ids, x) for x in xs for ids in (without, with_zero)]
        torch.testing.assert_close(ours, [function(i, x) for x in xs for i in (without, with_zero)])
    assert uses(bodies) > 0


def test_a_pause_within_a_cell_is_no_constant():
    """Results of `ab.eager()` inside a cell depend on the values of the argument."""
    weight = torch.randn(3, 3, requires_grad=True)

    @ab.cell
    def function(x):
        with ab.eager():
            y = x * 2
        return y @ weight

    xs = [torch.full((2, 3), float(i)) for i in range(4)]
    with ab.batch(adaptive=False):
        ours = [function(x) for x in xs]
    torch.testing.assert_close(ours, [(x * 2) @ weight for x in xs])


def check(function, calls, bodies, blocks=4):
    """Runs a dynamic cell in several blocks. Templates capture the calls of the last block."""
    cell = ab.cell(function, dynamic=True)
    for _ in range(blocks):
        before = uses(bodies)
        xs = calls()
        with ab.batch(adaptive=False):
            ours = [cell(*x) for x in xs]
        torch.testing.assert_close(ours, [function(*x) for x in xs])
    assert uses(bodies) - before == len(xs)


def rows(*sizes):
    return lambda: [(torch.randn(n, 4), torch.randperm(n)) for n in sizes]


WEIGHT = torch.randn(4, 4, requires_grad=True)


def test_arithmetic_in_place_on_the_calls_own_memory(bodies):
    def function(x, order):
        h = x @ WEIGHT
        h += 1
        h *= x
        h /= x.square().sum(-1, keepdim=True) + 1
        best = h.topk(2, dim=-1)
        share = best.values
        share -= share.sum(-1, keepdim=True)
        return h.tanh() * 2, share, best.indices

    check(function, rows(3, 5, 3, 5), bodies)


def test_rows_that_are_set_by_index_and_by_mask(bodies):
    def function(x, order):
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0])
        h = x @ WEIGHT
        y = h * 1
        y[order > 1] = h[order > 1] * 2
        return y[inverse].tanh() + 1

    check(function, rows(3, 5, 3, 5), bodies)


def test_another_shape_in_place_is_an_error_still(bodies):
    def function(x, y):
        h = (x @ WEIGHT).sum(0)
        h += y
        return h.tanh() * h.sigmoid()

    cell = ab.cell(function, dynamic=True)
    with ab.batch(adaptive=False):
        for n in (2, 3, 2, 3):
            cell(torch.randn(n, 4), torch.randn(1, 4)[0])
    with pytest.raises(RuntimeError, match=r"broadcast|shape"), ab.batch(adaptive=False):
        cell(torch.randn(2, 4), torch.randn(3, 4))


def test_types_that_in_place_keeps(bodies):
    def function(x, order):
        h = torch.ones(order.shape[0], dtype=torch.float32) * (x @ WEIGHT).sum(-1)
        h += x.double().sum(-1)
        return h.tanh() * 2 + 1

    cell = ab.cell(function, dynamic=True)
    for _ in range(3):
        xs = rows(3, 5, 3)()
        with ab.batch(adaptive=False):
            ours = [cell(*x) for x in xs]
        assert all(y.dtype == torch.float32 for y in ours)
        torch.testing.assert_close(ours, [function(*x) for x in xs])


def test_views_of_weights_without_gradients(bodies):
    weight = nn.Parameter(torch.randn(2, 4, 4))

    def function(x, order):
        h = torch.tanh(x @ weight[0].t())
        return torch.sigmoid(h @ weight[1].transpose(0, 1)) * h + 1

    cell = ab.cell(function, dynamic=True)
    for step in range(6):
        xs = rows(3, 5, 3, 5)()
        with torch.no_grad(), ab.batch(adaptive=False):
            ours = [cell(*x) for x in xs]
        torch.testing.assert_close(ours, [function(*x).detach() for x in xs])
        if step == 3:
            weight.data = torch.randn(2, 4, 4)
        with torch.no_grad():
            weight.mul_(0.9)
    assert uses(bodies) > 8


COMPOSITES = {
    "einsum": lambda x, w: torch.einsum("nk,hkm->nm", x, w),
    "a stack of weights": lambda x, w: (x.unsqueeze(0) @ w).mean(0),
    "a stack and one matrix": lambda x, w: (x @ w).sum(0),
    "bilinear": lambda x, w: F.bilinear(x, x, w),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", COMPOSITES)
def test_composite_ops_make_views_of_weights(bodies, name, mode):
    """An op that calls other ops makes its views of weights outside of the program's lines."""
    weight = nn.Parameter(torch.randn(2, 4, 4))

    def function(x, order):
        return COMPOSITES[name](torch.tanh(x), weight).tanh() * 2 + 1

    cell = ab.cell(function, dynamic=True)
    for step in range(6):
        xs = rows(3, 5, 3, 5)()
        with mode(), ab.batch(adaptive=False):
            ours = [cell(*x) for x in xs]
        with mode():
            torch.testing.assert_close(ours, [function(*x) for x in xs])
        if step == 3:
            weight.data = torch.randn(2, 4, 4)
        with torch.no_grad():
            weight.mul_(0.9)
    assert uses(bodies) > 8


def without_autograd(function):
    def call(x, w):
        with torch.no_grad():
            found = function(x, w)
        return x @ w * found

    return call


ALIASES = {
    "a copy by reshape": lambda x, w: x * w.t().reshape(-1)[:4],
    "an expanded copy": lambda x, w: x * w[0].expand(3, 4).reshape(-1)[:4],
    "projected heads": lambda x, w: torch.einsum(
        "nij,hij->nh", x.view(-1, 2, 2).tanh(), w.view(4, 2, 2)
    ).tanh(),
    "data": lambda x, w: (x @ w) * w.data[0],
    "data beside another weight": lambda x, w: (x @ WEIGHT) * w.data[0] + x @ w.data.mT,
    "data transposed": lambda x, w: x @ w.data.transpose(0, 1) + x @ w.t(),
    "mean of data": lambda x, w: (x @ w) * w.data.mean(),
    "detached": without_autograd(lambda x, w: w.detach()[0].clone()),
    "detached transposed": without_autograd(lambda x, w: w.detach().t().reshape(-1)[:4]),
    "kron": without_autograd(lambda x, w: torch.kron(w[:1], x[:1])[:, :4]),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", ALIASES)
def test_copies_and_aliases_of_weights_follow_the_weight(bodies, name, mode):
    weight = nn.Parameter(torch.randn(4, 4))

    def function(x, order):
        return ALIASES[name](torch.tanh(x), weight) * 2 + 1

    cell = ab.cell(function, dynamic=True)
    for step in range(8):
        xs = rows(3, 5, 3, 3, 5)()
        with mode(), ab.batch(adaptive=False):
            ours = [cell(*x) for x in xs]
        with mode():
            torch.testing.assert_close(ours, [function(*x) for x in xs])
        if step % 3 == 2:
            weight.data = torch.randn(4, 4)
        with torch.no_grad():
            weight.add_(1)
    if name in ("a copy by reshape", "projected heads", "data beside another weight"):
        assert uses(bodies) > 8


def test_views_of_an_argument_are_those_of_each_call(bodies):
    weights = [nn.Parameter(torch.randn(2, 4, 4)) for _ in range(3)]

    def function(x, w):
        return torch.einsum("nk,hkm->nm", torch.tanh(x), w).tanh() * 2 + 1

    cell = ab.cell(function, dynamic=True)
    for _ in range(4):
        xs = [torch.randn(n, 4) for n in (3, 5, 3, 5, 3, 5)]
        with torch.no_grad(), ab.batch(adaptive=False):
            ours = [cell(x, weights[i % 3]) for i, x in enumerate(xs)]
            ours += [cell(x, weights[0][:1]) for x in xs] + [cell(x, weights[0][1:]) for x in xs]
        theirs = [function(x, weights[i % 3]) for i, x in enumerate(xs)]
        theirs += [function(x, weights[0][:1]) for x in xs]
        theirs += [function(x, weights[0][1:]) for x in xs]
        torch.testing.assert_close(ours, [t.detach() for t in theirs])


def test_positions_of_a_results_size(bodies):
    def function(x, order):
        best = x.topk(2, dim=0).indices.reshape(-1)
        places = torch.arange(best.size(0))
        h = (x @ WEIGHT).tanh()
        return h[best] * (places + 1).unsqueeze(-1) + 2

    check(function, rows(3, 5, 3, 5), bodies)


def test_a_constant_that_is_returned_is_none_of_the_templates(bodies):
    def function(x, order):
        h = (x @ WEIGHT).tanh()
        return h * 2 + 1, torch.arange(order.size(0)).float().reshape(-1)

    cell = ab.cell(function, dynamic=True)
    with ab.batch(adaptive=False):
        ours = [cell(*x) for x in rows(3, 3, 5, 3, 3, 3)()]
    ours[3][1].add_(1)
    assert torch.equal(ours[4][1], torch.arange(3.0))
    assert torch.equal(ours[5][1], torch.arange(3.0))


def test_attention_follows_its_settings(bodies):
    """`sdpa_kernel` determines the kernel in eager mode, and therefore how the op is captured."""
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    for kernel in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(kernel), ab.batch(adaptive=False):
            ours = [F.scaled_dot_product_attention(q * 1, q, q) for _ in range(3)]
        with sdpa_kernel(kernel):
            theirs = F.scaled_dot_product_attention(q * 1, q, q)
        torch.testing.assert_close(ours[2], theirs)


def test_what_a_mask_and_sizes_alone_give_in_one_program(bodies):
    """Some lines of the program are needed for sizes and for masks."""

    def function(x, order):
        places = torch.arange(order.shape[0])
        chosen = places[order > 0]
        h = (x @ WEIGHT).tanh()
        return h[chosen].sum(0) * 2 + h[places].mean(0)

    check(function, rows(3, 5, 3, 5), bodies)


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: x @ (w - w.t()),
        lambda x, w: x @ (w - w.t()).t(),
        lambda x, w: torch.mm(x, w * 2),
        lambda x, w: torch.matmul(x, w.softmax(0)),
    ],
)
def test_data_times_a_computed_matrix(bodies, product):
    """The rule for `matrix @ column` refuses these calls. It must not make the data a weight."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4))

    def function(x):
        return (product(x, weight) + 1).tanh() * 2 + x

    cell = ab.cell(function, dynamic=True)
    xs = [torch.randn(n, 4) for n in (2, 3, 5, 2, 3, 5)]
    for _ in range(3):
        with ab.batch(adaptive=False):
            found = [cell(x) for x in xs]
        torch.testing.assert_close(found, [function(x) for x in xs])
    assert uses(bodies) > 8
