"""Data for the examples: syntax trees of Python functions, sentiment treebanks, tagged sentences.

A tree is a flat list of nodes with children before parents. The root is the last node, and a model
walks a tree of any depth with a plain loop. Ids are tensors of shape [1]. The tensor of each id is
made once, when the data is read.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SENTIMENTS = ("0", "1", "2", "3", "4")  # from very negative to very positive

# Modules of the standard library that define many functions. Modules that a Python version lacks,
# or whose functions have moved elsewhere, are skipped.
MODULES = """
_collections_abc _pydecimal _pyio argparse ast asyncio.base_events asyncio.events
asyncio.selector_events asyncio.unix_events codecs collections configparser datetime doctest
email._header_value_parser enum http.cookiejar imaplib importlib._bootstrap_external inspect
ipaddress logging mailbox multiprocessing.connection multiprocessing.managers optparse pathlib
pdb pickle pydoc ssl tarfile tempfile threading typing unittest.case unittest.mock
urllib.request xmlrpc.client zipfile
"""
FUNCTIONS_PER_MODULE = (20, 100)  # minimum (smaller modules are skipped), and maximum that is used
NODES_PER_FUNCTION = (10, 150)


class DataError(Exception):
    """Invalid input. The message states the place, what was found, and what was expected."""

    def __init__(self, path: Path, line: int | None, found: str, expected: str) -> None:
        place = str(path) if line is None else f"{path}, line {line}"
        super().__init__(f"{place}: found {found}, expected {expected}")


@dataclass(frozen=True, slots=True)
class RawExample:
    """A tree or a sentence as read. ``labels`` are the targets of a model, in order."""

    symbols: list[str]  # names of the nodes; empty for inner nodes of a treebank
    children: list[tuple[int, ...]]  # positions of each node's children; empty for a sentence
    labels: list[str]


@dataclass(frozen=True, slots=True)
class Example:
    """A tree or a sentence as a model reads it: symbols and labels are ids of shape [1]."""

    symbols: list[Tensor]
    children: list[tuple[int, ...]]
    targets: list[Tensor]


@dataclass(frozen=True, slots=True)
class Dataset:
    """Encoded examples. The vocabulary is built only from the training part."""

    train: list[Example]
    held_out: list[Example]
    vocabulary: int  # number of symbol ids; id 0 stands for unknown symbols
    classes: int


def split_and_encode(
    raw: Sequence[RawExample], *, seed: int, min_count: int = 2, held_out: float = 0.1
) -> Dataset:
    """Splits off random test data. Numbers the symbols that occur ``min_count`` times in the rest.

    A rare symbol of two words, such as ``Name frobnicate``, is replaced by its first word.
    """
    shuffled = list(raw)
    random.Random(seed).shuffle(shuffled)
    size = min(max(1, round(held_out * len(shuffled))), len(shuffled) - 1)
    test, train = shuffled[:size], shuffled[size:]

    counts: Counter[str] = Counter()
    for example in train:
        for symbol in example.symbols:
            counts[symbol] += 1
            kind, _, name = symbol.partition(" ")
            if name:
                counts[kind] += 1
    known = [symbol for symbol, count in counts.most_common() if symbol and count >= min_count]
    symbol_ids = {symbol: i for i, symbol in enumerate(known, start=1)}
    label_ids = {label: i for i, label in enumerate(sorted({s for e in raw for s in e.labels}))}
    # Each id has one tensor, which all uses of the id share.
    symbols = torch.arange(len(known) + 1).unsqueeze(1).unbind()
    labels = torch.arange(len(label_ids)).unsqueeze(1).unbind()

    def encode(example: RawExample) -> Example:
        def lookup(symbol: str) -> Tensor:
            kind = symbol.partition(" ")[0]
            return symbols[symbol_ids.get(symbol, symbol_ids.get(kind, 0))]

        return Example(
            [lookup(symbol) for symbol in example.symbols],
            example.children,
            [labels[label_ids[label]] for label in example.labels],
        )

    return Dataset(
        [encode(example) for example in train],
        [encode(example) for example in test],
        vocabulary=len(symbols),
        classes=len(labels),
    )


# ---------------------------------------------------------------- Python's own syntax trees


def read_functions(library: Path | None = None, modules: str = MODULES) -> list[RawExample]:
    """Returns functions and methods of the standard library as trees, labelled with their module.

    Raises:
        DataError: if fewer than two modules have enough functions.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    fewest, most = FUNCTIONS_PER_MODULE
    examples: list[RawExample] = []
    taken = 0
    for module in modules.split():
        path = library.joinpath(*module.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not source.is_file():
            continue
        trees = [_syntax_tree(function) for function in _functions(ast.parse(source.read_bytes()))]
        low, high = NODES_PER_FUNCTION
        trees = [tree for tree in trees if low <= len(tree[0]) <= high]
        if len(trees) >= fewest:
            examples += [RawExample(*tree, [module]) for tree in trees[:most]]
            taken += 1
    if taken < 2:
        found = f"{taken} modules with {fewest} functions or more"
        raise DataError(library, None, found, "the sources of Python's standard library")
    return examples


def _functions(module: ast.Module) -> Iterator[ast.AST]:
    """Yields functions in source order, except functions inside other functions."""
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def _syntax_tree(function: ast.AST) -> tuple[list[str], list[tuple[int, ...]]]:
    """Returns symbols and children. Operators are part of their parent's symbol."""
    folded = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)
    nodes = [node for node in ast.walk(function) if not isinstance(node, folded)]
    nodes.reverse()  # ast.walk yields parents first
    position = {node: i for i, node in enumerate(nodes)}
    children = [
        tuple(position[child] for child in ast.iter_child_nodes(node) if child in position)
        for node in nodes
    ]
    return [_symbol(node) for node in nodes], children


