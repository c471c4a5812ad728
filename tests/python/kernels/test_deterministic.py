"""``torch.use_deterministic_algorithms``: no error, and the same bits for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
import torch_autobatch as ab
from torch import Tensor, nn

WORDS = 6  # few words, so that a minibatch repeats each of them
WIDTH = 48


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(request.param)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


class Model(nn.Module):
    """Gradients are scattered into embeddings, shared states and selected rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)
        self.start = nn.Parameter(torch.rand(1, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        rows = self.embedding(words)
        h = self.start
        for row in rows.unbind():
            h = self.mix(torch.cat([h, row.unsqueeze(0)], 1)).tanh()
        picked = rows[words % len(words)] * h.expand(len(words), WIDTH)
        bags = F.embedding_bag(words, self.embedding.weight, torch.tensor([0]), mode="sum")
        return (picked.sum(0, keepdim=True) * bags + h.gather(1, words.unsqueeze(0))[:, :1]).sum()


def gradients(model: Model, sentences: list[Tensor], block: bool) -> list[Tensor]:
    with ab.batch(enabled=block):
        losses = [model(words) for words in sentences]
    return list(torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters())))


@pytest.mark.usefixtures("deterministic")
def test_gradients_have_the_same_bits_each_time() -> None:
    model = Model()
    torch.manual_seed(1)
    sentences = [torch.randint(WORDS, (n % 7 + 2,)) for n in range(120)]
    first = gradients(model, sentences, True)
    for _ in range(4):
        again = gradients(model, sentences, True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for ours, eager in zip(first, gradients(model, sentences, False), strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4 * eager.abs().max().item())
