"""A small GPT that continues lines of Python, one prompt at a time.

    python examples/generate.py                 lines of Python's own standard library
    python examples/generate.py --text FILE     lines of another text

Trains the model on lines of different lengths, without padding or masks. Then continues 64 prompts
of different lengths, in three ways: in a loop, in ``ab.map``, and as a padded batch with masks. The
model decides where a line ends, so the prompts need different numbers of steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import demo
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from data import MODULES
from torch import Tensor, nn

END = 0  # the end of a line, and padding
CHARACTERS = ["", *map(chr, range(32, 127))]  # index: the number of a character
LONGEST = 160  # maximum number of characters of a line

Cache = tuple[Tensor, Tensor]  # keys and values, [..., heads, characters, width of a head]


class Block(nn.Module):
    """A layer of the model: attention to all characters so far, and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: Cache | None, mask: Tensor | None) -> tuple[Tensor, Cache]:
        """`x`: the new characters, [..., new, width]. Returns their states and the new cache."""
        parts = self.attention_in(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        query, key, value = (part.transpose(-3, -2) for part in parts)
        if past is not None:
            key, value = torch.cat([past[0], key], -2), torch.cat([past[1], value], -2)
        is_causal = past is None and mask is None
        found = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal)
        x = x + self.attention_out(found.transpose(-3, -2).flatten(-2))
        return x + self.shrink(F.gelu(self.expand(self.norm_after(x)))), (key, value)


class Model(nn.Module):
    """Scores the next character after each character of a line."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(CHARACTERS), width)
        self.position = nn.Embedding(LONGEST, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.05)
        nn.init.normal_(self.position.weight, std=0.05)

    def forward(
        self,
        characters: Tensor,
        positions: Tensor,
        past: Sequence[Cache] | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, list[Cache]]:
        """Returns the scores, [..., new, len(CHARACTERS)], and the caches of the layers.

        `characters` and `positions` have the shape [..., new]. `mask`, [..., 1, new, all], says to
        which characters each new character attends. Without a mask, it attends to all earlier
        characters.
        """
        x = self.embedding(characters) + self.position(positions)
        caches = []
        for number, block in enumerate(self.blocks):
            x, cache = block(x, past[number] if past is not None else None, mask)
            caches.append(cache)
        return self.norm(x) @ self.embedding.weight.T, caches


def loss(model: Model, line: Tensor) -> Tensor:
    """Returns the mean loss of the characters of one line, and of its end."""
    scores, _ = model(line, torch.arange(len(line)))
    return F.cross_entropy(scores[:-1], line[1:])


# ---------------------------------------------------------------- generation


def continued(model: Model, prompt: Tensor, most: int) -> list[int]:
    """Returns the characters that the model writes after one prompt, at most `most`."""
    new, past = prompt, None
    written: list[int] = []
    while len(written) < most:
        start = 0 if past is None else len(prompt) + len(written) - 1
        scores, past = model(new, torch.arange(start, start + len(new)), past)
        best = int(scores[-1].argmax())  # a read: in a map, this prompt waits for the others
        written.append(best)
        if best == END:
            break
        new = torch.tensor([best])
    return written


def continued_padded(model: Model, prompts: Sequence[Tensor], most: int) -> list[list[int]]:
    """Does the same as `continued` for a batch of prompts, with padding on the left and masks."""
    longest = max(map(len, prompts))
    new = torch.stack([F.pad(prompt, (longest - len(prompt), 0), value=END) for prompt in prompts])
    missing = torch.tensor([[longest - len(prompt)] for prompt in prompts])
    is_real = torch.arange(longest) >= missing  # [prompts, characters]
    mask = (is_real[:, None, :] & torch.ones(longest, longest, dtype=torch.bool).tril())[:, None]
    mask = mask | torch.eye(longest, dtype=torch.bool)  # padding attends to itself
    positions = (torch.arange(longest) - missing).clamp(min=0)
    past = None
    written: list[list[int]] = [[] for _ in prompts]
    is_open = torch.ones(len(prompts), dtype=torch.bool)
    for _ in range(most):
        scores, past = model(new, positions, past, mask)
        best = scores[:, -1].argmax(-1)
        for number in is_open.nonzero().flatten().tolist():
            written[number].append(int(best[number]))
        is_open &= best != END
        if not is_open.any():
            break
        new, positions = best[:, None], positions[:, -1:] + 1
        is_real = F.pad(is_real, (0, 1), value=True)
        mask = is_real[:, None, None]
    return written


# ---------------------------------------------------------------- lines


def read_lines(text: Path | None) -> list[Tensor]:
    """Returns the lines of a text as numbers of characters. The last number is the end."""
    if text is not None:
        sources = [text.read_text("utf-8")]
    else:
        found = [importlib.util.find_spec(name) for name in MODULES.split()]
        files = [spec.origin for spec in found if spec is not None and spec.has_location]
        sources = [Path(file).read_text("utf-8") for file in files if file is not None]
    known = {character: number for number, character in enumerate(CHARACTERS)}
    lines = []
    for line in dict.fromkeys(line.strip() for source in sources for line in source.splitlines()):
        if 12 <= len(line) <= 80 and line.isascii() and line.isprintable():
            lines.append(torch.tensor([*map(known.__getitem__, line), END]))
    return lines


def as_text(characters: Sequence[int]) -> str:
    return "".join(map(CHARACTERS.__getitem__, characters))


# ---------------------------------------------------------------- main


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains the model, continues the prompts and compares the speeds. Returns the exit status."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    lines = read_lines(options.text)
    if len(lines) < 2 * options.prompts:
        print(f"generate: {len(lines)} lines of 12 to 80 characters are too few", file=sys.stderr)
        return 2
    random.Random(0).shuffle(lines)
    held_out, lines = lines[: options.prompts], lines[options.prompts :]
    print(f"{len(lines):,} lines of {min(map(len, lines))} to {max(map(len, lines))} characters")
    model = Model(options.width)
    ab.cell(model, dynamic=True)  # otherwise Python takes most of the time
    train(model, lines, options)
    model.eval()
    prompts = [line[: 5 + 35 * k // options.prompts] for k, line in enumerate(held_out)]
    compare(model, [prompt[: max(5, len(prompt) - 2)] for prompt in prompts], options)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="lines to learn from")
    add("--steps", type=int, default=300, help="training steps at most (%(default)s)")
    add("--seconds-budget", type=float, default=120.0, metavar="S", help="(%(default)s)")
    add("--minibatch", type=int, default=64, help="lines a step (%(default)s)")
    add("--width", type=int, default=128, help="of the model (%(default)s)")
    add("--prompts", type=int, default=64, help="prompts that are continued (%(default)s)")
    add("--most", type=int, default=100, help="characters to write at most (%(default)s)")
    add("--rounds", type=int, default=3, help="rounds timed (%(default)s)")
    add("--threads", type=int, default=1, help="threads of PyTorch (%(default)s)")
    return parser.parse_args(arguments)


def train(model: Model, lines: Sequence[Tensor], options: argparse.Namespace) -> None:
    """Trains until the limit of steps or the limit of seconds is reached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    chance = random.Random(0)
    progress = demo.Progress(options.steps, options.seconds_budget)
    while options.steps > 0 and not progress.finished:
        optimizer.zero_grad(set_to_none=True)
        with ab.batch():
            losses = [loss(model, line) for line in chance.sample(lines, options.minibatch)]
            mean = torch.stack(losses).mean()
        mean.backward()
        optimizer.step()
        progress.step(mean.item())
    progress.close()