def _symbol(node: ast.AST) -> str:
    """Returns the type of a node and, after a space, its identifier, operator or constant."""
    kind = type(node).__name__
    match node:
        case ast.Name(id=str(name)) | ast.Attribute(attr=str(name)):
            return f"{kind} {name}"
        case ast.arg(arg=str(name)) | ast.keyword(arg=str(name)) | ast.alias(name=str(name)):
            return f"{kind} {name}"
        case ast.FunctionDef(name=str(name)) | ast.AsyncFunctionDef(name=str(name)):
            return f"{kind} {name}"
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.UnaryOp(op=op) | ast.AugAssign(op=op):
            return f"{kind} {type(op).__name__}"
        case ast.Compare(ops=[op, *_]):
            return f"{kind} {type(op).__name__}"
        case ast.Constant(value=value):
            return f"{type(value).__name__} {value!r}"
    return kind


# ---------------------------------------------------------------- files


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines that are not empty, with their line numbers.

    Raises:
        DataError: if the file can't be read, is not in UTF-8, or has only empty lines.
    """
    empty = True
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                empty = False
                try:
                    yield number, line.decode("utf-8")
                except UnicodeDecodeError as error:
                    found = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
                    raise DataError(path, number, found, "text in UTF-8") from None
    except OSError as error:
        raise DataError(path, None, error.strerror or str(error), "a readable text file") from None
    if empty:
        raise DataError(path, None, "an empty file", "at least one line")


def read_treebank(path: Path) -> list[RawExample]:
    """Reads binary trees in Penn brackets with a sentiment on each node: ``(3 (2 a) (4 b))``.

    The file has one tree on each line.

    Raises:
        DataError: if the file can't be read, or a line is not such a tree.
    """
    return [_parse_tree(path, number, line) for number, line in _lines(path)]


def _parse_tree(path: Path, number: int, line: str) -> RawExample:
    symbols: list[str] = []
    children: list[tuple[int, ...]] = []
    labels: list[str] = []
    # Open brackets: label, word and children so far.
    stack: list[tuple[str, list[str], list[int]]] = []

    def fail(match: re.Match[str] | None, expected: str) -> DataError:
        found = "the end of the line"
        if match is not None:
            found = f"{match[0]!r} at column {match.start() + 1}"
        return DataError(path, number, found, expected)

    # Only ASCII spaces separate words, because the treebank has words with a no-break space.
    tokens = re.finditer(r"[()]|[^()\s]+", line, re.ASCII)
    for token in tokens:
        if labels and not stack:
            raise fail(token, "one tree a line")
        if token[0] == "(":
            if stack and (stack[-1][1] or len(stack[-1][2]) == 2):
                raise fail(token, "')' (a node has one word or two subtrees)")
            label = next(tokens, None)
            if label is None or label[0] not in SENTIMENTS:
                raise fail(label, "a sentiment from 0 to 4 after '('")
            stack.append((label[0], [], []))
        elif not stack:
            raise fail(token, "'('")
        elif token[0] == ")":
            label_text, words, below = stack.pop()
            if len(words) + len(below) == 0:
                raise fail(token, "a word or two subtrees")
            if len(below) == 1:
                raise fail(token, "a second subtree (trees are binary)")
            symbols.append(words[0] if words else "")
            children.append(tuple(below))
            labels.append(label_text)
            if stack:
                stack[-1][2].append(len(labels) - 1)
        elif stack[-1][1]:
            raise fail(token, "')' (a leaf has one word)")
        elif stack[-1][2]:
            raise fail(token, "'(' or ')' (a node has one word or two subtrees)")
        else:
            stack[-1][1].append(token[0])
    if stack:
        raise fail(None, f"{len(stack)} more ')'")
    return RawExample(symbols, children, labels)


def read_tags(path: Path) -> list[RawExample]:
    """Reads tagged sentences, one on each line: ``Bonn|LOC is|O old|O``.

    The last bar of a word separates the word from its tag.

    Raises:
        DataError: if the file can't be read, or a word has no tag.
    """
    examples = []
    for number, line in _lines(path):
        words: list[str] = []
        tags: list[str] = []
        for token in re.finditer(r"\S+", line, re.ASCII):
            word, _, tag = token[0].rpartition("|")
            if not word or not tag:
                found = f"{token[0]!r} at column {token.start() + 1}"
                raise DataError(path, number, found, "word|tag")
            words.append(word)
            tags.append(tag)
        examples.append(RawExample(words, [], tags))
    return examples
