"""Backward through a block against eager's: any of the losses, held values, hooks, memory."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

DOUBLE = torch.float64
SIZES = (3, 1, 5, 2)  # the number of steps of each instance

Block = Callable[[], ab.batch]


def rand(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=DOUBLE)


class Chain(nn.Module):
    """A recurrent cell over rows, with a parameter of each kind; ``states`` are all its steps."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.cell = nn.Linear(2 * width, width, dtype=DOUBLE)
        self.scale = nn.Parameter(rand(width))
        self.table = nn.Embedding(7, width, dtype=DOUBLE)
        self.start = nn.Parameter(rand(1, width))

    def states(self, ids: Tensor) -> list[Tensor]:
        states = [self.start]
        for i in ids.unbind():
            row = self.table(i).unsqueeze(0)
            states.append(torch.tanh(self.cell(torch.cat([states[-1], row], 1))) * self.scale)
        return states[1:]

    def forward(self, ids: Tensor) -> Tensor:
        return self.states(ids)[-1].square().sum()


@pytest.fixture
def instances() -> list[Tensor]:
    """Index sequences of unequal length."""
    return [torch.randint(7, (n,)) for n in SIZES]


def tensors_of(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in tensors_of(v)]
    return [value.detach().clone() if isinstance(value, Tensor) else value]


def grads_of(model: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in model.parameters()]


def assert_close(values: Any, expected: Any) -> None:
    values, expected = tensors_of(values), tensors_of(expected)
    assert len(values) == len(expected)
    for i, (value, other) in enumerate(zip(values, expected, strict=True)):
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            torch.testing.assert_close(
                value,
                other,
                rtol=1e-9,
                atol=1e-9 * max(1.0, other.abs().max().item() if other.numel() else 0.0),
                msg=lambda message, i=i: f"value {i}: {message}",
            )
        else:
            assert value is other or value == other, f"value {i}: {value}, eager has {other}"


def same(scenario: Callable[[Block], Any]) -> Any:
    """``scenario(block)`` returns the same with blocks that batch as with blocks that do not."""

    def run(enabled: bool) -> Any:
        torch.manual_seed(1)
        return tensors_of(scenario(lambda: ab.batch(enabled=enabled)))

    eager = run(False)
    batched = run(True)
    assert_close(batched, eager)
    return batched


def losses_in(block: Block, model: nn.Module, instances: Sequence[Any]) -> list[Tensor]:
    with block():
        return [model(x) for x in instances]


# --- which losses ---


def backward_sum(losses: list[Tensor]) -> None:
    torch.stack(losses).sum().backward()


