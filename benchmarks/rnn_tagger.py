"""Compares a tagger with one nn.LSTM or nn.GRU call per sentence with hand-batched code.

Times a training step on sentences of 5 to 40 tokens, including collation. All variants alternate in
one process:

    packed   pack_padded_sequence, the layer, and the loss over the packed rows
    steps    a loop over time steps of the sentences sorted by length, one cell call per step
    scope    the layer called on each sentence, in torch_autobatch.batch()
    eager    the layer called on each sentence, without batching

Prints median milliseconds of this thread's CPU time, so that other processes have little effect,
and the ratio of each variant's time to the time of "scope" (above 1: scope is faster).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

Sentence = tuple[Tensor, Tensor]  # words, tags


class Tagger(nn.Module):
    """Embedding, recurrent layer and linear layer. It is called on one sentence."""

    def __init__(self, kind: str, words: int, tags: int, width: int, options: argparse.Namespace):
        super().__init__()
        layer = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}[kind]
        self.embed = nn.Embedding(words, width)
        self.layer = layer(
            width,
            options.hidden,
            options.layers,
            bidirectional=options.bidirectional,
            batch_first=True,
        )
        self.out = nn.Linear(options.hidden * (2 if options.bidirectional else 1), tags)

    def forward(self, sentence: Sentence) -> Tensor:
        words, tags = sentence
        states, _ = self.layer(self.embed(words).unsqueeze(0))
        return F.cross_entropy(self.out(states.squeeze(0)), tags, reduction="sum")


def packed_loss(model: Tagger, sentences: Sequence[Sentence]) -> Tensor:
    """Pads and packs all sentences, and runs them as one call."""
    lengths = torch.tensor([len(words) for words, _ in sentences])
    words = pad_sequence([words for words, _ in sentences], batch_first=True)
    tags = pad_sequence([tags for _, tags in sentences], batch_first=True)
    packed = pack_padded_sequence(model.embed(words), lengths, True, enforce_sorted=False)
    targets = pack_padded_sequence(tags, lengths, True, enforce_sorted=False)
    states, _ = model.layer(packed)
    return F.cross_entropy(model.out(states.data), targets.data, reduction="sum")


def lstm_steps(layer: nn.LSTM | nn.GRU, side: str, rows: Sequence[Tensor]) -> list[Tensor]:
    """Runs one direction with a cell call for each step.

    ``rows``: the inputs of each step, [sequences of the step, width]. The number of sequences must
    only decrease or only increase.
    """
    w_ih, w_hh = getattr(layer, f"weight_ih_l0{side}"), getattr(layer, f"weight_hh_l0{side}")
    b_ih, b_hh = getattr(layer, f"bias_ih_l0{side}"), getattr(layer, f"bias_hh_l0{side}")
    lstm = isinstance(layer, nn.LSTM)
    state = rows[0].new_zeros(len(rows[0]), layer.hidden_size)
    cell = state
    out = []
    for x in rows:
        if len(x) < len(state):
            state, cell = state[: len(x)], cell[: len(x)]
        elif len(x) > len(state):
            more = state.new_zeros(len(x) - len(state), layer.hidden_size)
            state, cell = torch.cat([state, more]), torch.cat([cell, more])
        if lstm:
            state, cell = torch._VF.lstm_cell(x, (state, cell), w_ih, w_hh, b_ih, b_hh)
        else:
            state = torch._VF.gru_cell(x, state, w_ih, w_hh, b_ih, b_hh)
        out.append(state)
    return out


def steps_loss(model: Tagger, sentences: Sequence[Sentence]) -> Tensor:
    """Runs time steps in a loop, over the sentences sorted by length."""
    ordered = sorted(sentences, key=lambda s: -len(s[0]))
    lengths = [len(words) for words, _ in ordered]
    counts = [sum(n > t for n in lengths) for t in range(lengths[0])]
    words = pad_sequence([words for words, _ in ordered])
    tags = pad_sequence([tags for _, tags in ordered])
    rows = model.embed(torch.cat([words[t, :n] for t, n in enumerate(counts)])).split(counts)
    states = torch.cat(lstm_steps(model.layer, "", rows))
    if model.layer.bidirectional:
        back = lstm_steps(model.layer, "_reverse", rows[::-1])
        states = torch.cat([states, torch.cat(back[::-1])], 1)
    targets = torch.cat([tags[t, :n] for t, n in enumerate(counts)])
    return F.cross_entropy(model.out(states), targets, reduction="sum")


def scope_loss(model: Tagger, sentences: Sequence[Sentence]) -> Tensor:
    with ab.batch():
        return torch.stack([model(s) for s in sentences]).sum()


def eager_loss(model: Tagger, sentences: Sequence[Sentence]) -> Tensor:
    return torch.stack([model(s) for s in sentences]).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=["lstm", "gru", "rnn"], default="lstm")
    parser.add_argument("--bidirectional", action="store_true")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--embedding", type=int, default=128)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--eager", action="store_true", help="time eager too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    vocabulary, classes = 5000, 20
    model = Tagger(options.kind, vocabulary, classes, options.embedding, options)
    lengths = [random.randint(5, 40) for _ in range(options.instances)]
    sentences = [(torch.randint(vocabulary, (n,)), torch.randint(classes, (n,))) for n in lengths]
    losses: dict[str, Callable[[Tagger, Sequence[Sentence]], Tensor]] = {
        "packed": packed_loss,
        "steps": steps_loss,
        "scope": scope_loss,
    }
    if options.layers > 1 or options.kind == "rnn":
        del losses["steps"]
    if options.eager:
        losses["eager"] = eager_loss
    forward: dict[str, list[float]] = {name: [] for name in losses}
    total: dict[str, list[float]] = {name: [] for name in losses}
    expected: float | None = None
    for round_ in range(options.rounds + 2):
        for name, loss_of in losses.items():
            model.zero_grad(set_to_none=True)
            start = time.thread_time()
            loss = loss_of(model, sentences)
            middle = time.thread_time()
            loss.backward()
            end = time.thread_time()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = sum([g.square().sum().item() for g in grads], loss.item())
            expected = expected or norm
            assert abs(norm - expected) < 1e-3 * expected, f"{name}: {norm}, not {expected}"
            if round_ >= 2:
                forward[name].append(1e3 * (middle - start))
                total[name].append(1e3 * (end - start))
    scope = statistics.median(total["scope"])
    for name in losses:
        ratios = [a / b for a, b in zip(total[name], total["scope"], strict=True)]
        print(
            f"{name:8s} forward {statistics.median(forward[name]):8.1f} ms"
            f"  step {statistics.median(total[name]):8.1f} ms"
            f"  / scope {statistics.median(total[name]) / scope:5.2f}"
            f"  (median of ratios {statistics.median(ratios):5.2f})"
        )


if __name__ == "__main__":
    main()
