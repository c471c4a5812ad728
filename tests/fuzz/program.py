"""A random program: Python statements as data, which can be printed and renamed.

One list contains the statements of all instances. Variables of instance 0 have names such as
``a3``, variables of instance 1 names such as ``b3``. Names of shared variables begin with a
capital.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

LETTERS = "abcdef"
VARIABLE = re.compile(r"\b[a-fA-Z]\d+\b")
_TEMPLATE = re.compile(r"\bv(\d+)\b")

# Helpers that programs may use. A script prints the helpers that it uses.
PRELUDE = {
    "data": '''\
def data(seed, *shape, dtype=torch.float64):
    """Fixed values between -1 and 1."""
    count = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(count * 1.7 + seed).reshape(shape).to(dtype)
''',
    "module": '''\
def module(made, seed, dtype=torch.float64):
    """A module with fixed parameters."""
    for k, p in enumerate(made.parameters()):
        p.data = data(seed + k, *p.shape, dtype=dtype)
    return made.to(dtype)
''',
    "raises": '''\
@contextlib.contextmanager
def raises():
    """Records the type of the error that the block must raise."""
    try:
        yield
        log.append("no error")
    except Exception as error:
        log.append(type(error).__name__)
''',
    "elsewhere": '''\
def elsewhere(make):
    """What is made on another thread."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()
''',
    "uncounted": '''\
def uncounted(tensor):
    """An alias with a version counter of its own."""
    return tensor.data
''',
    "Twice": """\
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g
""",
    "Reversed": """\
class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return g * -0.5
""",
    "Both": """\
class Both(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        y = x.tanh()
        ctx.scale = scale
        ctx.save_for_backward(y)
        return y, x * scale

    @staticmethod
    def backward(ctx, g, h):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y) + h * ctx.scale, None
""",
}
IMPORTS = """\
import collections, concurrent.futures, contextlib, copy, math, pickle
import torch, torch_autobatch as ab
from torch import nn
from torch.nn import functional as F
"""


_REPORT = """\
def facts(value):
    \"""What can be printed of a variable.\"""
    if not isinstance(value, torch.Tensor):
        return str(value)
    names = ["shape", "dtype", "requires_grad", "is_leaf", "grad"]
    return f"{value} stride={value.stride()} {[(n, getattr(value, n)) for n in names]}"

torch.set_printoptions(precision=8)
eager = program(lambda **_: ab.batch(enabled=False))
ours = program(ab.batch)
for name in sorted(eager.keys() - {"batch", "scope"}):
    if facts(eager[name]) != facts(ours[name]):
        print(name, "eager:", facts(eager[name]), "batched:", facts(ours[name]), sep="\\n")
"""


@dataclass
class Statement:
    """One line, or the first line of a block (``with ...:``, ``if ...:``) and its body."""

    code: str
    body: list[Statement] | None = None

    def renamed(self, letter: str) -> Statement:
        """Returns the statement for one instance. Variables of a template are ``v0``, ``v1``,
        ..."""
        body = None if self.body is None else [s.renamed(letter) for s in self.body]
        return Statement(_TEMPLATE.sub(rf"{letter}\1", self.code), body)


@dataclass
class Program:
    """The statements that run twice, eagerly and batched."""

    statements: list[Statement]
    seed: int = -1
    knobs: frozenset[str] = field(default_factory=frozenset)

    def source(self) -> str:
        """Returns the source of the statements."""
        return "\n".join(_lines(self.statements, 0)) + "\n"

    def script(self) -> str:
        """Returns a standalone script that prints the differences of the two runs."""
        source = self.source()
        defaults = "torch.set_default_dtype(torch.float64)\n"
        prelude = [text for name, text in PRELUDE.items() if re.search(rf"\b{name}\b", source)]
        if any("data(" in text for text in prelude) and PRELUDE["data"] not in prelude:
            prelude.insert(0, PRELUDE["data"])
        body = "\n".join(_lines(self.statements, 1, pretty=True))
        return "\n".join(
            [
                IMPORTS + defaults,
                "log, hooks = [], collections.defaultdict(list)",
                *prelude,
                "def program(batch):",
                "    log.clear(), hooks.clear()",
                body,
                "    return dict(locals(), log=list(log), hooks=dict(hooks))\n",
                _REPORT,
                "",
            ]
        )

    def size(self) -> int:
        """Returns the number of statements, including statements in blocks."""
        return sum(1 for _ in walk(self.statements))


def walk(statements: list[Statement]) -> Iterator[Statement]:
    """Yields all statements in order, including statements in blocks."""
    for statement in statements:
        yield statement
        yield from walk(statement.body or [])


def _lines(statements: list[Statement], depth: int, *, pretty: bool = False) -> Iterator[str]:
    for statement in statements:
        yield "    " * depth + (_pretty(statement) if pretty else statement.code)
        if statement.body is not None:
            yield from _lines(statement.body or [Statement("pass")], depth + 1, pretty=pretty)


def _pretty(statement: Statement) -> str:
    """Returns the first line of a statement with usual spacing."""
    if statement.body is None:
        return ast.unparse(ast.parse(statement.code))
    return ast.unparse(ast.parse(statement.code + " pass")).split("\n")[0]


def assigned(code: str) -> list[str]:
    """Returns the variables that a line assigns."""
    left = re.match(r"([\w\s,()*]+?) = ", code)
    return VARIABLE.findall(left[1]) if left else []


def used(code: str) -> list[str]:
    """Returns the variables that a line reads."""
    left = re.match(r"([\w\s,()*]+?) = ", code)
    return VARIABLE.findall(code[left.end() :] if left else code)
