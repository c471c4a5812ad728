"""Data from files, or synthetic data with the sizes of the papers' data (docs/benchmarks.md).

An example contains ids in two forms: as tensors of shape [1] for the per-example model, and as
NumPy arrays for collation. The tensors are made once.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from data import read_tags, read_treebank, split_and_encode

VOCABULARY = 5000
CLASSES = 5  # sentiment classes
TAGS = 9
RARE = 5  # words that occur at most this often are read letter by letter

Ids = np.ndarray


def id_tensors(count: int) -> tuple[Tensor, ...]:
    """Returns a tensor of shape [1] for each id below ``count``."""
    return torch.arange(count).unsqueeze(1).unbind()


def length(draw: Random, mean: float, deviation: float, least: int, most: int) -> int:
    """Draws a length from a log-normal distribution, clipped to ``least`` and ``most``."""
    variance = np.log(1 + (deviation / mean) ** 2)
    value = draw.lognormvariate(np.log(mean) - variance / 2, variance**0.5)
    return min(max(round(value), least), most)


def word_ids(draw: Random, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Draws ids by Zipf's law: the frequency of id k is about proportional to 1 / (k + 1)."""
    return [int(vocabulary ** draw.random()) - 1 for _ in range(count)]


# ---------------------------------------------------------------- trees


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes with children before parents, as in ``examples/data.py``. The root is the last."""

    symbols: list[Tensor]
    children: list[tuple[int, ...]]
    targets: list[Tensor]
    symbol_ids: Ids = field(repr=False)  # [nodes]
    target_ids: Ids = field(repr=False)  # [targets]
    depth: Ids = field(repr=False)  # [nodes]; 0 for the root
    is_leaf: Ids = field(repr=False)  # [nodes]
    links: Ids = field(repr=False)  # [2, links]: child and its parent, in order of parents


def make_tree(
    symbols: Sequence[Tensor], children: list[tuple[int, ...]], targets: Sequence[Tensor]
) -> Tree:
    """Makes a tree with its NumPy arrays."""
    depth = np.zeros(len(children), dtype=np.int64)
    links: list[tuple[int, int]] = []
    for node in range(len(children) - 1, -1, -1):
        for child in children[node]:
            depth[child] = depth[node] + 1
    for node, below in enumerate(children):
        links += [(child, node) for child in below]
    return Tree(
        list(symbols),
        children,
        list(targets),
        torch.cat(list(symbols)).numpy(),
        torch.cat(list(targets)).numpy() if targets else np.empty(0, dtype=np.int64),
        depth,
        np.array([not below for below in children]),
        np.array(links, dtype=np.int64).reshape(-1, 2).T.copy(),
    )


def binary_children(draw: Random, leaves: int) -> list[tuple[int, ...]]:
    """Returns the children of each node of a random binary tree.

    The tree is about as deep as the parse tree of an English sentence (SST: height 10.8).
    """
    children: list[tuple[int, ...]] = []

    def grow(size: int) -> int:
        if size > 1:
            left = 1 if draw.random() < 0.4 else draw.randint(1, size - 1)
            first = grow(left)
            children.append((first, grow(size - left)))
        else:
            children.append(())
        return len(children) - 1

    grow(leaves)
    return children


def dependency_children(draw: Random, words: int) -> list[tuple[int, ...]]:
    """Returns the children of each node of a random tree with a word at every node.

    Dependency parsers produce trees of this form.
    """
    parents = [draw.randrange(max(0, node - 6), node) for node in range(1, words)]
    below: list[list[int]] = [[] for _ in range(words)]
    for node, parent in enumerate(parents, start=1):
        below[words - 1 - parent].append(words - 1 - node)
    return [tuple(sorted(nodes)) for nodes in below]


def sentiment_trees(path: Path | None, count: int, draw: Random) -> tuple[list[Tree], int, int]:
    """Returns binary trees, the size of the vocabulary and the number of classes.

    The trees have a word at each leaf and a class at each node. They are read from ``path``. If it
    is None, ``count`` random trees are made.
    """
    if path is not None:
        data = split_and_encode(read_treebank(path), seed=0)
        trees = [make_tree(e.symbols, e.children, e.targets) for e in data.train]
        return trees, data.vocabulary, data.classes
    symbols, targets = id_tensors(VOCABULARY), id_tensors(CLASSES)
    trees = []
    for _ in range(count):
        children = binary_children(draw, length(draw, 19.1, 9.3, 2, 52))
        words = word_ids(draw, len(children))
        trees.append(
            make_tree(
                [symbols[0 if c else w] for c, w in zip(children, words, strict=True)],
                children,
                [targets[draw.randrange(CLASSES)] for _ in children],
            )
        )
    return trees, VOCABULARY, CLASSES


# ---------------------------------------------------------------- sentences


@dataclass(frozen=True, slots=True)
class Sentence:
    """Words and their tags. ``letters`` is empty for a word that has an embedding."""

    symbols: list[Tensor]
    targets: list[Tensor]
    letters: list[list[Tensor]]
    word_ids: Ids = field(repr=False)
    tag_ids: Ids = field(repr=False)
    letter_ids: list[Ids] = field(repr=False)  # ids for the words that have letters
    spelled: Ids = field(repr=False)  # [words]: whether the word has letters


@dataclass(frozen=True)
class Sentences:
    """Tagged sentences and the sizes that a model for them needs."""

    examples: list[Sentence]
    vocabulary: int
    tags: int
    letters: int = 0


def make_sentence(
    words: Sequence[Tensor], tags: Sequence[Tensor], letters: list[list[Tensor]]
) -> Sentence:
    """Makes a sentence with its NumPy arrays."""
    return Sentence(
        list(words),
        list(tags),
        letters,
        torch.cat(list(words)).numpy(),
        torch.cat(list(tags)).numpy(),
        [torch.cat(word).numpy() for word in letters if word],
        np.array([bool(word) for word in letters]),
    )


def tagged_sentences(path: Path | None, count: int, draw: Random) -> Sentences:
    """Returns tagged sentences from ``path``, or ``count`` random sentences if it is None.

    Rare words have letters. In random sentences they are a third of all words, as in the WikiNER
    sample.
    """
    if path is not None:
        return _read_sentences(path)
    words, tags, letters = id_tensors(VOCABULARY), id_tensors(TAGS), id_tensors(60)
    examples = []
    for _ in range(count):
        ids = word_ids(draw, length(draw, 23.0, 13.1, 1, 144))
        spelled = [
            [letters[draw.randrange(60)] for _ in range(length(draw, 6.8, 2.5, 1, 20))]
            if draw.random() < 0.32
            else []
            for _ in ids
        ]
        examples.append(
            make_sentence(
                [words[i] for i in ids], [tags[draw.randrange(TAGS)] for _ in ids], spelled
            )
        )
    return Sentences(examples, VOCABULARY, TAGS, 60)


def _read_sentences(path: Path) -> Sentences:
    raw = read_tags(path)
    counts = Counter(word for example in raw for word in example.symbols)
    known = {word: i for i, word in enumerate((w for w, n in counts.items() if n > RARE), start=1)}
    tag_ids = {tag: i for i, tag in enumerate(sorted({t for e in raw for t in e.labels}))}
    alphabet = {letter: i for i, letter in enumerate(sorted(set("".join(counts))))}
    words, tags, letters = map(id_tensors, (len(known) + 1, len(tag_ids), len(alphabet)))
    examples = [
        make_sentence(
            [words[known.get(word, 0)] for word in example.symbols],
            [tags[tag_ids[tag]] for tag in example.labels],
            [
                [letters[alphabet[letter]] for letter in word] if word not in known else []
                for word in example.symbols
            ],
        )
        for example in raw
    ]
    return Sentences(examples, len(words), len(tags), len(letters))
