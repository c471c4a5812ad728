"""The examples' readers on valid and malformed input, and the demo from end to end."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import data
import deep_sets
import demo
import generate
import graph_classifier
import neural_modules
import pytest
import torch
import torch_autobatch as ab
from data import DataError, RawExample, read_functions, read_tags, read_treebank, split_and_encode


def written(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


# ---------------------------------------------------------------- treebanks


def test_treebank(tmp_path: Path) -> None:
    path = written(tmp_path / "trees", "(3 (2 a) (4 (1 b) (0 c\\/d)))\n\n  (2 lone)  \r\n")
    nested, lone = read_treebank(path)
    assert nested.symbols == ["a", "b", "c\\/d", "", ""]
    assert nested.children == [(), (), (), (1, 2), (0, 3)]
    assert nested.labels == ["2", "1", "0", "4", "3"]
    assert lone == RawExample(["lone"], [()], ["2"])


def test_treebank_word_with_a_no_break_space(tmp_path: Path) -> None:
    path = written(tmp_path / "trees", "(2 1\N{NO-BREAK SPACE}1\\/2)\n")
    assert read_treebank(path)[0].symbols == ["1\N{NO-BREAK SPACE}1\\/2"]


def test_treebank_deeper_than_the_recursion_limit(tmp_path: Path) -> None:
    depth = 3 * sys.getrecursionlimit()
    path = written(tmp_path / "trees", "(2 (2 a) " * depth + "(2 b)" + ")" * depth)
    (tree,) = read_treebank(path)
    assert len(tree.symbols) == 2 * depth + 1
    assert tree.children[-1] == (0, 2 * depth - 1)


@pytest.mark.parametrize(
    ("line", "found", "expected"),
    [
        ("(3 (2 a) (4 b)", "the end of the line", "1 more ')'"),
        ("(3 (2 a) (4 b)))", "')' at column 16", "one tree a line"),
        ("(3 (2 a) (4 b)) (2 c)", "'(' at column 17", "one tree a line"),
        ("(3 (2 a))", "')' at column 9", "a second subtree (trees are binary)"),
        ("(3 (2 a) (4 b) (1 c))", "'(' at column 16", "one word or two subtrees"),
        ("(3 a (2 b))", "'(' at column 6", "one word or two subtrees"),
        ("(3 (2 b) a)", "'a' at column 10", "one word or two subtrees"),
        ("(3 a b)", "'b' at column 6", "a leaf has one word"),
        ("(3)", "')' at column 3", "a word or two subtrees"),
        ("(S (NP a) (VP b))", "'S' at column 2", "a sentiment from 0 to 4 after '('"),
        ("(5 a)", "'5' at column 2", "a sentiment from 0 to 4 after '('"),
        ("((2 a) (2 b))", "'(' at column 2", "a sentiment from 0 to 4 after '('"),
        ("(", "the end of the line", "a sentiment from 0 to 4 after '('"),
        ("word", "'word' at column 1", "expected '('"),
    ],
)
def test_malformed_tree(tmp_path: Path, line: str, found: str, expected: str) -> None:
    path = written(tmp_path / "trees", f"(2 fine)\n\n{line}\n(2 fine)\n")
    with pytest.raises(DataError) as error:
        read_treebank(path)
    message = str(error.value)
    assert message.startswith(f"{path}, line 3: found {found}, expected ")
    assert expected in message


# ---------------------------------------------------------------- tagged sentences


def test_tags(tmp_path: Path) -> None:
    path = written(tmp_path / "tags", "Bonn|I-LOC is|O\n\na|b|O\n")
    assert read_tags(path) == [
        RawExample(["Bonn", "is"], [], ["I-LOC", "O"]),
        RawExample(["a|b"], [], ["O"]),
    ]


@pytest.mark.parametrize("token", ["is", "|O", "is|", "|"])
def test_malformed_tags(tmp_path: Path, token: str) -> None:
    path = written(tmp_path / "tags", f"Bonn|LOC\nIt|O {token} old|O\n")
    with pytest.raises(DataError) as error:
        read_tags(path)
    assert str(error.value) == (f"{path}, line 2: found {token!r} at column 6, expected word|tag")


# ---------------------------------------------------------------- any file


@pytest.mark.parametrize("read", [read_treebank, read_tags])
def test_unusable_file(tmp_path: Path, read: object) -> None:
    assert callable(read)
    with pytest.raises(DataError, match=r"missing: found No such file .* expected a readable"):
        read(tmp_path / "missing")
    with pytest.raises(DataError, match="expected a readable text file"):
        read(tmp_path)
    for text in ("", "\n  \n"):
        with pytest.raises(DataError, match="found an empty file, expected at least one line"):
            read(written(tmp_path / "empty", text))
    not_utf8 = {read_treebank: b"(2 a)\n(2 \xe9)", read_tags: b"a|O\na|\xe9"}[read]
    path = written(tmp_path / "latin", not_utf8)
    with pytest.raises(DataError, match=r"line 2: found byte 0xe9 at column \d, .* UTF-8"):
        read(path)


# ---------------------------------------------------------------- syntax trees


def library(folder: Path, functions: int) -> Path:
    """Makes two modules, one of which is a package, with this number of functions each."""
    source = "\n".join(f"def f{i}(x):\n    y = -x\n    return y + {i}\n" for i in range(functions))
    written(
        folder / "one.py",
        source + "class A:\n    async def m(self):\n        return [1, 2, 3, 4, 5]\n",
    )
    (folder / "two").mkdir()
    written(folder / "two" / "__init__.py", source)
    return folder


def test_functions(tmp_path: Path) -> None:
    examples = read_functions(library(tmp_path, 30), "one two three")
    assert [example.labels for example in examples] == [["one"]] * 31 + [["two"]] * 30
    tree = examples[7]
    assert sorted(tree.symbols) == [
        *("Assign", "BinOp Add", "FunctionDef f7", "Name x", "Name y", "Name y", "Return"),
        *("UnaryOp USub", "arg x", "arguments", "int 7"),
    ]
    root = tree.children[-1]
    assert tree.symbols[-1] == "FunctionDef f7"
    assert [tree.symbols[child] for child in root] == ["arguments", "Assign", "Return"]


def test_functions_of_this_python() -> None:
    examples = read_functions(modules="enum no.such.module http.cookiejar")
    assert {label for example in examples for label in example.labels} == {"enum", "http.cookiejar"}
    least, most = data.NODES_PER_FUNCTION
    for example in examples:
        size = len(example.symbols)
        assert least <= size <= most
        below = [child for children in example.children for child in children]
        assert sorted(below) == list(range(size - 1)), "each node but the root has one parent"
        for node, children in enumerate(example.children):
            assert all(child < node for child in children)
    assert examples == read_functions(modules="enum no.such.module http.cookiejar")


def test_too_few_functions(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"found 0 modules .* expected the sources of Python's"):
        read_functions(library(tmp_path, 3), "one two three")


# ---------------------------------------------------------------- ids


def test_split_and_encode() -> None:
    raw = [RawExample(["a", f"kind {i}", ""], [], ["x" if i % 2 else "y"]) for i in range(20)]
    dataset = split_and_encode(raw, seed=3)
    assert (len(dataset.train), len(dataset.held_out)) == (18, 2)
    # Unknown, "a" and "kind": each name after "kind" occurs only once.
    assert (dataset.vocabulary, dataset.classes) == (3, 2)
    for example in dataset.train + dataset.held_out:
        a, kind, unnamed = example.symbols
        assert {a.item(), kind.item()} == {1, 2}
        assert unnamed.item() == 0
        assert [symbol.shape for symbol in example.symbols] == [torch.Size([1])] * 3
        assert [target.shape for target in example.targets] == [torch.Size([1])]
    again = split_and_encode(raw, seed=3)
    assert [e.targets for e in again.train] == [e.targets for e in dataset.train]


# ---------------------------------------------------------------- demo

TINY = ["--steps=3", "--minibatch=4", "--embedding=6", "--hidden=5", "--rounds=3", "--report"]


def treebank_file(path: Path) -> Path:
    choose = random.Random(0)

    def tree(leaves: int) -> str:
        label = choose.randrange(5)
        if leaves == 1:
            return f"({label} {choose.choice('abcdef')})"
        left = choose.randint(1, leaves - 1)
        return f"({label} {tree(left)} {tree(leaves - left)})"

    return written(path, "\n".join(tree(choose.randint(1, 7)) for _ in range(30)))


def tags_file(path: Path) -> Path:
    choose = random.Random(0)
    lines = [
        " ".join(f"{choose.choice('abcdef')}|{choose.choice('XYZ')}" for _ in range(length))
        for length in (choose.randint(1, 6) for _ in range(30))
    ]
    return written(path, "\n".join(lines))


@pytest.mark.parametrize("kind", ["functions", "treebank", "tags"])
def test_demo_runs(tmp_path: Path, kind: str) -> None:
    options = {
        "functions": [],
        "treebank": ["--treebank", str(treebank_file(tmp_path / "trees"))],
        "tags": ["--tags", str(tags_file(tmp_path / "tags"))],
    }[kind]
    run = subprocess.run(
        [sys.executable, demo.__file__, *TINY, *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=dict(os.environ),
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    for part in (
        "held out",
        "before training",
        "trained 3 steps",
        "after training",
        "examples/s",
        "1.00x",
        "largest relative difference",
        "ops captured",
    ):
        assert part in run.stdout


def test_demo_says_what_is_malformed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "trees", "(2 a)\n(2 (1 b))\n")
    assert demo.main(["--treebank", str(path), *TINY]) == 2
    assert capsys.readouterr().err == (
        f"demo: {path}, line 2: found ')' at column 9, expected a second subtree"
        " (trees are binary)\n"
    )


def test_demo_needs_something_to_hold_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "trees", "(2 a)\n")
    assert demo.main(["--treebank", str(path), *TINY]) == 2
    assert "found one example, expected at least two" in capsys.readouterr().err


def test_demo_fails_where_results_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "relative_difference", lambda expected, value: 0.5)
    path = treebank_file(tmp_path / "trees")
    assert demo.main(["--treebank", str(path), *TINY, "--steps=0"]) == 1
    assert "a difference is larger than 1e-04" in capsys.readouterr().err


def test_relative_difference() -> None:
    one, zero = torch.tensor([1.0, -4.0]), torch.zeros(2)
    assert demo.relative_difference(one, one) == 0
    assert demo.relative_difference(one, torch.tensor([1.0, -3.0])) == 0.25
    assert demo.relative_difference(zero, one) == 4
    assert demo.relative_difference(None, None) == 0
    infinite = float("inf")
    assert demo.relative_difference(one, None) == infinite
    assert demo.relative_difference(one, torch.tensor([1.0, float("nan")])) == infinite


def test_training_stops_when_its_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tags_file(tmp_path / "tags")
    assert demo.main(["--tags", str(path), *TINY, "--seconds-budget=0"]) == 0
    assert "trained 1 steps" in capsys.readouterr().out


@pytest.fixture
def own_threads() -> Iterator[None]:
    """Restores the number of threads, because some examples set it."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize(
    "main",
    [deep_sets.main, graph_classifier.main, neural_modules.main],
    ids=["sets", "graphs", "modules"],
)
def test_it_learns_and_gives_eagers_gradients(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--steps", "60", "--hidden", "32", "--rounds", "1"]) == 0
    assert "step   60" in capsys.readouterr().out


def test_sets_of_any_number_take_the_batches_of_one() -> None:
    model, sets = deep_sets.DeepSet(8), deep_sets.make_sets(12)
    with ab.batch() as many:
        results = [model(elements) for elements, _ in sets]
    with ab.batch() as one:
        results.append(model(torch.randn(5, 1)))
    assert many.report().batches == one.report().batches


def test_graphs_of_any_size_take_the_batches_of_one() -> None:
    model, graphs = graph_classifier.GraphClassifier(8), graph_classifier.load_graphs()[:12]
    assert len({len(graph.kinds) for graph in graphs}) > 4
    with ab.batch() as many:
        results = [model(graph) for graph in graphs]
    with ab.batch() as one:
        results.append(model(graphs[0]))
    assert many.report().batches == one.report().batches


@pytest.mark.usefixtures("own_threads")
def test_generation_continues_lines_as_a_loop_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main(["--steps=8", "--width=32", "--prompts=8", "--most=9", "--rounds=1"]) == 0
    assert capsys.readouterr().out.count("8 lines as in the loop") == 3


@pytest.mark.usefixtures("own_threads")
def test_neural_modules_fail_where_results_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neural_modules, "difference", lambda expected, found: 0.5)
    assert neural_modules.main(["--steps", "0", "--minibatch", "2", "--rounds", "1"]) == 1


def test_neural_modules_are_nodes_of_their_own() -> None:
    """A call of a module is one node, and questions of any structure share batches."""
    torch.manual_seed(0)
    model = neural_modules.Answerer(8)
    questions = neural_modules.make_questions(random.Random(0), 16)

    def size(program: neural_modules.Program) -> int:
        return 1 if isinstance(program, str) else 1 + sum(map(size, program[1:]))

    with ab.batch() as scope:
        losses = [model(question) for question in questions]
    assert scope.report().nodes == sum(size(q.program) + 1 for q in questions)
    assert scope.report().batches < len(losses) * 3


def test_difference_of_neural_modules() -> None:
    one, zero = torch.tensor([1.0, -4.0]), torch.zeros(2)
    assert neural_modules.difference([one, None], [one, zero]) == 0
    assert neural_modules.difference([one, None], [one, one]) == 1
    assert neural_modules.difference([one, zero], [torch.tensor([1.0, -3.0]), None]) == 0.25
