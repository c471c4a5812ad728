"""Dynamic cells on sizes that were met before: the program's calls are captured by a template."""

import copy
import types

import pytest
import torch
import torch_autobatch as ab
from torch import nn
from torch.nn import functional as F
from torch_autobatch import _C, _cell_templates


@pytest.fixture
def bodies(monkeypatch):
    """The cells that programs ask for templates."""
    made = []

    def make(*args):
        made.append(_C.Cell(*args))
        return made[-1]

    monkeypatch.setattr(_cell_templates, "_C", types.SimpleNamespace(Cell=make))
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
    """What weights are told by follows from the order in which a block meets them."""
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
    """`ab.eager()`: what is computed there follows from the argument's values."""
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
