"""DyNet (dyNET38 on PyPI), its Python API: autobatching by agenda (1) or by depth (2), or none
(0).

It has tensors, parameters and autograd of its own, so parameters are copied to it once, and the
gradients back after the clock has stopped. The kind of autobatching is one for the process:
AUTOBATCH_DYNET=0, 1 or 2 in the environment, 1 if it is not set.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Step, clock
from benchmarks.workload import Workload

# isort: split
import dynet_config  # before DyNet, which reads it

KIND = int(os.environ.get("AUTOBATCH_DYNET", "1"))
dynet_config.set(mem="4096", autobatch=KIND, random_seed=1)
import dynet as dy  # noqa: E402

Losses = Callable[[Any, dict[str, Any], Sequence[Any]], list[Any]]


class Parameters:
    """A workload's parameters in DyNet; embeddings are lookup parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.collection = dy.ParameterCollection()
        self.made: dict[str, Any] = {}
        self.lookups = {
            f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Embedding)
        }
        for name, value in model.named_parameters():
            array = value.detach().numpy()
            if name.endswith("bias_hh"):
                continue  # below
            if name.endswith("bias_ih"):
                # A cell's two biases are one here. Their sum would be computed, and DyNet's agenda
                # loses most of the gradient of a computed bias that a batch shares.
                array = array + model.get_parameter(name[:-2] + "hh").detach().numpy()
            if name in self.lookups:
                self.made[name] = self.collection.lookup_parameters_from_numpy(array)
            else:
                self.made[name] = self.collection.parameters_from_numpy(array)

    def clear(self) -> None:
        """Sets the gradients to zero."""
        for parameter in self.made.values():
            parameter.scale_gradient(0)

    def gradients(self) -> dict[str, Tensor | None]:
        """Copies of them."""
        found = {name: torch.tensor(p.grad_as_array()) for name, p in self.made.items()}
        both = [name for name in found if name.endswith("bias_ih")]
        return {**found, **{name[:-2] + "hh": found[name] for name in both}}


def _class_loss(p: dict[str, Any], name: str, h: Any, target: int) -> Any:
    scores = dy.affine_transform([p[f"{name}.bias"], p[f"{name}.weight"], h])
    return dy.pickneglogsoftmax(scores, target)


def _split(gates: Any, hidden: int, count: int) -> list[Any]:
    return [dy.pickrange(gates, k * hidden, (k + 1) * hidden) for k in range(count)]


def bag_of_words(model: Any, p: dict[str, Any], minibatch: Sequence[Any]) -> list[Any]:
    losses = []
    for text in minibatch:
        first, *rest = text.word_ids.tolist()
        total = p["embedding.weight"][first]
        for word in rest:
            total = total + p["embedding.weight"][word]
        losses.append(_class_loss(p, "classifier", total, text.target_id))
    return losses


def experts(model: Any, p: dict[str, Any], minibatch: Sequence[Any]) -> list[Any]:
    losses = []
    for text in minibatch:
        outputs = []
        for word, k in zip(text.word_ids.tolist(), text.experts, strict=True):
            x = p["embedding.weight"][word]
            y = dy.affine_transform([p[f"experts.{k}.bias"], p[f"experts.{k}.weight"], x])
            outputs.append(x + dy.rectify(y))
        losses.append(_class_loss(p, "classifier", dy.average(outputs), text.target_id))
    return losses


def binary_trees(model: Any, p: dict[str, Any], minibatch: Sequence[Any]) -> list[Any]:
    hidden = model.classifier.in_features
    losses = []
    for tree in minibatch:
        states: list[tuple[Any, Any]] = []
        of_tree = []
        words, targets = tree.symbol_ids.tolist(), tree.target_ids.tolist()
        for word, children, target in zip(words, tree.children, targets, strict=True):
            if children:
                (h_left, c_left), (h_right, c_right) = (states[child] for child in children)
                below = dy.concatenate([h_left, h_right])
                gates = dy.affine_transform([p["u.bias"], p["u.weight"], below])
                i, o, u, f_left, f_right = _split(gates, hidden, 5)
                c = dy.cmult(dy.logistic(i), dy.tanh(u))
                c = c + dy.cmult(dy.logistic(f_left), c_left)
                c = c + dy.cmult(dy.logistic(f_right), c_right)
            else:
                x = p["embedding.weight"][word]
                i, o, u = _split(dy.affine_transform([p["w.bias"], p["w.weight"], x]), hidden, 3)
                c = dy.cmult(dy.logistic(i), dy.tanh(u))
            h = dy.cmult(dy.logistic(o), dy.tanh(c))
            states.append((h, c))
            of_tree.append(_class_loss(p, "classifier", h, target))
        losses.append(dy.esum(of_tree))
    return losses


def tagger(model: Any, p: dict[str, Any], minibatch: Sequence[Any]) -> list[Any]:
    hidden = model.left_to_right.weight_hh.shape[1]

    def run(cell: str, xs: Sequence[Any]) -> list[Any]:
        w, u, bias = (p[f"{cell}.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih"))
        h = c = None
        states = []
        for x in xs:
            gates = dy.affine_transform([bias, w, x] if h is None else [bias, w, x, u, h])
            i, f, g, o = _split(gates, hidden, 4)
            written = dy.cmult(dy.logistic(i), dy.tanh(g))
            c = written if c is None else dy.cmult(dy.logistic(f), c) + written
            h = dy.cmult(dy.logistic(o), dy.tanh(c))
            states.append(h)
        return states

    losses = []
    for sentence in minibatch:
        xs = [p["embedding.weight"][word] for word in sentence.word_ids.tolist()]
        forward, backward = run("left_to_right", xs), run("right_to_left", xs[::-1])[::-1]
        of_words = []
        for left, right, tag in zip(forward, backward, sentence.tag_ids.tolist(), strict=True):
            both = dy.concatenate([left, right])
            inner = dy.affine_transform([p["tagger.0.bias"], p["tagger.0.weight"], both])
            of_words.append(_class_loss(p, "tagger.2", dy.tanh(inner), tag))
        losses.append(dy.esum(of_words))
    return losses


LOSSES: dict[str, Losses] = {
    "bag-of-words": bag_of_words,
    "mixture-of-experts": experts,
    "binary-tree-lstm": binary_trees,
    "tagger": tagger,
    "tagger-gates": tagger,
}


def variants(workload: Workload) -> dict[str, Callable[..., Step]]:
    """The workload's step, if it is written here."""
    losses = LOSSES.get(workload.name)
    if losses is None:
        return {}
    parameters = Parameters(workload.model)

    def run(workload: Workload, minibatch: Sequence[Any], backward: bool) -> Step:
        parameters.clear()
        start = clock()
        dy.renew_cg()
        values = losses(workload.model, parameters.made, minibatch)
        total = dy.esum(values)
        built = clock()
        total.forward()
        forward = clock()
        if backward:
            total.backward()
        end = clock()
        stages = {"build": built - start, "forward": forward - built, "backward": end - forward}
        step = Step(end - start, torch.tensor([v.value() for v in values]), {}, stages)
        step.own_gradients = parameters.gradients() if backward else None
        return step

    return {f"dynet (autobatch {KIND})": run}
