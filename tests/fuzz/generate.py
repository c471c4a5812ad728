"""Generates random programs. Each new statement runs eagerly and is kept if it succeeds.

So programs have valid shapes, without a model of PyTorch's shape rules. Each program uses a random
subset of the categories and patterns (swarm testing), so that no pattern can always hide the bugs
of others.
"""

from __future__ import annotations

import collections
import contextlib
import random
import re

import torch
from torch import Tensor

from tests.device import default
from tests.fuzz.execute import new_environment
from tests.fuzz.holes import FLOATS, GEOMETRY, KINDS
from tests.fuzz.program import LETTERS, Program, Statement, assigned, used, walk
from tests.fuzz.tables import CATEGORIES, CONTEXT, GATED

LARGEST = 50.0  # larger values are dropped, because their rounding errors would be reported
_ON_HOST = re.compile(r"cpu|numpy")  # can't be combined with tensors on a device
_HOLE = re.compile(r"\{(\w+)\}")


class _NoCandidateError(Exception):
    """Raised if no variable fits the hole."""


class Generator:
    """The state of one program: its statements and eager variables so far."""

    def __init__(self, seed: int, knobs: frozenset[str] = frozenset()) -> None:
        self.rng = random.Random(seed)
        self.program = Program([], seed, knobs)
        self.dtype = torch.float32 if self.rng.random() < 0.15 else torch.float64
        self.env = new_environment(batched=False)
        self.count = 0
        self.letter = "a"
        self.writable: list[str] = []
        self._choose_categories()

    def _choose_categories(self) -> None:
        rng = self.rng
        self.names: list[str] = []
        self.weights: list[float] = []
        self.patterns: dict[str, list[str]] = {}
        for name, (weight, _, patterns) in CATEGORIES.items():
            gated = [
                p for gap in sorted(self.program.knobs) for c, p in GATED.get(gap, ()) if c == name
            ]
            if default.device == "cuda":
                patterns = [p for p in patterns if not _ON_HOST.search(p)]
            kept = [p for p in patterns if rng.random() < 0.5] or patterns
            self.patterns[name] = kept + gated * max(1, len(kept) // 8)
            self.names.append(name)
            self.weights.append(weight * rng.choice([0, 0.3, 1, 1, 3]) + 0.01)
        self.context_weight = rng.choice([0, 0.05, 0.15])

    # --- existing variables ---

    def tensors(self, letter: str | None = None) -> list[tuple[str, Tensor]]:
        """Returns the tensors of an instance as (name in a template, tensor)."""
        letter = letter or self.letter
        return [
            ("v" + name[1:], value)
            for name, value in self.env.items()
            if name[0] == letter and name[1:].isdigit() and isinstance(value, Tensor)
        ]

    def shared(self, prefix: str) -> list[tuple[str, Tensor]]:
        """Returns tensors that all instances share: parameters ``W`` and ``B``, outside buffers
        ``S``."""
        return [
            (name, value)
            for name, value in self.env.items()
            if name[0] in prefix and name[1:].isdigit() and isinstance(value, Tensor)
        ]

    def pick(self, candidates: list[tuple[str, Tensor]]) -> str:
        """Draws a candidate. Recent ones are more likely."""
        if not candidates:
            raise _NoCandidateError
        if self.rng.random() < 0.6:
            candidates = candidates[-6:]
        return self.rng.choice(candidates)[0]

    def value(self, name: str) -> Tensor:
        return self.env[self.letter + name[1:] if name[0] == "v" else name]

    # --- filling a pattern ---

    def fill(self, pattern: str) -> str:
        """Returns the pattern with its holes filled."""
        self.first: str | None = None
        self.last = ""

        def hole(match: re.Match[str]) -> str:
            text = self._fill_hole(match[1])
            if re.fullmatch(r"v\d+|[A-Z]\d+", text) and match[1] != "new":
                self.first = self.first or text
                self.last = text
            return text

        return _HOLE.sub(hole, pattern)

    def _fill_hole(self, kind: str) -> str:
        rng = self.rng
        if kind == "new":
            self.count += 1
            return f"v{self.count}"
        if kind == "last":
            return self.last
        if kind == "K":
            return str(rng.choice([0.1, 0.3, -0.2, 0.7, 1.5, -1.1]))
        if kind == "N":
            return str(rng.choice([1, 2, 3, 0]))
        if kind == "dtype":
            return rng.choice(["torch.float64", "torch.float64", "torch.float32", "torch.int64"])
        if kind in GEOMETRY:
            if self.first is None:
                raise _NoCandidateError
            return GEOMETRY[kind](rng, self.value(self.first))
        if kind in "WBPSoZ":
            prefix = {"W": "W", "B": "B", "P": "WB", "S": "S", "o": "S", "Z": "Z"}[kind]
            pool = self.shared(prefix)
            if kind == "o":
                pool += [(n, t) for n, t in self.tensors() if n in self.writable]
            return self.pick(pool)
        return self._fill_tensor(kind)

    def _fill_tensor(self, kind: str) -> str:
        tensors = self.tensors()
        if self.rng.random() < 0.05:
            tensors = self.shared("WBSZ")
        fits = KINDS[kind]
        if kind == "y":
            tensors = [(n, t) for n, t in tensors if t.dtype in FLOATS]
            if self.first is not None and self.rng.random() < 0.8:
                shape = self.value(self.first).shape
                tensors = [(n, t) for n, t in tensors if t.shape == shape] or tensors
            return self.pick(tensors)
        return self.pick([(n, t) for n, t in tensors if fits(t)])

    # --- writing statements ---

    def run(self, statement: Statement) -> bool:
        """Runs a statement of this instance eagerly. Returns whether to keep it."""
        before = {name: self.env.get(name) for name in assigned(statement.code)}
        try:
            exec(statement.code, self.env)
            made = [self.env.get(name) for name in before]
            good = all(self._bounded(value) for value in made if isinstance(value, Tensor))
        except Exception as error:
            self.failure: Exception | None = error
            good = False
        if not good:
            for name, value in before.items():
                self.env.pop(name, None)
                if value is not None:
                    self.env[name] = value
        return good

    def _bounded(self, value: Tensor) -> bool:
        if value.numel() == 0 or not (value.is_floating_point() or value.is_complex()):
            return value.numel() < 500
        largest = value.detach().abs().max().item()
        return value.numel() < 500 and (largest <= LARGEST or self.rng.random() < 0.01)

    def statement(self) -> Statement | None:
        """Returns a new statement as a template, after running it for the current instance. Returns
        None if all attempts fail."""
        for _ in range(8):
            category = self.rng.choices(self.names, self.weights)[0]
            pattern = self.rng.choice(self.patterns[category])
            self.failure = None
            try:
                code = self.fill(pattern)
            except _NoCandidateError:
                continue
            if CATEGORIES[category][1]:
                self.count += 1
                code = f"v{self.count} = {code}"
            code = re.sub(r"^((?:v\d+|\*_)(?:,(?:v\d+|\*_))*,?)=(?!=)", r"\1 = ", code)
            template = Statement(code)
            if self.run(template.renamed(self.letter)):
                return template
            if self._raises_at_its_line(category) and self.rng.random() < 0.1:
                return Statement("with raises():", [template])
        return None

    def _raises_at_its_line(self, category: str) -> bool:
        """Whether the error that eager just raised depends on shapes only."""
        return (
            self.failure is not None
            and category in ("unary", "binary", "matmul", "join", "view")
            and "out of" not in str(self.failure)
        )

    def block(self, length: int, depth: int = 0) -> list[Statement]:
        """Returns templates of about ``length`` statements, after running them for this
        instance."""
        made: list[Statement] = []
        for _ in range(length):
            if depth < 2 and self.rng.random() < self.context_weight:
                made += self._context(depth)
            elif (statement := self.statement()) is not None:
                made.append(statement)
        return made

    def _context(self, depth: int) -> list[Statement]:
        rng = self.rng
        length = rng.randint(1, 4)
        if rng.random() < 0.25:
            return self._branch(length, depth)
        contexts, weights = zip(*CONTEXT, strict=True)
        text = rng.choices(contexts, weights)[0]
        if self.dtype == torch.float32 and default.device != "cuda" and rng.random() < 0.2:
            text = "torch.autocast('cpu', dtype=torch.bfloat16)"
        with eval(text, self.env):
            return [Statement(f"with {text}:", self.block(length, depth + 1))]

    def _branch(self, length: int, depth: int) -> list[Statement]:
        """Returns a branch on a value, with the body that this instance runs."""
        try:
            name = self._fill_tensor("f")
        except _NoCandidateError:
            return []
        threshold = self.rng.choice([0.123, -0.321, 0.777])
        sign = ">" if self.value(name).detach().sum().item() > threshold else "<="
        return [
            Statement(f"if {name}.sum() {sign} {threshold}:", self.block(length, depth + 1)),
        ]

    def replay(self, templates: list[Statement], letter: str) -> list[Statement]:
        """Returns the templates as statements of another instance, without statements that fail
        there."""
        made = []
        for template in templates:
            statement = template.renamed(letter)
            if self.rng.random() < self.skip:
                continue
            if template.body is None:
                if self.run(statement):
                    made.append(statement)
            elif template.code == "with raises():":
                made.append(statement)
            else:
                body = self._replay_block(template, statement.code, letter)
                if body is not None:
                    made.append(Statement(statement.code, body))
        return made

    def _replay_block(self, template: Statement, code: str, letter: str) -> list[Statement] | None:
        keyword, _, expression = code.rstrip(":").partition(" ")
        try:
            value = eval(expression, self.env)
        except Exception:
            return None
        if keyword == "with":
            with value:
                return self.replay(template.body or [], letter)
        if not value:
            return [s.renamed(letter) for s in template.body or []]
        return self.replay(template.body or [], letter)

    # --- the program ---

    def setup(self) -> None:
        """Adds the shared variables and the inputs of each instance."""
        rng, dtype = self.rng, "" if self.dtype == torch.float64 else ", dtype=torch.float32"
        lines = [
            f"W0 = data(1, 4, 4{dtype}).requires_grad_()",
            f"W1 = data(2, 4, 4{dtype}).requires_grad_()",
            f"B0 = data(3, 4{dtype}).requires_grad_()",
            f"Z0 = data(4, 4, 4{dtype})",
            f"S0 = data(5, 3, 4{dtype})",
            f"S1 = data(6, 4{dtype})",
        ]
        modules = {
            "C0": "nn.LSTMCell(4, 4)",
            "C1": "nn.GRUCell(4, 4)",
            "L0": "nn.Linear(4, 3)",
            "L1": "nn.Linear(4, 4, bias=False)",
            "E0": "nn.Embedding(4, 4)",
            "N0": "nn.LayerNorm(4)",
            "Q0": "nn.BatchNorm1d(4)",
        }
        lines += [
            f"{n} = module({made}, {k}{dtype})" for k, (n, made) in enumerate(modules.items())
        ]
        lengths = [rng.choice([1, 2, 3, 3, 4, 5, 0 if rng.random() < 0.1 else 2]) for _ in LETTERS]
        if rng.random() < 0.4:
            lengths = [lengths[0]] * len(LETTERS)
        recording = rng.random() < 0.5
        for k, letter in enumerate(self.letters):
            t, grad = lengths[k], ".requires_grad_()"
            lines += [
                f"{letter}0 = data({10 + k}, {t}, 4{dtype}){grad if recording else ''}",
                f"{letter}1 = data({20 + k}, 4{dtype}){grad}",
                f"{letter}2 = torch.arange({t}) * {k + 1} % 4",
                f"{letter}3 = data({30 + k}, {t}, 4{dtype})",
                f"{letter}4 = data({40 + k}, 2, {t}, 4{dtype}).tanh(){rng.choice([grad, ''])}",
                f"{letter}5 = data({50 + k}, {t}, 4{dtype}) > 0",
            ]
        self.writable = ["v3"]
        self.count = 9
        self.program.statements = [Statement(line) for line in lines]
        for statement in self.program.statements:
            exec(statement.code, self.env)

    def region(self, length: int) -> Statement:
        """Returns a ``batch()`` block over all instances."""
        rng = self.rng
        options = rng.choice([""] * 6 + ["policy='depth'", f"max_pending={rng.randint(1, 6)}"])
        made: list[Statement] = []
        scope = eval(f"batch({options})", self.env)
        with contextlib.suppress(Exception), scope:  # scope.backward() may raise
            self.env["scope"] = scope
            made = rng.choice([self._one_by_one, self._in_step])(length)
        return Statement(f"with batch({options}) as scope:", made)

    def _one_by_one(self, length: int) -> list[Statement]:
        """Returns statements instance by instance, like a loop over a minibatch."""
        self.letter = self.letters[0]
        templates = self.block(length)
        made = [template.renamed(self.letter) for template in templates]
        for letter in self.letters[1:]:
            made += self.replay(templates, letter)
            self.letter = letter
            if self.rng.random() < 0.3:
                made += [s.renamed(letter) for s in self.block(2)]
        return made

    def _in_step(self, length: int) -> list[Statement]:
        """Returns statements in lockstep: each statement for all instances."""
        made: list[Statement] = []
        for _ in range(length):
            self.letter = (
                self.rng.choice(self.letters) if self.rng.random() < 0.2 else self.letters[0]
            )
            for template in self.block(1):
                made.append(template.renamed(self.letter))
                for letter in self.letters:
                    if letter != self.letter:
                        made += self.replay([template], letter)
        return made

    def after(self) -> list[Statement]:
        """Returns statements after the block: writes, more ops, backward."""
        rng = self.rng
        made: list[Statement] = []
        favoured = dict(zip(self.names, self.weights, strict=True))
        plain = self.weights
        for category in ("in_place", "grad"):
            favoured[category] = 6 * CATEGORIES[category][0]
        self.weights = list(favoured.values())
        for _ in range(rng.choice([0, 1, 3, 6])):
            self.letter = rng.choice(self.letters)
            made += [s.renamed(self.letter) for s in self.block(1)]
        self.weights = plain
        return made

    def last_backward(self) -> list[Statement]:
        """Returns backward from results of several instances, jointly or one after the other."""
        rng = self.rng
        roots = []
        for letter in self.letters:
            names = [
                letter + name[1:]
                for name, t in self.tensors(letter)
                if t.requires_grad and t.is_floating_point() and _has_history(t)
            ]
            roots += rng.sample(names, min(len(names), rng.choice([0, 1, 1, 2, 4])))
        if not roots:
            return []
        if rng.random() < 0.4:
            lines = [f"{name}.sum().backward(retain_graph={rng.random() < 0.5})" for name in roots]
        else:  # autograd nodes made on other threads have separate sequence numbers
            away = rng.choice([0, 0, 0.5, 1])
            sums = [
                f"elsewhere(lambda: {name}.sum())" if rng.random() < away else f"{name}.sum()"
                for name in roots
            ]
            lines = [f"sum([{', '.join(sums)}]).backward()"]
        return [s for s in map(Statement, lines) if self.run(s)]


def _drop_dead(rng: random.Random, statements: list[Statement], keep: set[str]) -> list[Statement]:
    """Returns the block with ``del`` after the last use of some variables."""
    made = list(statements)
    last: dict[str, int] = collections.OrderedDict()
    for k, statement in enumerate(statements):
        lines = [statement.code]
        if statement.body is not None:
            continue
        for name in assigned(lines[0]):
            last[name] = k
    for k, statement in enumerate(statements):
        for name in used(statement.code) + _inner_names(statement):
            if name in last:
                last[name] = max(last[name], k)
    share = rng.choice([0, 0.3, 0.7, 1])
    ends = [(k, n) for n, k in last.items() if n not in keep and rng.random() < share]
    for k, name in sorted(ends, reverse=True):
        made.insert(k + 1, Statement(f"del {name}"))
    return made


def _inner_names(statement: Statement) -> list[str]:
    names: list[str] = []
    for inner in statement.body or []:
        names += used(inner.code) + assigned(inner.code) + _inner_names(inner)
    return names


def generate(seed: int, knobs: frozenset[str] = frozenset()) -> Program:
    """Generates the program of this seed."""
    # An index out of range makes CUDA fail in this process, so statements are tried on the CPU.
    with default.paused() if default.device == "cuda" else contextlib.nullcontext():
        return _generate(seed, knobs)


def _generate(seed: int, knobs: frozenset[str]) -> Program:
    g = Generator(seed, knobs)
    rng = g.rng
    g.letters = LETTERS[: rng.choice([1, 2, 2, 3, 3, 4, 6])]
    g.skip = rng.choice([0, 0, 0.1, 0.3])
    g.setup()
    for _ in range(rng.choice([1, 1, 1, 2])):
        region = g.region(rng.choice([3, 6, 10, 16, 25]))
        later = g.after()
        if rng.random() < 0.8:
            later += g.last_backward()
        keep = {n for s in later for n in used(s.code) + assigned(s.code) + _inner_names(s)}
        region.body = _drop_dead(rng, region.body or [], keep)
        for statement in region.body:
            if statement.code.startswith("del "):
                g.env.pop(statement.code[4:], None)
        g.program.statements += [region, *later]
    g.program.statements = _without_unused(g.program.statements)
    return g.program


def _without_unused(statements: list[Statement]) -> list[Statement]:
    """Returns the statements without inputs that no statement reads."""
    read = {name for s in walk(statements) for name in used(s.code)}
    return [s for s in statements if s.body is not None or not set(assigned(s.code)) - read]


def _has_history(tensor: Tensor) -> bool:
    with contextlib.suppress(RuntimeError):  # the view is no longer valid
        return tensor.grad_fn is not None
    return False