@torch.no_grad()
def compare(model: Model, prompts: Sequence[Tensor], options: argparse.Namespace) -> None:
    """Continues the prompts in each way, and prints how many lines agree, and the speeds."""
    ways: dict[str, Callable[[], list[list[int]]]] = {
        "a loop": lambda: [continued(model, prompt, options.most) for prompt in prompts],
        "a padded batch": lambda: continued_padded(model, prompts, options.most),
        "ab.map": lambda: ab.map(lambda prompt: continued(model, prompt, options.most), prompts),
    }
    expected = ways["a loop"]()
    for prompt, line in list(zip(prompts, expected, strict=True))[:: len(prompts) // 4]:
        print(f"  {as_text(prompt.tolist())}|{as_text(line)}")
    same = {  # lines may differ: rounding decides between almost equal scores
        name: sum(ours == theirs for ours, theirs in zip(way(), expected, strict=True))
        for name, way in ways.items()
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            start = time.process_time()
            way()
            times[name].append(time.process_time() - start)
    total = sum(map(len, expected))
    lengths = [len(line) for line in expected]
    print(f"{len(prompts)} lines, {min(lengths)} to {max(lengths)} new characters each")
    for name, found in times.items():
        seconds = sorted(found)[len(found) // 2]
        speed = f"{total / seconds:8,.0f} characters/s"
        print(f"  {name:<15} {speed}, {same[name]} lines as in the loop")


if __name__ == "__main__":
    sys.exit(main())
