"""The workloads' losses in DyNet, written example by example as DyNet's users do.

Each function takes the PyTorch model (for its sizes), the parameters by their names in this model,
and a minibatch. It returns the examples' losses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import dynet as dy

from benchmarks.workloads.parser import SHIFT

Losses = Callable[[Any, dict[str, Any], Sequence[Any]], list[Any]]
State = tuple[Any, Any]


def _class_loss(p: dict[str, Any], name: str, h: Any, target: int) -> Any:
    scores = dy.affine_transform([p[f"{name}.bias"], p[f"{name}.weight"], h])
    return dy.pickneglogsoftmax(scores, target)


def _split(gates: Any, hidden: int, count: int) -> list[Any]:
    return [dy.pickrange(gates, k * hidden, (k + 1) * hidden) for k in range(count)]


def _lstm_step(p: dict[str, Any], cell: str, hidden: int, x: Any, state: State | None) -> State:
    """Runs a step. The two biases of the cell are one parameter, ``bias_ih`` (see Parameters)."""
    w, u, bias = (p[f"{cell}.{name}"] for name in ("weight_ih", "weight_hh", "bias_ih"))
    operands = [bias, w, x] if state is None else [bias, w, x, u, state[0]]
    i, f, g, o = _split(dy.affine_transform(operands), hidden, 4)
    written = dy.cmult(dy.logistic(i), dy.tanh(g))
    c = written if state is None else dy.cmult(dy.logistic(f), state[1]) + written
    return dy.cmult(dy.logistic(o), dy.tanh(c)), c


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


def _tree_losses(
    p: dict[str, Any],
    minibatch: Sequence[Any],
    leaf: Callable[[int], State],
    node: Callable[[State, State], State],
    vector: Callable[[State], Any],
) -> list[Any]:
    """Returns the losses of binary trees with a loss at each node, from the state's ``vector``."""
    losses = []
    for tree in minibatch:
        states: list[State] = []
        of_tree = []
        words, targets = tree.symbol_ids.tolist(), tree.target_ids.tolist()
        for word, children, target in zip(words, tree.children, targets, strict=True):
            states.append(node(*(states[k] for k in children)) if children else leaf(word))
            of_tree.append(_class_loss(p, "classifier", vector(states[-1]), target))
        losses.append(dy.esum(of_tree))
    return losses


def binary_trees(model: Any, p: dict[str, Any], minibatch: Sequence[Any]) -> list[Any]:
    hidden = model.classifier.in_features

    def leaf(word: int) -> State:
        x = p["embedding.weight"][word]
        i, o, u = _split(dy.affine_transform([p["w.bias"], p["w.weight"], x]), hidden, 3)
        c = dy.cmult(dy.logistic(i), dy.tanh(u))
        return dy.cmult(dy.logistic(o), dy.tanh(c)), c

    def node(left: State, right: State) -> State:
        (h_left, c_left), (h_right, c_right) = left, right
        below = dy.concatenate([h_left, h_right])
        gates = dy.affine_transform([p["u.bias"], p["u.weight"], below])
        i, o, u, f_left, f_right = _split(gates, hidden, 5)
        c = dy.cmult(dy.logistic(i), dy.tanh(u))
        c = c + dy.cmult(dy.logistic(f_left), c_left)
        c = c + dy.cmult(dy.logistic(f_right), c_right)
        return dy.cmult(dy.logistic(o), dy.tanh(c)), c

    return _tree_losses(p, minibatch, leaf, node, lambda state: state[0])


def _child_sum_root(p: dict[str, Any], hidden: int, tree: Any) -> Any:
    p = {name.removeprefix("encoder."): value for name, value in p.items()}
    states: list[State] = []
    for word, children in zip(tree.symbol_ids.tolist(), tree.children, strict=True):
        x = p["embedding.weight"][word]
        operands = [p["w_iou.bias"], p["w_iou.weight"], x]
        if children:
            below = dy.esum([states[child][0] for child in children])
            operands += [p["u_iou.weight"], below]
        i, o, u = _split(dy.affine_transform(operands), hidden, 3)
        c = dy.cmult(dy.logistic(i), dy.tanh(u))
        if children:
            of_word = dy.affine_transform([p["w_f.bias"], p["w_f.weight"], x])
            gates = [
                dy.logistic(of_word + p["u_f.weight"] * states[child][0]) for child in children
            ]
            kept = [dy.cmult(f, states[k][1]) for f, k in zip(gates, children, strict=True)]
            c = dy.esum([c, *kept])
        states.append((dy.cmult(dy.logistic(o), dy.tanh(c)), c))
    return states[-1][0]