def backward_each(losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward()


def backward_reversed(losses: list[Tensor]) -> None:
    backward_each(losses[::-1])


def backward_roots(losses: list[Tensor]) -> None:
    torch.autograd.backward(losses)


def backward_with_gradients(losses: list[Tensor]) -> None:
    torch.autograd.backward(
        losses, [torch.tensor(i + 0.5, dtype=DOUBLE) for i in range(len(SIZES))]
    )


def backward_two_then_rest(losses: list[Tensor]) -> None:
    (losses[0] * 2 - losses[2]).backward()
    (losses[1] + losses[3]).backward()


@pytest.mark.parametrize(
    "backward",
    [
        backward_sum,
        backward_each,
        backward_reversed,
        backward_roots,
        backward_with_gradients,
        backward_two_then_rest,
    ],
)
def test_losses(backward: Callable[[list[Tensor]], None], instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        losses = losses_in(block, model, instances)
        backward(losses)
        return losses, grads_of(model)

    same(scenario)


@pytest.mark.parametrize("subset", [(), (0,), (1,), (2, 0), (3, 1, 2)])
@pytest.mark.parametrize("each", [False, True])
def test_subsets_of_losses(subset: tuple[int, ...], each: bool, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        losses = losses_in(block, model, instances)
        chosen = [losses[i] for i in subset]
        if chosen:
            (backward_each if each else backward_sum)(chosen)
        return losses, grads_of(model)

    same(scenario)


def test_losses_dropped_before_backward(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        losses = losses_in(block, model, instances)
        last = losses.pop()
        losses.clear()
        gc.collect()
        last.backward()
        return grads_of(model)

    same(scenario)


def test_loss_of_some_instances_made_in_block(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            losses = [model(x) for x in instances]
            total = torch.stack(losses[:2]).sum()
        total.backward()
        first = grads_of(model)
        first = [g.clone() for g in first if g is not None]
        losses[3].backward()
        return first, grads_of(model)

    same(scenario)


@pytest.mark.parametrize("times", [2, 3])
def test_retain_graph(times: int, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        losses = losses_in(block, model, instances)
        after = []
        for i in range(times):
            losses[2].backward(retain_graph=i + 1 < times)
            after.append([None if g is None else g.clone() for g in grads_of(model)])
        torch.stack([losses[0], losses[1]]).sum().backward()
        return after, grads_of(model)

    same(scenario)


def test_second_backward_is_eagers_error(instances: list[Tensor]) -> None:
    model = Chain()
    loss = model(instances[0])
    loss.backward()
    with pytest.raises(RuntimeError) as eager:
        loss.backward()
    losses = losses_in(ab.batch, model, instances)
    losses[0].backward()
    with pytest.raises(RuntimeError) as raised:
        losses[0].backward()
    beginning = "Trying to backward through the graph a second time"
    assert str(eager.value).startswith(beginning)
    assert str(raised.value).startswith(str(eager.value).split(". Saved")[0])
    model.zero_grad()
    for loss in losses[1:]:  # the others are untouched by that
        loss.backward()
    expected = Chain()
    expected.load_state_dict(model.state_dict())
    backward_each([expected(x) for x in instances[1:]])
    assert_close(grads_of(model), grads_of(expected))


def test_shared_part_is_differentiated_once(instances: list[Tensor]) -> None:
    """Two losses over one state: eager's error for the second, unless retained."""

    def losses_of(block: Block, model: Chain) -> tuple[Tensor, Tensor]:
        with block():
            state = model.states(instances[0])[-1]
            return state.sin().sum(), state.square().sum()

    model = Chain()
    for block in (lambda: ab.batch(enabled=False), ab.batch):
        first, second = losses_of(block, model)
        first.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second"):
            second.backward()

    def scenario(block: Block) -> Any:
        fresh = Chain()
        first, second = losses_of(block, fresh)
        first.backward(retain_graph=True)
        second.backward()
        return grads_of(fresh)

    same(scenario)


def test_backward_twice_where_nothing_is_saved() -> None:
    def scenario(block: Block) -> Any:
        w = rand(3).requires_grad_()
        with block():
            losses = [(w + x).sum() for x in (1.0, 2.0)]
        losses[0].backward()
        losses[0].backward()
        losses[1].backward()
        return w.grad

    same(scenario)


# --- what is left out ---

BAD = float("nan"), float("inf"), -float("inf")


def left_out_linear(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    return F.linear(F.linear(x, p["W"], p["v"]), p["W"]).sum()


def left_out_matmul(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    return (p["W"] @ x.view(-1)).tanh().sum()


def left_out_pointwise(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    return ((x * p["v"]).tanh() / p["u"] + x * p["s"]).sum()


def left_out_functorch(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    return F.layer_norm(torch.cumsum(x * p["v"], 1), (4,), p["u"], p["v"]).square().sum()


def left_out_loop(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    return (F.rrelu(x * p["v"], 0.3, 0.3, training=True) * p["u"]).sum()


def left_out_softmax(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    return (F.linear(x, p["W"]).softmax(1) * p["u"]).log_softmax(-1)[0, 1]


def left_out_lstm_cell(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    gates = torch.cat([p["W"]] * 4)
    state = (p["v"].view(1, 4), p["u"].view(1, 4))
    h, c = torch._VF.lstm_cell(x, state, gates, gates, None, None)
    return (h * c).sum()


def left_out_cat(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    a, b = torch.cat([x, p["v"].view(1, 4), x * p["s"]]).mm(p["W"]).chunk(2, 1)
    return torch.stack([a, b.tanh()]).prod(0).mean()


def left_out_bmm(x: Tensor, p: dict[str, Tensor]) -> Tensor:
    m = x.t() @ (x * p["v"])
    return torch.bmm(m.view(1, 4, 4), p["W"].view(1, 4, 4)).sum()


LEFT_OUT = {
    "linear": (left_out_linear, "native"),
    "matmul": (left_out_matmul, "native"),
    "pointwise": (left_out_pointwise, "native"),
    "functorch": (left_out_functorch, "functorch"),
    "loop": (left_out_loop, "loop"),
    "softmax": (left_out_softmax, "native"),
    "lstm_cell": (left_out_lstm_cell, "native"),
    "cat": (left_out_cat, "native"),
    "bmm": (left_out_bmm, "native"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("each", [False, True])
def test_left_out_instance_contributes_nothing(name: str, bad: float, each: bool) -> None:
    function, rule = LEFT_OUT[name]
    inputs = [rand(1, 4) for _ in range(5)]
    inputs[1] = torch.full((1, 4), bad, dtype=DOUBLE)
    inputs[4][0, 2] = bad
    start = {"W": rand(4, 4), "v": rand(4), "u": rand(4).abs() + 1, "s": rand()}

    def scenario(block: Block) -> Any:
        p = {k: t.clone().requires_grad_() for k, t in start.items()}
        with block() as scope:
            losses = [function(x, p) for x in inputs]
        if scope.report().ops:
            assert rule in {s.rule for s in scope.report().signatures}
        good = [losses[i] for i in (0, 2, 3)]
        (backward_each if each else backward_sum)(good)
        grads = [t.grad for t in p.values()]
        for g in grads:
            assert g is None or g.isfinite().all()
        return grads

    same(scenario)


def test_left_out_part_of_one_instance() -> None:
    """A step that isn't on the way to the loss is left out, though its siblings are not."""

    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        with block():
            steps = [w(x).exp() for x in (rand(1, 4), rand(1, 4) * 1e9, rand(1, 4))]
            unused = steps[1].log().sum()
            loss = steps[0].sum() + steps[2].sum()
        loss.backward()
        assert not unused.isfinite()
        return grads_of(w)

    same(scenario)


def test_left_out_by_slicing_a_stack_of_losses() -> None:
    """Eager's answer, whatever it is: zero times NaN where the losses were stacked first."""

    def scenario(block: Block) -> Any:
        w = rand(3).requires_grad_()
        inputs = [rand(3), torch.full((3,), float("nan"), dtype=DOUBLE), rand(3)]
        with block():
            losses = [(x * w).sum() for x in inputs]
        stacked = torch.stack(losses)
        stacked[[0, 2]].sum().backward()
        return [w.grad.isnan().tolist()]

    same(scenario)


# --- held values ---


def test_grad_of_held_intermediates(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
            losses = [s[-1].square().sum() for s in states]
        found = [
            torch.autograd.grad(losses[0], states[0][0], retain_graph=True),
            torch.autograd.grad(losses[0], states[0][-1], retain_graph=True),
            torch.autograd.grad(losses[2], [model.cell.weight, states[2][1]], retain_graph=True),
            torch.autograd.grad(losses[2], [*states[2], *model.cell.parameters()]),
            torch.autograd.grad(losses[1], states[0][0], allow_unused=True, retain_graph=True),
            torch.autograd.grad(losses[1], states[1][0]),
            torch.autograd.grad(states[3][1].sum(), [states[3][0], model.scale]),
        ]
        assert grads_of(model) == [None] * 5
        return found

    same(scenario)


def test_grad_of_several_losses_and_held(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
            losses = [s[-1].square().sum() for s in states]
        firsts = [s[0] for s in states]
        return torch.autograd.grad(losses, [*firsts, *model.parameters()])

    same(scenario)


def test_grad_of_held_views() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 6, dtype=DOUBLE)
        inputs = [rand(2, 4) for _ in range(3)]
        with block():
            h = [w(x) for x in inputs]
            parts = [t.chunk(3, 1) for t in h]
            rows = [t[0] for t in h]
            losses = [
                (a * b.sin()).sum() + c.square().sum() + r.exp().sum() + t.cos().sum()
                for (a, b, c), r, t in zip(parts, rows, h, strict=True)
            ]
        found = []
        for i in range(3):
            found += torch.autograd.grad(losses[i], [h[i], w.weight], retain_graph=True)
            found += torch.autograd.grad(losses[i], parts[i], retain_graph=True)
            found += torch.autograd.grad(losses[i], [rows[i], h[i]], retain_graph=True)
        backward_each(losses)
        return found, grads_of(w)

    same(scenario)


def test_held_views_of_views() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 6, dtype=DOUBLE)
        with block():
            kept = []
            losses = []
            for x in [rand(2, 4) for _ in range(3)]:
                h = w(x)
                v = h.view(2, 3, 2)
                t = v.transpose(0, 1)
                u = t[1]
                losses.append((u * u).sum() + v.sin().sum())
                kept.append((h, v, t, u))
        found = []
        for loss, all_held in zip(losses, kept, strict=True):
            for held in all_held:
                found += torch.autograd.grad(loss, held, retain_graph=True, allow_unused=True)
            found += torch.autograd.grad(loss, [*all_held[:2], w.weight], retain_graph=True)
        return found

    same(scenario)


def test_view_held_but_not_its_base() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 6, dtype=DOUBLE)
        with block():
            views = [w(x).tanh()[:, 1:4] for x in [rand(2, 4) for _ in range(3)]]
            losses = [(v * 2).exp().sum() for v in views]
        found = [torch.autograd.grad(losses[i], views[i], retain_graph=True) for i in range(3)]
        losses[1].backward()
        return found, grads_of(w)

    same(scenario)


def test_gradient_of_a_held_value_itself(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
        h = states[2][3]
        h.backward(torch.arange(4, dtype=DOUBLE).view(1, 4))
        (found,) = torch.autograd.grad(states[0][-1].sum(), states[0][-1])
        return found, grads_of(model)

    same(scenario)


def test_all_steps_held(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
            losses = [torch.stack(s).square().sum() for s in states]
        for s in states:
            for h in s:
                h.retain_grad()
        backward_each(losses)
        return [[h.grad for h in s] for s in states], grads_of(model)

    same(scenario)


def test_backward_from_several_held_levels(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
        roots = [h for s in states for h in s]
        torch.autograd.backward(roots, [torch.full_like(h, i + 1.0) for i, h in enumerate(roots)])
        return grads_of(model)

    same(scenario)


def test_is_leaf_grad_fn_and_requires_grad(instances: list[Tensor]) -> None:
    model = Chain()
    with ab.batch():
        state = model.states(instances[0])[0]
        assert state.requires_grad
        detached = state.detach() * 2
        assert not detached.requires_grad
    assert not state.is_leaf
    assert state.grad_fn is not None
    assert detached.grad_fn is None
    assert detached.is_leaf


# --- hooks ---


def test_hooks_on_held_values(instances: list[Tensor]) -> None:
    """Called once, with the whole gradient, and only for what is differentiated."""

    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
            losses = [s[-1].square().sum() + s[0].sum() for s in states]
        seen: dict[int, list[Tensor]] = {i: [] for i in range(len(states))}
        for i, s in enumerate(states):
            s[0].register_hook(lambda g, i=i: seen[i].append(g.clone()))
        (losses[0] + losses[2]).backward()
        assert [len(seen[i]) for i in range(4)] == [1, 0, 1, 0]
        losses[3].backward()
        assert [len(seen[i]) for i in range(4)] == [1, 0, 1, 1]
        return [seen[i] for i in range(4)], grads_of(model)

    same(scenario)


def test_hooks_that_change_the_gradient(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x) for x in instances]
            losses = [s[-1].square().sum() for s in states]
        for i, s in enumerate(states):
            s[0].register_hook(lambda g, i=i: g * (i + 2))
            s[-1].register_hook(lambda g: g.clamp(-0.5, 0.5))
        backward_each(losses)
        return grads_of(model)

    same(scenario)


def test_hook_that_zeroes_stops_an_instance(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x)[-1] for x in instances]
            losses = [s.square().sum() for s in states]
        states[1].register_hook(torch.zeros_like)
        backward_sum(losses)
        return grads_of(model)

    same(scenario)


def test_hooks_registered_in_the_block(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        seen: list[Tensor] = []
        losses = []
        with block():
            for x in instances:
                state = model.states(x)[0]
                state.register_hook(lambda g: seen.append(g.clone()))
                losses.append(state.exp().sum())
        backward_each(losses)
        assert len(seen) == len(instances)
        return seen, grads_of(model)

    same(scenario)


def test_removed_hook_is_not_called(instances: list[Tensor]) -> None:
    model = Chain()
    seen: list[Tensor] = []
    with ab.batch():
        states = [model.states(x)[-1] for x in instances]
        losses = [s.sum() for s in states]
    handle = states[0].register_hook(seen.append)
    handle.remove()
    backward_sum(losses)
    assert seen == []


@pytest.mark.parametrize("in_block", [False, True])
def test_retain_grad(in_block: bool, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x)[0] for x in instances]
            if in_block:
                for s in states:
                    s.retain_grad()
            losses = [(s * s.sin()).sum() for s in states]
        if not in_block:
            for s in states:
                s.retain_grad()
        (losses[0] + 2 * losses[3]).backward()
        assert states[0].retains_grad
        return [s.grad for s in states], grads_of(model)

    same(scenario)


@pytest.mark.parametrize("backward", [backward_sum, backward_each])
def test_hooks_on_parameters(
    backward: Callable[[list[Tensor]], None], instances: list[Tensor]
) -> None:
    """Once a backward: with the whole gradient of it."""

    def scenario(block: Block) -> Any:
        model = Chain()
        seen: list[Tensor] = []
        accumulated: list[Tensor] = []
        for p in (model.cell.weight, model.scale, model.table.weight):
            p.register_hook(lambda g: seen.append(g.clone()))
            p.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone()))
        losses = losses_in(block, model, instances)
        backward(losses)
        calls = 1 if backward is backward_sum else len(losses)
        assert len(seen) == 3 * calls
        assert len(accumulated) == 3 * calls
        key = [t.shape for t in seen]
        ordered = [t for shape in sorted(set(key)) for t in seen if t.shape == shape]
        return ordered, grads_of(model)

    same(scenario)


def test_parameter_hooks_that_change_the_gradient(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        for p in model.parameters():
            p.register_hook(lambda g: g.clamp(-0.1, 0.1))
        backward_sum(losses_in(block, model, instances))
        return grads_of(model)

    same(scenario)


def test_hooks_on_nodes(instances: list[Tensor]) -> None:
    model = Chain()
    seen = []
    losses = losses_in(ab.batch, model, instances)
    losses[0].grad_fn.register_hook(lambda *_: seen.append("after"))
    losses[0].grad_fn.register_prehook(lambda _: seen.append("before"))
    backward_each(losses)
    assert seen == ["before", "after"]


# --- inside the block ---


def in_block_backward(losses: list[Tensor], parameters: list[Tensor]) -> Any:
    for loss in losses:
        loss.backward()


def in_block_autograd_backward(losses: list[Tensor], parameters: list[Tensor]) -> Any:
    torch.autograd.backward(losses)


def in_block_sum(losses: list[Tensor], parameters: list[Tensor]) -> Any:
    sum(losses).backward()


def in_block_grad(losses: list[Tensor], parameters: list[Tensor]) -> Any:
    return [torch.autograd.grad(loss, parameters) for loss in losses]


@pytest.mark.parametrize(
    "backward", [in_block_backward, in_block_autograd_backward, in_block_sum, in_block_grad]
)
def test_backward_in_the_block(backward: Callable[..., Any], instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            losses = [model(x) for x in instances]
            found = backward(losses, list(model.parameters()))
            inside = [None if g is None else g.clone() for g in grads_of(model)]
            more = [model(x) for x in instances[:2]]
        backward_sum(more)
        return losses, found, inside, grads_of(model)

    same(scenario)


def test_backward_in_the_block_of_each_instance(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            for x in instances:
                model(x).backward()
        return grads_of(model)

    same(scenario)


def test_backward_in_the_block_of_a_root_from_before(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        before = model(instances[0])
        with block():
            pending = model(instances[1])
            before.backward()
            later = pending + 1
        later.backward()
        return grads_of(model)

    same(scenario)


def test_gradients_read_in_the_block(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            model(instances[0]).backward()
            norm = model.cell.weight.grad.norm()
            scaled = [model.cell.weight.grad * i for i in range(3)]
            (gradient,) = torch.autograd.grad(model(instances[1]), model.scale)
            product = gradient * model.scale.detach()
        return norm, scaled, product

    same(scenario)


def test_full_training_step_in_the_block(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with block():
            for _ in range(3):
                optimizer.zero_grad()
                loss = sum(model(x) for x in instances)
                loss.backward()
                optimizer.step()
        return loss, list(model.parameters())

    same(scenario)


# --- scope.backward ---


def test_scope_backward(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        calls: list[int] = []
        model.cell.weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
        with block() as scope:
            for x in instances:
                scope.backward(model(x))
            assert model.cell.weight.grad is None
        assert len(calls) == 1
        return grads_of(model)

    values = same(scenario)
    model = Chain()
    torch.manual_seed(1)
    model = Chain()
    backward_each([model(x) for x in instances])
    assert_close(values, grads_of(model))


def test_scope_backward_is_one_backward(instances: list[Tensor]) -> None:
    model = Chain()
    with ab.batch() as scope:
        for x in instances:
            scope.backward(model(x))
    assert "hint" not in str(scope.report())
    assert len(scope.report().flushes) == 1


def test_scope_backward_with_gradients(instances: list[Tensor]) -> None:
    weights = [rand(1, 4) for _ in range(len(SIZES))]

    def in_eager(model: Chain) -> list[Tensor]:
        return [model.states(x)[-1] for x in instances]

    def scenario(block: Block) -> Any:
        model = Chain()
        with block() as scope:
            roots = in_eager(model)
            scope.backward(roots[0], weights[0])
            scope.backward([roots[1], roots[2]], weights[1:3])
            scope.backward([roots[3], roots[3].sum()], [weights[3], None])
            scope.backward((roots[0].sum(), roots[1].sum()))
        return grads_of(model)

    values = same(scenario)
    torch.manual_seed(1)
    model = Chain()
    roots = in_eager(model)
    total = sum((r * w).sum() for r, w in zip(roots, weights, strict=True))
    (total + roots[3].sum() + roots[0].sum() + roots[1].sum()).backward()
    assert_close(values, grads_of(model))


def test_scope_backward_errors(instances: list[Tensor]) -> None:
    model = Chain()
    with ab.batch() as scope:
        state = model.states(instances[0])[-1]
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar"):
            scope.backward(state)
        with pytest.raises(ValueError, match="1 tensors but 2 gradients"):
            scope.backward([state], [torch.ones_like(state)] * 2)
    assert grads_of(model) == [None] * 5


def test_scope_backward_after_the_block(instances: list[Tensor]) -> None:
    model = Chain()
    with ab.batch() as scope:
        loss = model(instances[0])
    scope.backward(loss)
    other = Chain()
    other.load_state_dict(model.state_dict())
    other(instances[0]).backward()
    assert_close(grads_of(model), grads_of(other))


def test_scope_backward_is_dropped_when_the_block_raises(instances: list[Tensor]) -> None:
    model = Chain()
    scope = ab.batch()

    def fail() -> None:
        with scope:
            scope.backward(model(instances[0]))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert grads_of(model) == [None] * 5
    with scope:
        scope.backward(model(instances[1]))
    other = Chain()
    other.load_state_dict(model.state_dict())
    other(instances[1]).backward()
    assert_close(grads_of(model), grads_of(other))


def test_scope_backward_in_a_nested_block(instances: list[Tensor]) -> None:
    model = Chain()
    with ab.batch() as outer:
        outer.backward(model(instances[0]))
        with ab.batch() as inner:
            inner.backward(model(instances[1]))
    other = Chain()
    other.load_state_dict(model.state_dict())
    (other(instances[0]) + other(instances[1])).backward()
    assert_close(grads_of(model), grads_of(other))


# --- training ---


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.Adam(p, lr=0.05),
    ],
    ids=["SGD", "Adam"],
)
@pytest.mark.parametrize("to_none", [False, True])
def test_optimizers(optimizer: Callable[..., Any], to_none: bool, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        steps = optimizer(model.parameters())
        history = []
        for step in range(6):
            steps.zero_grad(set_to_none=to_none)
            chosen = instances[step % 2 :]
            losses = losses_in(block, model, chosen)
            (backward_each if step % 2 else backward_sum)(losses)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            steps.step()
            history.append([loss.item() for loss in losses])
        return torch.tensor([v for h in history for v in h]), list(model.parameters())

    same(scenario)


@pytest.mark.parametrize("to_none", [False, True])
def test_zero_grad_between_losses(to_none: bool, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        losses = losses_in(block, model, instances)
        found = []
        for loss in losses:
            model.zero_grad(set_to_none=to_none)
            loss.backward()
            found.append([g.clone() for g in grads_of(model) if g is not None])
        return found

    same(scenario)


def test_gradients_accumulate_over_blocks(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        first = losses_in(block, model, instances[:2])
        backward_sum(first)
        second = losses_in(block, model, instances[2:])
        backward_each(second)
        return grads_of(model)

    same(scenario)


def test_two_blocks_one_backward(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        first = losses_in(block, model, instances)
        second = losses_in(block, model, instances[::-1])
        (torch.stack(first) * torch.stack(second)).sum().backward()
        return grads_of(model)

    same(scenario)


def test_gradients_own_their_memory(instances: list[Tensor]) -> None:
    """A gradient stays what it was when later backwards run."""
    model = Chain()
    losses = losses_in(ab.batch, model, instances)
    losses[0].backward()
    kept = [p.grad for p in model.parameters()]
    copies = [g.clone() for g in kept if g is not None]
    model.zero_grad(set_to_none=True)
    backward_each(losses[1:])
    assert_close(kept, copies)
    assert len({g.data_ptr() for g in kept if g is not None}) == len(copies)


# --- where gradients come from and go to ---


def test_no_grad_and_detach_in_the_block(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            losses = []
            for x in instances:
                states = model.states(x)
                with torch.no_grad():
                    factor = states[-1].exp().sum() * model.scale.sum()
                with torch.no_grad(), torch.enable_grad():
                    extra = model.scale.tanh().sum()
                fixed = states[0].detach().square()
                assert not factor.requires_grad
                losses.append((states[-1] * factor * fixed).sum() + extra)
        backward_each(losses)
        return losses, grads_of(model)

    same(scenario)


def test_frozen_parameters(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        model.cell.weight.requires_grad_(False)
        model.table.requires_grad_(False)
        backward_each(losses_in(block, model, instances))
        return grads_of(model)

    same(scenario)


def test_inputs_that_require_grad() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        inputs = [rand(2, 4).requires_grad_() for _ in range(4)]
        with block():
            losses = [w(x).tanh().sum() + x[0].sin().sum() for x in inputs]
        (losses[0] + losses[3]).backward()
        assert inputs[1].grad is None
        found = torch.autograd.grad(losses[1], [inputs[1], w.weight])
        return found, [x.grad for x in inputs], grads_of(w)

    same(scenario)


def test_inputs_that_are_not_leaves() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        base = rand(4, 2, 4).requires_grad_()
        rows = base.exp()
        inputs = [*rows.unbind(), rows[0].t().contiguous().t(), rows.sum(0), rows[1]]
        with block():
            losses = [(w(x) * x).sum() for x in inputs]
        torch.stack([losses[0], *losses[2:]]).sum().backward()
        return base.grad, grads_of(w)

    same(scenario)


def test_strided_and_expanded_inputs() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        bases = [rand(4, 2).requires_grad_() for _ in range(3)]
        rows = [rand(4).requires_grad_() for _ in range(3)]
        with block():
            losses = [
                (w(b.t()) * r.expand(2, 4)).sum() + (b[::2] * b[1::2]).sum()
                for b, r in zip(bases, rows, strict=True)
            ]
        backward_each(losses)
        return [t.grad for t in bases + rows], grads_of(w)

    same(scenario)


def test_one_input_used_by_all_instances() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        x = rand(1, 4).requires_grad_()
        with block():
            losses = [(w(x * i) + x).tanh().sum() for i in range(1, 5)]
        backward_each(losses[1:])
        return x.grad, grads_of(w)

    same(scenario)


def test_losses_in_further_eager_ops(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x)[-1] for x in instances]
            losses = [s.sum() for s in states]
        head = model.scale.exp() * torch.cat(states)
        weights = torch.softmax(torch.stack(losses), 0)
        penalty = sum(p.square().sum() for p in model.parameters())
        (head.sum(1) @ weights + penalty).backward()
        return grads_of(model)

    same(scenario)


def test_results_of_one_block_in_the_next(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            states = [model.states(x)[-1] for x in instances]
        with block():
            losses = [model.cell(torch.cat([s, s.sin()], 1)).sum() for s in states]
        losses[2].backward()
        losses[0].backward()
        return grads_of(model)

    same(scenario)


def test_weight_produced_in_the_block() -> None:
    """[dynet] A weight that is itself the result of a captured op gets its gradient."""

    def scenario(block: Block) -> Any:
        w = nn.Parameter(rand(4, 4))
        b = nn.Parameter(rand(4))
        inputs = [rand(n, 4) for n in (2, 1, 3)]
        with block():
            weight = w.tanh() * 2
            bias = b.exp()
            losses = [F.linear(x, weight, bias).sin().sum() for x in inputs]
            losses += [(x @ weight.t()).cos().sum() for x in inputs]
        (losses[0] + losses[4]).backward(retain_graph=True)
        backward_sum([losses[1], losses[2], losses[3], losses[5]])
        return w.grad, b.grad

    same(scenario)


def test_weight_of_each_instance_produced_in_the_block() -> None:
    """[dynet]"""

    def scenario(block: Block) -> Any:
        w = nn.Parameter(rand(4, 4))
        inputs = [rand(2, 4) for _ in range(3)]
        with block():
            losses = []
            for x in inputs:
                weight = (x.t() @ x) * w
                losses.append(F.linear(x, weight).sum() + (x @ weight).square().sum())
        backward_each(losses)
        return w.grad

    same(scenario)


def test_parameter_as_weight_and_as_data() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Parameter(rand(4, 4))
        inputs = [rand(n, 4) for n in (2, 1, 3, 2)]
        with block():
            losses = []
            for x in inputs:
                h = F.linear(x, w) + (x @ w) * w[0]
                losses.append((h @ w.t()).sum() + (w * w.sum()).sin().sum())
                rows = F.embedding(torch.tensor([1, 3]), w)
                losses.append(F.linear(w, x * w[1]).tanh().sum() + rows.sin().sum())
        backward_each(losses[::2])
        backward_sum(losses[1:4:2])
        return w.grad

    same(scenario)


def test_tied_weights() -> None:
    def scenario(block: Block) -> Any:
        table = nn.Embedding(6, 4, dtype=DOUBLE)
        out = nn.Linear(4, 6, bias=False, dtype=DOUBLE)
        out.weight = table.weight
        with block():
            losses = [
                F.cross_entropy(out(table(ids).tanh()), ids.flip(0))
                for ids in [torch.randint(6, (n,)) for n in (2, 4, 2)]
            ]
        backward_each(losses)
        return table.weight.grad

    same(scenario)


# --- in-place changes ---


def eager_error(function: Callable[[Block], Any]) -> str:
    with pytest.raises(RuntimeError) as eager:
        function(lambda: ab.batch(enabled=False))
    return str(eager.value)


@pytest.mark.parametrize("kind", ["linear", "mul", "layer_norm"])
def test_weight_changed_before_backward(kind: str) -> None:
    def scenario(block: Block) -> None:
        w = nn.Parameter(rand(4, 4))
        inputs = [rand(1, 4).requires_grad_() for _ in range(3)]
        with block():
            if kind == "linear":
                losses = [F.linear(x, w).sum() for x in inputs]
            elif kind == "mul":
                losses = [(x * w).sum() for x in inputs]
            else:
                losses = [F.layer_norm(x, (4,), w[0]).sum() for x in inputs]
        with torch.no_grad():
            w.mul_(2)
        backward_sum(losses)

    beginning = "has been modified by an inplace operation"
    assert beginning in eager_error(scenario)
    with pytest.raises(RuntimeError, match=beginning):
        scenario(ab.batch)


def test_change_of_what_is_not_saved() -> None:
    """Where eager lets a write pass, so does a block."""

    def scenario(block: Block) -> Any:
        b = nn.Parameter(rand(4))
        inputs = [rand(1, 4) for _ in range(3)]
        with block():
            losses = [(x + b).sum() for x in inputs]
        with torch.no_grad():
            b.mul_(2)
            inputs[0].zero_()
        backward_each(losses)
        return b.grad

    same(scenario)


def test_change_in_the_block(instances: list[Tensor]) -> None:
    """What was captured before the write reads the old value."""

    def scenario(block: Block) -> Any:
        scale = rand(4)
        w = nn.Parameter(rand(4))
        with block():
            first = [(w.exp() + scale).sum() for _ in range(3)]
            scale.mul_(3)
            second = [(w.exp() * scale).sum() for _ in range(3)]
        backward_each(first)
        backward_each(second)
        return first, second, w.grad

    same(scenario)


def test_held_result_modified_after_the_block(instances: list[Tensor]) -> None:
    """Reaches neither its batch siblings nor what backward kept."""
    model = Chain()
    with ab.batch():
        states = [model.states(x)[-1] for x in instances]
    siblings = [s.detach().clone() for s in states]
    with torch.no_grad():
        states[0].fill_(100)
    assert_close(states[1:], siblings[1:])
    loss = torch.cat(states[1:]).square().sum()
    loss.backward()
    other = Chain()
    other.load_state_dict(model.state_dict())
    torch.cat([other.states(x)[-1] for x in instances[1:]]).square().sum().backward()
    assert_close(grads_of(model), grads_of(other))


def test_in_place_autograd_op_on_a_held_result() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        with block():
            results = [w(x) for x in [rand(2, 4) for _ in range(3)]]
        results[0].mul_(3)
        results[1][0].exp_()
        results[2].add_(results[0])
        backward_each([r.square().sum() for r in results[1:]])
        return results, grads_of(w)

    same(scenario)


def test_in_place_op_in_the_block() -> None:
    def scenario(block: Block) -> Any:
        w = nn.Linear(4, 4, dtype=DOUBLE)
        with block():
            losses = []
            for x in [rand(2, 4) for _ in range(3)]:
                h = w(x)
                h += x
                h.mul_(2)
                losses.append(h.tanh().sum())
        backward_sum(losses)
        return losses, grads_of(w)

    same(scenario)


# --- memory ---


class Counter:
    """Counts what a block keeps alive, through weak references to the storages of its inputs."""

    def __init__(self, count: int = 4) -> None:
        self.model = nn.Linear(4, 4, dtype=DOUBLE)
        inputs = [rand(1, 4) for _ in range(count)]
        self.storages = [StorageWeakRef(x.untyped_storage()) for x in inputs]
        with ab.batch():
            self.losses = [self.model(x).tanh().sum() for x in inputs]

    def alive(self) -> int:
        gc.collect()
        return sum(not s.expired() for s in self.storages)


def test_freed_when_all_losses_are_dropped() -> None:
    kept = Counter()
    assert kept.alive() == 4
    del kept.losses[1:]
    assert kept.alive() >= 1
    kept.losses.clear()
    assert kept.alive() == 0


def test_freed_when_some_are_differentiated_and_the_others_dropped() -> None:
    kept = Counter()
    kept.losses[0].backward()
    kept.losses[2].backward()
    kept.losses.clear()
    assert kept.alive() == 0


def test_no_cycle_keeps_a_block_alive() -> None:
    """Without the garbage collector's help."""
    gc.collect()
    gc.disable()
    try:
        kept = Counter()
        backward_each(kept.losses)
        kept.losses.clear()
        assert not any(not s.expired() for s in kept.storages)
    finally:
        gc.enable()


def test_held_values_with_levels_are_freed(instances: list[Tensor]) -> None:
    inputs = [rand(1, 4) for _ in range(3)]
    storages = [StorageWeakRef(x.untyped_storage()) for x in inputs]
    w = nn.Linear(4, 4, dtype=DOUBLE)
    with ab.batch():
        held = [w(x).tanh() for x in inputs]
        losses = [w(h).sum() for h in held]
    del inputs
    backward_sum(losses)
    del losses, held
    gc.collect()
    assert all(s.expired() for s in storages)


# --- threads ---


def test_backward_on_other_threads(instances: list[Tensor]) -> None:
    model = Chain()
    losses = losses_in(ab.batch, model, instances * 4)
    failures: list[BaseException] = []

    def run(mine: list[Tensor]) -> None:
        try:
            for loss in mine:
                loss.backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(losses[i::4],)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []
    other = Chain()
    other.load_state_dict(model.state_dict())
    backward_each([other(x) for x in instances * 4])
    assert_close(grads_of(model), grads_of(other))


def test_grad_on_other_threads(instances: list[Tensor]) -> None:
    """No shared ``.grad``: results are exact, whatever the order."""
    model = Chain()
    many = instances * 4
    losses = losses_in(ab.batch, model, many)
    parameters = list(model.parameters())
    found: dict[int, Any] = {}

    def run(i: int) -> None:
        found[i] = torch.autograd.grad(losses[i], parameters)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(losses))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == len(losses)
    for i, x in enumerate(many):
        assert_close(found[i], torch.autograd.grad(model(x), parameters))


# --- several flushes ---


def test_values_used_across_flushes(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block() as scope:
            states = [model.states(x) for x in instances]
            middle = [s[0] for s in states]
            scope.flush()
            further = [
                model.cell(torch.cat([m, s[-1]], 1)) for m, s in zip(middle, states, strict=True)
            ]
            scope.flush()
            scope.flush()
            losses = [(f * s[-1]).sum() for f, s in zip(further, states, strict=True)]
        losses[3].backward()
        (found,) = torch.autograd.grad(losses[0], middle[0], retain_graph=True)
        backward_sum(losses[:3])
        return losses, found, grads_of(model)

    same(scenario)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_max_pending(limit: int, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        enabled = block()._enabled
        with ab.batch(enabled=enabled, max_pending=limit):
            losses = [model(x) for x in instances]
        backward_each(losses)
        return losses, grads_of(model)

    same(scenario)


def test_values_read_in_the_middle(instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with block():
            losses = []
            for x in instances:
                state = model.states(x)[-1]
                if state.sum().item() > 0:
                    state = model.cell(torch.cat([state, state], 1))
                losses.append(state.square().sum())
        backward_each(losses)
        return losses, grads_of(model)

    same(scenario)


@pytest.mark.parametrize("policy", ["agenda", "depth"])
def test_policies(policy: str, instances: list[Tensor]) -> None:
    def scenario(block: Block) -> Any:
        model = Chain()
        with ab.batch(policy, enabled=block()._enabled):
            states = [model.states(x) for x in instances]
            losses = [s[-1].sum() * s[0].sum() for s in states]
        states[0][0].register_hook(lambda g: g * 2)
        backward_each(losses)
        return losses, grads_of(model)

    same(scenario)


# --- what isn't supported says so ---


def test_create_graph_raises(instances: list[Tensor]) -> None:
    model = Chain()
    losses = losses_in(ab.batch, model, instances)
    with pytest.raises(NotImplementedError, match="create_graph=True"):
        torch.autograd.grad(losses[0], model.scale, create_graph=True)
