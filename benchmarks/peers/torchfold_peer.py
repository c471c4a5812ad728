"""TorchFold 0.1.0 (https://github.com/nearai/torchfold): batches by depth and by function.

The user rewrites the model as functions on batches, and the loop as calls of ``fold.add``.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torchfold.torchfold as torchfold
from torch import Tensor

from benchmarks import collate
from benchmarks.measure import Step, timed_losses
from benchmarks.workload import Workload
from benchmarks.workloads.parser import SHIFT

# TorchFold uses the class of all tensors, which is not an attribute of current versions of torch.
_shim = types.SimpleNamespace(**{name: getattr(torch, name) for name in ("cat", "chunk")})
_shim.LongTensor = torch.LongTensor
_shim.tensor = types.SimpleNamespace(_TensorBase=torch.Tensor)
torchfold.torch = _shim
torchfold.Variable = lambda data, volatile: data


def _total(functions: Any, fold: Any, losses: list[list[Any]]) -> Tensor:
    """Returns the sum of each example's loss nodes."""
    flat = [node for example in losses for node in example]
    owner = [i for i, example in enumerate(losses) for _ in example]
    (values,) = fold.apply(functions, [flat])
    return collate.sum_by(collate.tensor(owner), values, len(losses))


class BinaryTreeFunctions:
    def __init__(self, model: Any) -> None:
        self.model = model

    def leaf(self, word: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.leaf(word)

    def node(self, *states: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.node(states[:2], states[2:])

    def loss(self, h: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model.classifier(h), target, reduction="none")


def binary_trees(workload: Workload, minibatch: Sequence[Any], functions: Any = None) -> Tensor:
    """``functions`` replaces the functions of the Tree-LSTM."""
    fold = torchfold.Fold()
    losses = []
    for tree in minibatch:
        states: list[Any] = []
        of_tree = []
        words, targets = tree.symbol_ids.tolist(), tree.target_ids.tolist()
        for word, children, target in zip(words, tree.children, targets, strict=True):
            if children:
                left, right = children
                node = fold.add("node", *states[left], *states[right]).split(2)
            else:
                node = fold.add("leaf", word).split(2)
            states.append(node)
            of_tree.append(fold.add("loss", node[0], target))
        losses.append(of_tree)
    return _total(functions or BinaryTreeFunctions(workload.model), fold, losses)


class TaggerFunctions:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.zeros = torch.zeros(1, model.left_to_right.weight_hh.shape[1])

    def word(self, word: Tensor) -> Tensor:
        return self.model.embedding(word)

    def right(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.left_to_right(x, (h, c))

    def left(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.right_to_left(x, (h, c))

    def loss(self, left: Tensor, right: Tensor, target: Tensor) -> Tensor:
        scores = self.model.tagger(torch.cat([left, right], dim=-1))
        return F.cross_entropy(scores, target, reduction="none")


def tagger(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    fold = torchfold.Fold()
    functions = TaggerFunctions(workload.model)

    def run(name: str, words: Sequence[Any]) -> list[Any]:
        state, hidden = (functions.zeros, functions.zeros), []
        for x in words:
            state = fold.add(name, x, *state).split(2)
            hidden.append(state[0])
        return hidden

    losses = []
    for sentence in minibatch:
        # A repeated word is one node, because Fold reuses a node with the same arguments.
        words = [fold.add("word", word) for word in sentence.word_ids.tolist()]
        forward, backward = run("right", words), run("left", words[::-1])[::-1]
        tags = sentence.tag_ids.tolist()
        losses.append(
            [fold.add("loss", f, b, t) for f, b, t in zip(forward, backward, tags, strict=True)]
        )
    return _total(functions, fold, losses)


class BagFunctions:
    def __init__(self, model: Any) -> None:
        self.model = model

    def word(self, word: Tensor) -> Tensor:
        return self.model.embedding(word)

    def add(self, total: Tensor, x: Tensor) -> Tensor:
        return total + x

    def loss(self, total: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model.classifier(total), target, reduction="none")


def bag_of_words(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    fold = torchfold.Fold()
    losses = []
    for text in minibatch:
        first, *rest = text.word_ids.tolist()
        total = fold.add("word", first)
        for word in rest:
            total = fold.add("add", total, fold.add("word", word))
        losses.append([fold.add("loss", total, text.target_id)])
    return _total(BagFunctions(workload.model), fold, losses)


class ExpertFunctions(BagFunctions):
    """Sums the outputs with a chain of additions. Each expert has a function."""

    def __getattr__(self, name: str) -> Callable[[Tensor], Tensor]:
        expert = self.model.experts[int(name.removeprefix("expert"))]
        return lambda x: x + expert(x).relu()

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        return total / count.unsqueeze(1)


def experts(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    fold = torchfold.Fold()
    losses = []
    for text in minibatch:
        outputs = [
            fold.add(f"expert{expert}", fold.add("word", word))
            for word, expert in zip(text.word_ids.tolist(), text.experts, strict=True)
        ]
        total = outputs[0]
        for output in outputs[1:]:
            total = fold.add("add", total, output)
        mean = fold.add("mean", total, len(outputs))
        losses.append([fold.add("loss", mean, text.target_id)])
    return _total(ExpertFunctions(workload.model), fold, losses)


class ParserFunctions:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.zeros = torch.zeros(1, model.summary.out_features)

    def word(self, word: Tensor) -> Tensor:
        return self.model.words(word)

    def action(self, action: Tensor) -> Tensor:
        return self.model.actions(action)

    def buffer(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.buffer_cell(x, (h, c))

    def stack(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.stack_cell(x, (h, c))

    def history(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.action_cell(x, (h, c))

    def compose(self, head: Tensor, dependent: Tensor, action: Tensor) -> Tensor:
        return self.model.composition(head, dependent, action)

    def loss(self, top: Tensor, front: Tensor, past: Tensor, action: Tensor) -> Tensor:
        features = self.model.summary(torch.cat([top, front, past], dim=-1)).relu()
        return F.cross_entropy(self.model.score(features), action, reduction="none")


def parser(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    fold = torchfold.Fold()
    model = workload.model
    functions = ParserFunctions(model)
    start = (functions.zeros, functions.zeros)
    losses = []
    for sentence in minibatch:
        words = [fold.add("word", word) for word in sentence.word_ids.tolist()]
        buffer: list[Any] = [model.no_buffer]
        state: Sequence[Any] = start
        for word in reversed(words):
            state = fold.add("buffer", word, *state).split(2)
            buffer.append(state[0])
        words.reverse()
        stack: list[Any] = []
        history: Sequence[Any] = start
        past: Any = model.no_action
        of_actions = []
        for action in sentence.action_ids:
            top = stack[-1][1][0] if stack else model.no_stack
            of_actions.append(fold.add("loss", top, buffer[-1], past, action))
            embedded = fold.add("action", action)
            history = fold.add("history", embedded, *history).split(2)
            past = history[0]
            if action == SHIFT:
                buffer.pop()
                vector = words.pop()
            else:
                right, left = stack.pop()[0], stack.pop()[0]
                head, dependent = (right, left) if action % 2 else (left, right)
                vector = fold.add("compose", head, dependent, embedded)
            below = stack[-1][1] if stack else start
            stack.append((vector, fold.add("stack", vector, *below).split(2)))
        losses.append(of_actions)
    return _total(functions, fold, losses)


class MatrixVectorFunctions:
    """For Fold, a matrix is a row of N * N, because it concatenates along the first dimension."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def leaf(self, word: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.vector(word), self.model.matrix(word)

    def node(self, a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor) -> tuple[Tensor, Tensor]:
        n = self.model.size
        of_a, of_b = of_a.view(-1, n, n), of_b.view(-1, n, n)
        products = torch.cat([of_b @ a.unsqueeze(2), of_a @ b.unsqueeze(2)], dim=1).squeeze(2)
        matrix = self.model.w_matrix @ torch.cat([of_a, of_b], dim=1)
        return F.linear(products, self.model.w).tanh(), matrix.flatten(1)

    def loss(self, p: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.model.classifier(p), target, reduction="none")


def matrix_vector(workload: Workload, minibatch: Sequence[Any]) -> Tensor:
    return binary_trees(workload, minibatch, MatrixVectorFunctions(workload.model))


LOSSES: dict[str, Callable[[Workload, Sequence[Any]], Tensor]] = {
    "binary-tree-lstm": binary_trees,
    "tagger": tagger,
    "bag-of-words": bag_of_words,
    "mixture-of-experts": experts,
    "transition-parser": parser,
    "mv-rnn": matrix_vector,
}


def variants(workload: Workload) -> dict[str, Callable[..., Step]]:
    """Returns the workload's step if TorchFold can express it and it is implemented here."""
    losses = LOSSES.get(workload.name)
    return {} if losses is None else {"torchfold": timed_losses(losses)}
