"""Training with reads: losses of all kinds, and backward within the instances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from mapping import agree, gradients, same
from torch import Tensor, nn

DOUBLE = torch.float64


class Writer(nn.Module):
    """A recurrent decoder that picks its next symbol itself."""

    def __init__(self, symbols: int = 5, hidden: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, hidden, dtype=DOUBLE)
        self.cell = nn.LSTMCell(hidden, hidden, dtype=DOUBLE)
        self.score = nn.Linear(hidden, symbols, dtype=DOUBLE)

    def start(self) -> tuple[Tensor, Tensor]:
        return (torch.zeros(1, 6, dtype=DOUBLE), torch.zeros(1, 6, dtype=DOUBLE))

    def step(self, symbol: int, state: Any) -> tuple[Tensor, Any]:
        state = self.cell(self.embedding(torch.tensor([symbol])), state)
        return self.score(state[0]), state


def sentences(count: int = 8) -> list[tuple[int, list[int]]]:
    make = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 9, (count,), generator=make).tolist()
    return [(i, torch.randint(5, (n,), generator=make).tolist()) for i, n in enumerate(lengths)]


def choose(scores: Tensor, noise: torch.Generator) -> int:
    """Returns a sample from the softmax, with the instance's noise."""
    gumbel = -torch.rand(scores.shape, generator=noise, dtype=DOUBLE).log().neg().log()
    return int((scores.detach() + gumbel).argmax().item())


def test_scheduled_sampling() -> None:
    """Bengio et al. 2015: the input of a step is sometimes the model's own output."""
    model = Writer()

    def loss(pair: tuple[int, list[int]]) -> Any:
        i, sentence = pair
        noise = torch.Generator().manual_seed(i)
        state, symbol, losses, said = model.start(), 0, [], []
        for target in sentence:
            scores, state = model.step(symbol, state)
            losses.append(F.cross_entropy(scores, torch.tensor([target])))
            use_model = torch.rand((), generator=noise).item() < 0.5
            symbol = choose(scores, noise) if use_model else target
            said.append(symbol)
        return torch.stack(losses).sum(), said

    agree(loss, sentences(), model)


def test_reinforce() -> None:
    """Williams 1992: actions are sampled, returns are numbers, and episodes differ in length."""
    model = Writer()

    def episode(pair: tuple[int, list[int]]) -> Any:
        i, wanted = pair
        noise = torch.Generator().manual_seed(i)
        state, symbol, picked, rewards = model.start(), 0, [], []
        for target in wanted:
            scores, state = model.step(symbol, state)
            symbol = choose(scores, noise)
            picked.append(F.log_softmax(scores, -1)[0, symbol])
            rewards.append(1.0 if symbol == target else -0.2)
            if symbol == 4:
                break
        returns = [sum(rewards[k:]) for k in range(len(rewards))]
        return -sum(p * r for p, r in zip(picked, returns, strict=True)), rewards

    agree(episode, sentences(), model)


def test_a_loss_that_depends_on_a_value_read() -> None:
    """A value is read as a number, and also differentiated as a tensor."""
    layer = nn.Linear(3, 3, dtype=DOUBLE)

    def loss(x: Tensor) -> Any:
        h = layer(x).tanh()
        norm = h.norm()
        scale = 1 / norm.item() if norm > 0.5 else 2.0
        g = layer(h * scale)
        return (g / norm).sum() + h.sum() * g.detach().max().item()

    agree(loss, [torch.randn(2, 3, dtype=DOUBLE) for _ in range(6)], layer)


# --- backward() within the instances ---


def compare_training(
    function: Callable[[Any], Any], instances: list[Any], model: nn.Module, **options: Any
) -> Any:
    """Runs a loop and a map. Compares results, and the gradients that ``function`` accumulated."""
    seen = []
    for enabled in (False, True):
        model.zero_grad()
        with ab.batch(enabled=enabled) as scope:
            results = ab.map(function, instances, enabled=enabled, **options)
        seen.append((results, [p.grad for p in model.parameters()]))
    same(seen[1], seen[0])
    return scope.report()


def losses_of(model: Writer, pair: tuple[int, list[int]]) -> Tensor:
    state, losses = model.start(), []
    for target in pair[1]:
        scores, state = model.step(target, state)
        losses.append(F.cross_entropy(scores, torch.tensor([target])))
    return torch.stack(losses).sum()


def test_backward_in_each_instance() -> None:
    """One run of the engine differentiates all roots."""
    model = Writer()
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    handle = model.score.bias.register_hook(count)

    def function(pair: tuple[int, list[int]]) -> float:
        loss = losses_of(model, pair)
        loss.backward()
        return loss.item()

    compare_training(function, sentences(), model)
    handle.remove()
    assert runs == 8 + 1  # eight runs in the loop


def test_backward_after_reads_and_more_than_once() -> None:
    model = Writer()

    def function(pair: tuple[int, list[int]]) -> Any:
        total = 0.0
        for k in range(1 + pair[0] % 3):
            loss = losses_of(model, pair) * (k + 1)
            if loss.item() > 3:
                loss = loss * 0.5
            loss.backward()
            total += loss.item()
        return total

    compare_training(function, sentences(), model)


