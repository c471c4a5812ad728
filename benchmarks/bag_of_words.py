"""Compares a bag-of-words classifier in a block with ``embedding_bag`` on hand-made batches.

    python benchmarks/bag_of_words.py

compares losses and gradients of the variants, and times a training step of 64 sentences of 5 to 40
tokens on one thread. The variants take turns. Times are CPU times of this process, so that other
processes do not affect them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

TOLERANCE = 1e-4

Sentences = Sequence[tuple[Tensor, Tensor]]  # tokens, and the class


class BagOfWords(nn.Module):
    """Classifies the mean of a sentence's embeddings."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.classify = nn.Linear(width, classes)

    def forward(self, sentence: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of one sentence."""
        return F.cross_entropy(self.classify(self.embed(sentence).mean(0)), target)


def one_by_one(model: BagOfWords, sentences: Sentences) -> Tensor:
    return torch.stack([model(*sentence) for sentence in sentences]).mean()


def batched(model: BagOfWords, sentences: Sentences) -> Tensor:
    with ab.batch():
        return one_by_one(model, sentences)


def by_hand(model: BagOfWords, sentences: Sentences) -> Tensor:
    tokens = torch.cat([s for s, _ in sentences])
    lengths = torch.tensor([len(s) for s, _ in sentences])
    offsets = lengths.cumsum(0) - lengths
    bags = F.embedding_bag(tokens, model.embed.weight, offsets, mode="mean")
    return F.cross_entropy(model.classify(bags), torch.stack([t for _, t in sentences]))


def main() -> int:
    """Compares and times the variants. Returns 1 if results differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocabulary", type=int, default=10000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--minibatch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    randomness = random.Random(0)
    model = BagOfWords(options.vocabulary, options.width, options.classes)

    def sentence() -> tuple[Tensor, Tensor]:
        length = randomness.randint(5, 40)
        return torch.randint(options.vocabulary, (length,)), torch.randint(options.classes, ())

    variants: dict[str, Callable[[BagOfWords, Sentences], Tensor]] = {
        "eager": one_by_one,
        "torch_autobatch": batched,
        "by hand": by_hand,
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    difference = 0.0
    for turn in range(options.rounds + 3):
        sentences = [sentence() for _ in range(options.minibatch)]
        results = {}
        # Each variant runs first, second and last equally often.
        order = list(variants)[turn % 3 :] + list(variants)[: turn % 3]
        for name in order:
            model.zero_grad(set_to_none=True)
            start = time.process_time()
            loss = variants[name](model, sentences)
            torch.autograd.backward(loss)
            seconds = time.process_time() - start
            results[name] = [loss.detach(), *[p.grad for p in model.parameters()]]
            if turn >= 3:
                times[name].append(seconds)
        for name in variants:
            for a, b in zip(results[name], results["eager"], strict=True):
                assert a is not None
                assert b is not None
                difference = max(difference, ((a - b).abs().max() / b.abs().max()).item())

    hand = median(times["by hand"])
    print(f"{options.minibatch} sentences of 5-40 tokens, width {options.width}, one thread:")
    for name, seconds in times.items():
        print(
            f"  {name:<16}{1e3 * median(seconds):8.2f} ms a step   {hand / median(seconds):5.2f}x"
        )
    with ab.batch() as scope:
        kept = [model(*sentence) for sentence in sentences]
    with ab.batch() as whole:
        mean = one_by_one(model, sentences)
    batches = scope.report().batches, whole.report().batches
    print(f"  {batches[0]} batches for {len(kept)} losses, {batches[1]} with {mean.numel()} mean")
    print(f"  largest relative difference {difference:.1e}")
    return int(not difference <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
