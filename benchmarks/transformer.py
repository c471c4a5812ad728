"""Compares a transformer encoder on one sentence at a time with a hand-padded minibatch.

    python benchmarks/transformer.py [--dropout 0.1] [--feedforward 2048]

times a training step of one model in three ways that take turns: sentence by sentence, padded to
the longest sentence with ``src_key_padding_mask``, and sentence by sentence in a ``batch()`` block.
Losses and gradients are compared.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

TOLERANCE = 1e-9
SYMBOLS, CLASSES, LONGEST = 5000, 20, 512


class Tagger(nn.Module):
    """Tags words. The model can run one sentence or a padded minibatch."""

    def __init__(self, options: argparse.Namespace):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, options.width)
        self.position = nn.Parameter(torch.randn(LONGEST, options.width) / 10)
        layer = nn.TransformerEncoderLayer(
            options.width, options.heads, options.feedforward, options.dropout, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)
        self.tagger = nn.Linear(options.width, CLASSES)

    def sentence_loss(self, words: Tensor, tags: Tensor) -> Tensor:
        """Returns the loss of one sentence. ``words``, ``tags``: [length]."""
        x = self.embedding(words) + self.position[: len(words)]
        return F.cross_entropy(self.tagger(self.encoder(x[None])[0]), tags, reduction="sum")

    def padded_loss(self, words: Tensor, tags: Tensor, padding: Tensor) -> Tensor:
        """Returns the summed loss of a minibatch. All arguments: [sentences, longest length]."""
        x = self.embedding(words) + self.position[: words.size(1)]
        scores = self.tagger(self.encoder(x, src_key_padding_mask=padding))
        return F.cross_entropy(scores.flatten(0, 1), tags.flatten(), reduction="sum")


Sentences = list[tuple[Tensor, Tensor]]


def one_by_one(model: Tagger, sentences: Sentences) -> Tensor:
    """Runs the sentences eagerly, one by one."""
    return torch.stack([model.sentence_loss(*sentence) for sentence in sentences]).sum()


def batched(model: Tagger, sentences: Sentences) -> Tensor:
    """Runs the sentences one by one in a block."""
    with ab.batch():
        return torch.stack([model.sentence_loss(*sentence) for sentence in sentences]).sum()


def padded(model: Tagger, sentences: Sentences) -> Tensor:
    """Pads the sentences and runs them as one minibatch."""
    words = nn.utils.rnn.pad_sequence([w for w, _ in sentences], batch_first=True)
    tags = nn.utils.rnn.pad_sequence([t for _, t in sentences], True, padding_value=-100)
    lengths = torch.tensor([len(w) for w, _ in sentences])
    padding = torch.arange(words.size(1)) >= lengths.unsqueeze(1)
    return model.padded_loss(words, tags, padding)


VARIANTS: dict[str, Callable[[Tagger, Sentences], Tensor]] = {
    "sentence by sentence": one_by_one,
    "padded by hand": padded,
    "autobatched": batched,
}


def largest_difference(
    model: Tagger, variants: dict[str, Callable[[Tagger, Sentences], Tensor]], sentences: Sentences
) -> float:
    """Returns the largest relative difference of losses and gradients between variants.

    Uses double precision, and no dropout. In single precision, rounding may change the sign of a
    feed-forward unit that is close to zero.
    """
    model = copy.deepcopy(model).double().eval()
    results: list[list[Tensor]] = []
    for variant in variants.values():
        model.zero_grad(set_to_none=True)
        loss = variant(model, sentences)
        torch.autograd.backward(loss)
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    return max(
        ((a - b).abs().max() / a.abs().max()).item()
        for other in results[1:]
        for a, b in zip(results[0], other, strict=True)
    )


def main() -> int:
    """Times and compares the variants. Returns 1 if results differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--feedforward", type=int, default=1024)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs=2, default=(5, 40))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without-eager", action="store_true")
    parser.add_argument("--report", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    draw = random.Random(options.seed)
    model = Tagger(options)
    variants = {k: v for k, v in VARIANTS.items() if not options.without_eager or v != one_by_one}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(-1, options.rounds):  # turn -1 is the warm-up
        lengths = [draw.randint(*options.lengths) for _ in range(options.minibatch)]
        sentences = [(torch.randint(SYMBOLS, (n,)), torch.randint(CLASSES, (n,))) for n in lengths]
        for name in sorted(variants, reverse=turn % 2 == 0):
            model.zero_grad(set_to_none=True)
            start = time.process_time()
            loss = variants[name](model, sentences)
            torch.autograd.backward(loss)
            if turn >= 0:
                times[name].append(time.process_time() - start)

    print(
        f"{options.layers} layers, width {options.width}, {options.heads} heads, feed-forward "
        f"{options.feedforward}, dropout {options.dropout}; {options.minibatch} sentences of "
        f"{options.lengths[0]} to {options.lengths[1]} words; one thread:"
    )
    hand = median(times["padded by hand"])
    for name, seconds in times.items():
        middle = median(seconds)
        print(f"  {name:<22}{1e3 * middle:9.1f} ms a training step{hand / middle:7.2f}x by hand")
    difference = largest_difference(model, variants, sentences[:16])
    print(f"  largest relative difference of losses and gradients {difference:.1e} (in double)")
    if options.report:
        with ab.batch() as scope:
            _kept = [model.sentence_loss(*sentence) for sentence in sentences]
        print(scope.report())
    return int(not difference <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
