"""A transformer encoder that tags every word of one sentence at a time.

    python examples/transformer_tagger.py               tokens of statements of Python's own source
    python examples/transformer_tagger.py --tags FILE   word|tag word|tag

Trains the model on minibatches of sentences of different lengths, without padding or masks. Then
compares its speed with eager mode. On Python's source, the model learns the role of each name in
its statement.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import io
import itertools
import keyword
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

import demo
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from data import (
    MODULES,
    DataError,
    Dataset,
    Example,
    RawExample,
    read_tags,
    split_and_encode,
)
from torch import Tensor, nn

LONGEST = 256  # longer sentences are cut
TOKENS_PER_STATEMENT = (5, 40)
STATEMENTS_PER_MODULE = 300


class TransformerTagger(nn.Module):
    """Tags every word of a sentence. All activations have the shape [words, width]."""

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        width: int = 256,
        heads: int = 4,
        layers: int = 2,
        feedforward: int = 1024,
        dropout: float = 0.1,
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(LONGEST, width) / 10)
        layer = nn.TransformerEncoderLayer(
            width, heads, feedforward, dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.tagger = nn.Linear(width, classes)

    def scores(self, sentence: Example) -> list[Tensor]:
        """Returns a list with one tensor: the tag scores of all words, [words, classes]."""
        words = self.embedding(torch.cat(sentence.symbols))
        return [self.tagger(self.encoder(words + self.position[: len(words)]))]

    def forward(self, sentence: Example) -> Tensor:
        """Returns the sum of the losses at the words of one sentence, of shape []."""
        (scores,) = self.scores(sentence)
        return F.cross_entropy(scores, torch.cat(sentence.targets), reduction="sum")


# ---------------------------------------------------------------- statements of Python


def read_statements(modules: str = MODULES) -> list[RawExample]:
    """Returns simple statements of the standard library: tokens, and the role of each name."""
    examples = []
    for module in modules.split():
        try:
            found = importlib.util.find_spec(module)
            source = Path(found.origin or "").read_text("utf-8") if found else ""
            statements = list(itertools.islice(_statements(source), STATEMENTS_PER_MODULE))
        except (ImportError, OSError, UnicodeDecodeError, SyntaxError, tokenize.TokenError):
            continue
        examples += statements
    return examples


def _statements(source: str) -> Iterator[RawExample]:
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or hasattr(node, "body"):
            continue
        if node.end_lineno is None or node.end_col_offset is None:
            continue
        text = "".join(lines[node.lineno - 1 : node.end_lineno])
        if not text.isascii():  # ast columns count bytes, not characters
            continue
        after = len(lines[node.end_lineno - 1]) - node.end_col_offset
        symbols, labels = _tokens(text[node.col_offset : len(text) - after])
        least, most = TOKENS_PER_STATEMENT
        if least <= len(symbols) <= most:
            yield RawExample(symbols, [], labels)


def _tokens(statement: str) -> tuple[list[str], list[str]]:
    """Returns the symbol and the role of each token. The role is "O" unless it is a name.

    Both lists are empty if the statement can't be parsed by itself.
    """
    try:
        roles = _roles(ast.parse(statement))
        tokens = list(tokenize.generate_tokens(io.StringIO(statement).readline))
    except (SyntaxError, tokenize.TokenError):
        return [], []
    symbols, labels = [], []
    for token in tokens:
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.COMMENT, tokenize.ENDMARKER):
            continue
        if token.type in (tokenize.INDENT, tokenize.DEDENT):
            continue
        if token.type == tokenize.NAME and not keyword.iskeyword(token.string):
            symbols.append(f"name {token.string}")  # becomes "name" if the symbol is rare
            labels.append(roles.get(token.start, "other"))
        else:
            literal = token.type in (tokenize.STRING, tokenize.NUMBER)
            symbols.append(tokenize.tok_name[token.type] if literal else token.string)
            labels.append("O")
    return symbols, labels


def _roles(tree: ast.AST) -> dict[tuple[int, int], str]:
    """Returns the role of each name, by line and column of its first character."""
    roles: dict[tuple[int, int], str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            role = "read" if isinstance(node.ctx, ast.Load) else "written"
            roles.setdefault((node.lineno, node.col_offset), role)
        elif isinstance(node, ast.Attribute) and node.end_lineno and node.end_col_offset:
            place = (node.end_lineno, node.end_col_offset - len(node.attr))
            roles.setdefault(place, "attribute")
        elif isinstance(node, ast.keyword | ast.arg) and node.arg:
            roles[node.lineno, node.col_offset] = type(node).__name__
        elif isinstance(node, ast.alias):
            roles[node.lineno, node.col_offset] = "imported"
        if isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name):
                roles[called.lineno, called.col_offset] = "called"
            elif isinstance(called, ast.Attribute) and called.end_lineno and called.end_col_offset:
                roles[called.end_lineno, called.end_col_offset - len(called.attr)] = "method"
    return roles


# ---------------------------------------------------------------- training


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, evaluates, and compares with eager. Returns the exit status."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    try:
        raw = read_tags(options.tags) if options.tags else read_statements()
        if len(raw) < 2:
            raise DataError(options.tags or Path("."), None, "one sentence", "at least two")
    except DataError as error:
        print(f"transformer_tagger: {error}", file=sys.stderr)
        return 2
    raw = [_shortened(example) for example in raw]
    dataset = split_and_encode(raw, seed=options.seed, min_count=options.min_count)
    lengths = [len(example.symbols) for example in raw]
    print(
        f"{len(raw):,} sentences of {min(lengths)} to {max(lengths)} words, "
        f"{dataset.vocabulary:,} symbols, {dataset.classes} tags"
    )
    model = TransformerTagger(dataset.vocabulary, dataset.classes, dropout=options.dropout)
    if options.steps > 0:
        train(model, dataset, options)
    model.eval()  # without dropout, whose random numbers differ from eager mode
    return demo.compare(model, dataset, options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tags", type=Path, metavar="FILE", help="tagged sentences, one a line")
    add("--steps", type=int, default=100, help="training steps at most (%(default)s)")
    add("--seconds-budget", type=float, default=120.0, metavar="S", help="(%(default)s)")
    add("--minibatch", type=int, default=64, help="sentences a step (%(default)s)")
    add("--dropout", type=float, default=0.1, help="(%(default)s)")
    add("--min-count", type=int, default=5, help="rarer words are unknown (%(default)s)")
    add("--rounds", type=int, default=5, help="rounds timed (%(default)s)")
    add("--threads", type=int, default=1, help="threads of PyTorch (%(default)s)")
    add("--policy", default="auto", help="how batches are chosen (%(default)s)")
    add("--seed", type=int, default=0)
    add("--report", action="store_true", help="print the report of the last minibatch")
    return parser.parse_args(arguments)


def _shortened(example: RawExample) -> RawExample:
    return RawExample(example.symbols[:LONGEST], [], example.labels[:LONGEST])


def train(model: TransformerTagger, dataset: Dataset, options: argparse.Namespace) -> None:
    """Trains until the limit of steps or the limit of seconds is reached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    minibatches = demo.shuffled_minibatches(dataset.train, options.minibatch, options.seed)
    progress = demo.Progress(options.steps, options.seconds_budget)
    while not progress.finished:
        minibatch = next(minibatches)
        optimizer.zero_grad(set_to_none=True)
        with ab.batch(policy=options.policy):
            losses = torch.stack([model(sentence) for sentence in minibatch])
        words = sum(len(sentence.targets) for sentence in minibatch)
        loss = losses.sum() / words
        torch.autograd.backward(loss)
        optimizer.step()
        progress.step(loss.item())
    progress.close()
    model.eval()
    print(f"accuracy on held-out data: {demo.accuracy(model, dataset, options):.1%}\n")
    model.train()


if __name__ == "__main__":
    sys.exit(main())
