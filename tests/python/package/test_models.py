"""The demo's models, batched and eager: losses and the gradients of all parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_autobatch as ab
from bilstm_tagger import BiLSTMTagger
from binary_tree_lstm import BinaryTreeLSTM
from child_sum_tree_lstm import ChildSumTreeLSTM
from torch import Tensor, nn

Backward = Callable[[list[Tensor]], None]
Build = Callable[[], tuple[nn.Module, list[Any]]]


@pytest.fixture(params=["child_sum", "binary", "bilstm"])
def build(request: pytest.FixtureRequest, synthetic: Any) -> Build:
    """Makes a small model and instances of unequal sizes for it."""
    sizes = synthetic.vocabulary, synthetic.classes, 5, 7
    return {
        "child_sum": lambda: (ChildSumTreeLSTM(*sizes), synthetic.syntax_trees(9)),
        "binary": lambda: (BinaryTreeLSTM(*sizes), synthetic.binary_trees(7)),
        "bilstm": lambda: (BiLSTMTagger(*sizes, tagger_hidden=6), synthetic.sentences(6)),
    }[request.param]


def backward_sum(losses: list[Tensor]) -> None:
    torch.stack(losses).sum().backward()


def backward_each(losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward()


def backward_each_last_first(losses: list[Tensor]) -> None:
    for loss in reversed(losses):
        loss.backward()


def backward_subset(losses: list[Tensor]) -> None:
    torch.stack(losses[1::2]).sum().backward()


def backward_subset_each(losses: list[Tensor]) -> None:
    for loss in losses[::3]:
        loss.backward()


def backward_weighted(losses: list[Tensor]) -> None:
    weights = torch.linspace(-1.0, 2.0, len(losses), dtype=losses[0].dtype)
    (torch.stack(losses) * weights).sum().backward()


BACKWARDS = [
    backward_sum,
    backward_each,
    backward_each_last_first,
    backward_subset,
    backward_subset_each,
    backward_weighted,
]


@pytest.mark.parametrize("policy", ["auto", "agenda", "frontier", "depth"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda f: f.__name__)
def test_losses_and_gradients_are_eagers(
    build: Build, backward: Backward, dtype: torch.dtype, policy: str, compare: Any
) -> None:
    model, instances = build()
    compare(model, instances, dtype=dtype, policy=policy, backward=backward)


@pytest.mark.parametrize("policy", ["auto", "agenda", "frontier", "depth"])
def test_instances_are_batched(build: Build, policy: str, compare: Any) -> None:
    model, instances = build()
    report = compare(model, instances, policy=policy)
    assert 0 < report.lower_bound <= report.batches
    assert report.batches < report.ops / 2


def test_more_of_the_same_instances_take_no_more_batches(build: Build, compare: Any) -> None:
    model, instances = build()
    once = compare(model, instances)
    thrice = compare(model, instances * 3)
    assert thrice.ops == 3 * once.ops
    assert thrice.batches <= once.batches


def test_one_instance(build: Build, compare: Any) -> None:
    model, instances = build()
    for instance in instances[:3]:
        compare(model, [instance])


@pytest.mark.parametrize("policy", ["auto", "agenda", "frontier", "depth"])
def test_frozen_model_runs_in_as_many_batches(build: Build, policy: str, compare: Any) -> None:
    model, instances = build()
    trained = compare(model, instances, policy=policy)
    model.requires_grad_(False)
    with torch.no_grad():
        frozen = compare(model, instances, policy=policy)
    assert frozen.ops == trained.ops
    assert frozen.batches == trained.batches


def test_all_scores_are_eagers(build: Build) -> None:
    model, instances = build()
    expected = [score for instance in instances for score in model.scores(instance)]
    with ab.batch():
        scores = [score for instance in instances for score in model.scores(instance)]
    for score, value in zip(scores, expected, strict=True):
        torch.testing.assert_close(score, value, rtol=1e-4, atol=1e-6)


def test_disabled_is_eager(build: Build) -> None:
    model, instances = build()
    expected = [model(instance) for instance in instances]
    with ab.batch(enabled=False):
        losses = [model(instance) for instance in instances]
    assert torch.equal(torch.stack(losses), torch.stack(expected))


def test_trained_weights_are_eagers(build: Build) -> None:
    """Runs some steps of an optimizer, each in a separate block."""
    initial, instances = build()

    def train(enabled: bool) -> list[Tensor]:
        model = copy.deepcopy(initial).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad(set_to_none=True)
            with ab.batch(enabled=enabled):
                losses = [model(instance) for instance in instances[step % 2 :]]
            torch.stack(losses).sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    for value, expected in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)
