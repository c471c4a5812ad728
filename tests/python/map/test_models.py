"""The example models that read values: they train, and losses and gradients equal a loop's."""

from __future__ import annotations

from typing import Any

import beam_tagger
import data
import early_exit
import greedy_parser
import pytest
import reading
import torch
import torch_autobatch as ab
import tree_generator
from mapping import agree, largest, same
from torch import nn

MODELS: dict[str, tuple[Any, Any]] = {
    "greedy_parser": (greedy_parser, greedy_parser.GreedyParser),
    "tree_generator": (tree_generator, tree_generator.TreeGenerator),
    "beam_tagger": (beam_tagger, beam_tagger.BeamTagger),
    "early_exit": (early_exit, early_exit.EarlyExit),
}


@pytest.fixture(scope="module")
def functions() -> data.Dataset:
    """Returns the smallest functions of two modules."""
    raw = [e for e in data.read_functions(modules="argparse enum") if len(e.symbols) <= 25]
    return data.split_and_encode(raw, seed=0, min_count=2)


def made(name: str, functions: data.Dataset) -> nn.Module:
    model = MODELS[name][1](functions.vocabulary, functions.classes, 6).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)  # makes decisions differ
    return model


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_loops(name: str, functions: data.Dataset) -> None:
    model = made(name, functions)
    agree(model, functions.train[:8], model)


@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_the_loops(name: str, functions: data.Dataset) -> None:
    model: Any = made(name, functions)
    with torch.no_grad():
        expected = ab.map(model.predict, functions.train[:8], enabled=False)
        with ab.batch() as scope:
            same(ab.map(model.predict, functions.train[:8]), expected)
    # Instances are batched although their decisions differ.
    assert largest(scope.report(), "aten::linear") >= 4
    for example, predicted in zip(functions.train, expected, strict=False):
        right, of = model.accuracy(example, predicted)
        assert 0 <= right <= of


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_from_end_to_end(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, model = MODELS[name]
    assert reading.run(model, module.__doc__ or "", ["--quick"]) == 0
    assert "right" in capsys.readouterr().out


def test_preorder_is_the_order_of_the_source(functions: data.Dataset) -> None:
    example = functions.train[0]
    order, parents = reading.preorder(example)
    assert sorted(order) == list(range(len(example.children)))
    for place, parent in enumerate(parents):
        assert parent < place
        assert parent < 0 or order[place] in example.children[order[parent]]


def test_the_oracle_rebuilds_the_tree(functions: data.Dataset) -> None:
    for example in functions.train[:20]:
        heads = reading.preorder(example)[1]
        at = greedy_parser.Configuration(heads)
        while not at.is_final():
            at.apply(at.best())
        assert at.heads == heads