def child_sum_pairs(model: Any, p: dict[str, Any], minibatch: Sequence[Any]) -> list[Any]:
    hidden = model.angle.in_features
    losses = []
    for pair in minibatch:
        left, right = (_child_sum_root(p, hidden, tree) for tree in (pair.left, pair.right))
        near = dy.affine_transform([p["distance.bias"], p["distance.weight"], dy.abs(left - right)])
        similar = dy.logistic(p["angle.weight"] * dy.cmult(left, right) + near)
        scores = dy.affine_transform([p["out.bias"], p["out.weight"], similar])
        target = pair.target.flatten()
        entropy = float(target.xlogy(target).sum())  # entropy of the target, a constant
        wanted = dy.inputVector(target.tolist())
        losses.append(dy.scalarInput(entropy) - dy.dot_product(wanted, dy.log_softmax(scores)))
    return losses


def tagger(model: Any, p: dict[str, Any], minibatch: Sequence[Any]) -> list[Any]:
    hidden = model.left_to_right.weight_hh.shape[1]

    def run(cell: str, xs: Sequence[Any]) -> list[Any]:
        state: State | None = None
        states = []
        for x in xs:
            state = _lstm_step(p, cell, hidden, x, state)
            states.append(state[0])
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


def parser(model: Any, p: dict[str, Any], minibatch: Sequence[Any]) -> list[Any]:
    hidden = model.summary.out_features
    nothing = {name: dy.transpose(p[name]) for name in ("no_stack", "no_buffer", "no_action")}
    losses = []
    for sentence in minibatch:
        words = [p["words.weight"][word] for word in sentence.word_ids.tolist()]
        buffer = [nothing["no_buffer"]]
        state: State | None = None
        for word in reversed(words):
            state = _lstm_step(p, "buffer_cell", hidden, word, state)
            buffer.append(state[0])
        words.reverse()
        stack: list[tuple[Any, State]] = []
        history: State | None = None
        of_actions = []
        for action in sentence.action_ids:
            top = stack[-1][1][0] if stack else nothing["no_stack"]
            past = nothing["no_action"] if history is None else history[0]
            seen = dy.concatenate([top, buffer[-1], past])
            features = dy.affine_transform([p["summary.bias"], p["summary.weight"], seen])
            of_actions.append(_class_loss(p, "score", dy.rectify(features), action))
            embedded = p["actions.weight"][action]
            history = _lstm_step(p, "action_cell", hidden, embedded, history)
            if action == SHIFT:
                buffer.pop()
                vector = words.pop()
            else:
                right, left = stack.pop()[0], stack.pop()[0]
                pair = [right, left] if action % 2 else [left, right]
                joined = dy.concatenate([*pair, embedded])
                vector = dy.tanh(
                    dy.affine_transform([p["compose.bias"], p["compose.weight"], joined])
                )
            below = stack[-1][1] if stack else None
            stack.append((vector, _lstm_step(p, "stack_cell", hidden, vector, below)))
        losses.append(dy.esum(of_actions))
    return losses


def matrix_vector(model: Any, p: dict[str, Any], minibatch: Sequence[Any]) -> list[Any]:
    """DyNet fills matrices by columns, so a word's matrix is the transpose of PyTorch's. Therefore
    all matrices are transposed, and vectors are rows."""
    n = model.size
    w, w_matrix = dy.transpose(p["w"]), dy.transpose(p["w_matrix"])

    def leaf(word: int) -> State:
        vector, matrix = p["vector.weight"][word], p["matrix.weight"][word]
        return dy.reshape(vector, (1, n)), dy.reshape(matrix, (n, n))

    def node(left: State, right: State) -> State:
        (a, A), (b, B) = left, right
        v = dy.tanh(dy.concatenate_cols([a * B, b * A]) * w)
        return v, dy.concatenate_cols([A, B]) * w_matrix

    return _tree_losses(p, minibatch, leaf, node, lambda state: dy.reshape(state[0], (n,)))


LOSSES: dict[str, Losses] = {
    "bag-of-words": bag_of_words,
    "mixture-of-experts": experts,
    "binary-tree-lstm": binary_trees,
    "child-sum-pairs": child_sum_pairs,
    "tagger": tagger,
    "tagger-gates": tagger,
    "transition-parser": parser,
    "mv-rnn": matrix_vector,
}
