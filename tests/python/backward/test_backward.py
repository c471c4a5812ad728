"""Backward through a block, compared with eager: various losses, and losses that are left out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from helpers_backward import (
    DOUBLE,
    SIZES,
    Block,
    Chain,
    assert_close,
    backward_each,
    backward_sum,
    grads_of,
    losses_in,
    rand,
    same,
)
from torch import Tensor, nn

# --- which losses ---


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
    for loss in losses[1:]:  # the first loss does not affect the others
        loss.backward()
    expected = Chain()
    expected.load_state_dict(model.state_dict())
    backward_each([expected(x) for x in instances[1:]])
    assert_close(grads_of(model), grads_of(expected))


def test_shared_part_is_differentiated_once(instances: list[Tensor]) -> None:
    """For two losses over one state, the second backward raises eager's error if not retained."""

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
    return ((x * p["v"]).cumprod(0) * p["u"]).sum()


def left_out_rows(x: Tensor, p: dict[str, Tensor]) -> Tensor:
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
    "rows": (left_out_rows, "native"),
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
    """A step that the loss does not depend on is left out, but its batch siblings are not."""

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
    """Zero times NaN is NaN if the losses were stacked first, as in eager mode."""

    def scenario(block: Block) -> Any:
        w = rand(3).requires_grad_()
        inputs = [rand(3), torch.full((3,), float("nan"), dtype=DOUBLE), rand(3)]
        with block():
            losses = [(x * w).sum() for x in inputs]
        stacked = torch.stack(losses)
        stacked[[0, 2]].sum().backward()
        return [w.grad.isnan().tolist()]

    same(scenario)