OPTIONS: dict[str, Callable[[Tensor], None]] = {
    "gradient": lambda h: h.backward(torch.full_like(h, 0.5)),
    "retained": lambda h: (h.sum().backward(retain_graph=True), h.norm().backward())[0],
    "several": lambda h: torch.autograd.backward([h.sum(), h.exp()], [None, torch.ones_like(h)]),
    "one_in_a_list": lambda h: torch.autograd.backward([h.sum()]),
    "grad": lambda h: None,
    "mixed": lambda h: h.sum().backward() if h.sum() > 0 else h.sum().backward(retain_graph=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_ways_to_call_backward(name: str) -> None:
    layer = nn.Linear(3, 3, dtype=DOUBLE)

    def function(x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        h = layer(x).tanh()
        if name == "grad":
            return torch.autograd.grad([h.sum(), h.norm()], [x, layer.weight])
        OPTIONS[name](h)
        return x.grad

    compare_training(function, [torch.randn(2, 3, dtype=DOUBLE) for _ in range(6)], layer)


def test_backward_into_inputs_only() -> None:
    layer = nn.Linear(3, 3, dtype=DOUBLE)

    def function(x: Tensor) -> Any:
        layer(x).tanh().sum().backward(inputs=[layer.weight])
        layer(x).tanh().norm().backward(inputs=layer.bias)

    compare_training(function, [torch.randn(2, 3, dtype=DOUBLE) for _ in range(6)], layer)


def test_create_graph() -> None:
    """Tests a gradient penalty whose norm is read."""
    layer = nn.Linear(3, 3, dtype=DOUBLE)

    def function(x: Tensor) -> Any:
        x = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(layer(x).tanh().sum(), [x], create_graph=True)
        norm = g.norm()
        return norm * (2 if norm.item() > 1 else 1)

    agree(function, [torch.randn(2, 3, dtype=DOUBLE) for _ in range(6)], [layer.weight])


def test_backward_that_eager_refuses() -> None:
    """Only the instance that calls backward gets the error."""
    layer = nn.Linear(3, 3, dtype=DOUBLE)

    def function(pair: tuple[int, Tensor]) -> Any:
        i, x = pair
        h = layer(x)
        if i == 1:
            h = h.detach()
        (h if i == 2 else h.sum()).backward()
        return h.sum().item()

    xs = [(i, torch.randn(2, 3, dtype=DOUBLE)) for i in range(4)]
    seen = []
    for enabled in (False, True):
        layer.zero_grad()
        results = ab.map(function, xs, return_exceptions=True, enabled=enabled)
        texts = [str(r) if isinstance(r, Exception) else r for r in results]
        seen.append((texts, layer.weight.grad))
    same(seen[1], seen[0])


def test_an_error_in_a_joint_backward() -> None:
    """All instances whose roots ran together get the error."""
    layer = nn.Linear(3, 3, dtype=DOUBLE)

    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            raise ValueError("no gradient")

    def function(pair: tuple[int, Tensor]) -> Any:
        h = layer(pair[1]).sum()
        h = Refuses.apply(h) if pair[0] == 1 else h
        h.backward()

    xs = [(i, torch.randn(2, 3, dtype=DOUBLE)) for i in range(4)]
    with pytest.raises(ValueError, match="no gradient"):
        ab.map(function, xs)
    assert torch.autograd.backward.__module__.startswith("torch.autograd")


def test_an_optimizer_over_maps() -> None:
    """Several training steps with greedy choices give the same parameters as a loop."""
    states = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = Writer()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

        def loss(pair: tuple[int, list[int]], model: Writer = model) -> Tensor:
            state, symbol, losses = model.start(), 0, []
            for target in pair[1]:
                scores, state = model.step(symbol, state)
                losses.append(F.cross_entropy(scores, torch.tensor([target])))
                symbol = scores.argmax().item()
            return torch.stack(losses).sum()

        for _ in range(4):
            optimizer.zero_grad()
            torch.stack(ab.map(loss, sentences(), enabled=enabled)).sum().backward()
            optimizer.step()
        states.append([p.detach() for p in model.parameters()])
    same(states[1], states[0], 1e-7)


def test_some_losses_only() -> None:
    """Losses that are left out contribute nothing, even if they are NaN."""
    layer = nn.Linear(3, 3, dtype=DOUBLE)
    xs = [torch.randn(2, 3, dtype=DOUBLE) for _ in range(4)]
    xs[2].fill_(float("nan"))

    def function(x: Tensor) -> Tensor:
        h = layer(x)
        return (h * 2 if h.sum().item() > 0 else h).sum()

    results = [ab.map(function, xs, enabled=enabled) for enabled in (False, True)]
    kept = [[r for k, r in enumerate(rs) if k != 2] for rs in results]
    wanted, found = (gradients(k, list(layer.parameters())) for k in kept)
    same(found, wanted)
    assert all(g is not None and g.isfinite().all() for g in found)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 3).weight,
        lambda: nn.Embedding(5, 3).weight,
        lambda: nn.init.orthogonal_(nn.Parameter(torch.empty(3, 4))),
        lambda: nn.init.normal_(torch.empty(3, 4).requires_grad_()),
        lambda: nn.Parameter(torch.zeros(4)[1:]).data.uniform_(),
    ],
)
def test_modules_made_in_an_instance(make: Callable[[], Tensor]) -> None:
    """Seeded initialisation draws the same numbers as in a loop, because no instance interferes."""

    def one(seed: int) -> Tensor:
        torch.manual_seed(seed % 2)
        return make().detach().clone()

    expected = [one(seed) for seed in range(4)]
    values = ab.map(one, range(4))
    assert all(map(torch.equal, values, expected))
    assert [flush.reason for flush in ab.last_report().flushes][:-1] == []
