"""The program that test_cold_start.py runs in a new process: `cold_start_cases.py ops|rest`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

torch.ones(1, requires_grad=True).abs().backward()
imported = set(sys.modules)
import torch_autobatch as ab  # noqa: E402  (after what eager imports is known)

HEAVY = (
    "torch._dynamo",
    "torch._inductor",
    "torch.fx.experimental",
    "torch._subclasses",
    "torch._export",
    "torch._functorch._aot_autograd",
    "sympy",
    "networkx",
)


def check(what: str) -> None:
    new = sorted(m for m in set(sys.modules) - imported if m.startswith(HEAVY))
    assert not new, f"{what} imports {new[:5]}"


check("import torch_autobatch")
model = nn.Linear(8, 8)


def first_use(name: str, function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    with ab.batch() as scope:
        hidden = [model(torch.ones(4, 8) * (k + 1)).view(shape) for k in range(3)]
        results = [function(h) for h in hidden]
        assert len(scope.report().flushes) == 0, (name, str(scope.report()))
    check(name)
    for result in results:
        if result.requires_grad:
            result.sum().backward()
    check(name + "'s backward")


index = torch.tensor([0, 2])
long = torch.zeros(4, 8, dtype=torch.long)
target = torch.tensor([0, 1, 2, 3])
OPS: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("gt", lambda x: x > 0),
    ("eq", lambda x: x == x.t().t()),
    ("and", lambda x: (x > 0) & (x < 1)),
    ("where", lambda x: torch.where(x > 0, x, 0.0)),
    ("maximum", lambda x: torch.maximum(x, -x)),
    ("masked_fill", lambda x: x.masked_fill(x > 0, 0.0)),
    ("clamp", lambda x: x.clamp(0, 1)),
    ("pow", lambda x: x.abs() ** 1.5),
    ("floor", lambda x: x.floor()),
    ("lerp", lambda x: x.lerp(-x, 0.3)),
    ("gelu", F.gelu),
    ("softplus", F.softplus),
    ("logsigmoid", F.logsigmoid),
    ("kl_div", lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1), reduction="batchmean")),
    ("mse", lambda x: F.mse_loss(x, torch.zeros(4, 8))),
    ("nll", lambda x: F.cross_entropy(x, target)),
    ("bce", lambda x: F.binary_cross_entropy_with_logits(x, torch.ones(4, 8))),
    ("einsum", lambda x: torch.einsum("ij,kj->ik", x, x)),
    ("cdist", lambda x: torch.cdist(x, x)),
    ("svd", lambda x: torch.linalg.svdvals(x)),
    ("inverse", lambda x: torch.inverse(x @ x.t() + 9 * torch.eye(4))),
    ("cholesky", lambda x: torch.linalg.cholesky(x @ x.t() + 9 * torch.eye(4))),
    ("solve", lambda x: torch.linalg.solve(x @ x.t() + 9 * torch.eye(4), x)),
    ("logdet", lambda x: torch.logdet(x @ x.t() + 9 * torch.eye(4))),
    ("eigh", lambda x: torch.linalg.eigvalsh(x @ x.t())),
    ("topk", lambda x: x.topk(2)[0]),
    ("sort", lambda x: x.sort(-1)[0]),
    ("argsort", lambda x: x.argsort(-1)),
    ("cumsum", lambda x: x.cumsum(-1)),
    ("cumprod", lambda x: x.cumprod(-1)),
    ("logcumsumexp", lambda x: x.logcumsumexp(-1)),
    ("prod", lambda x: x.prod(-1)),
    ("var", lambda x: x.var(-1)),
    ("norm", lambda x: x.norm()),
    ("amax", lambda x: x.amax(-1)),
    ("argmax", lambda x: x.argmax(-1)),
    ("median", lambda x: x.median(-1)[0]),
    ("logsumexp", lambda x: x.logsumexp(-1)),
    ("quantile", lambda x: x.quantile(0.5, -1)),
    ("any", lambda x: (x > 0).any(-1)),
    ("gather", lambda x: x.gather(1, long)),
    ("scatter_add", lambda x: x.scatter_add(1, long, x)),
    ("index_select", lambda x: x.index_select(0, index)),
    ("index", lambda x: x[index]),
    ("take", lambda x: x.take(index)),
    ("pad", lambda x: F.pad(x, (1, 1))),
    ("reflect", lambda x: F.pad(x, (1, 1), mode="reflect")),
    ("roll", lambda x: x.roll(1, 0)),
    ("flip", lambda x: x.flip(0)),
    ("tril", lambda x: x.tril()),
    ("repeat", lambda x: x.repeat(2, 1)),
    ("unfold", lambda x: x.unfold(1, 2, 1) * 1),
    ("diagonal", lambda x: x.diagonal() * 1),
    ("outer", lambda x: torch.outer(x[0], x[1])),
    ("layer_norm", lambda x: F.layer_norm(x, (8,))),
    ("normalize", lambda x: F.normalize(x)),
    ("cosine", lambda x: F.cosine_similarity(x, -x)),
    ("one_hot", lambda x: x * F.one_hot(target, 8)),
    ("attention", lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])),
    ("dropout", lambda x: F.dropout(x, 0.5)),
    ("bernoulli", lambda x: torch.bernoulli(x.sigmoid())),
    ("fft", lambda x: torch.fft.rfft(x).abs()),
    ("searchsorted", lambda x: torch.searchsorted(torch.arange(8.0), x)),
    ("conv1d", lambda x: F.conv1d(x[None], torch.ones(2, 4, 3))),
    ("embedding_of", lambda x: x * F.embedding(target, torch.ones(5, 8))),
    ("to", lambda x: x.to(torch.float64)),
    ("trapezoid", lambda x: torch.trapezoid(x)),
    ("kron", lambda x: torch.kron(x, x)),
]
IMAGES: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    ("conv2d", lambda x: F.conv2d(x, torch.ones(3, 2, 3, 3))),
    ("conv_transpose2d", lambda x: F.conv_transpose2d(x, torch.ones(2, 3, 3, 3))),
    ("max_pool2d", lambda x: F.max_pool2d(x, 2)),
    ("avg_pool2d", lambda x: F.avg_pool2d(x, 2)),
    ("adaptive", lambda x: F.adaptive_avg_pool2d(x, 2)),
    ("bilinear", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")),
    ("nearest", lambda x: F.interpolate(x, size=(3, 3))),
    ("group_norm", lambda x: F.group_norm(x, 2)),
    ("instance_norm", lambda x: F.instance_norm(x)),
    ("batch_norm", lambda x: F.batch_norm(x, torch.zeros(2), torch.ones(2))),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x.reshape(1, 4, 2, 4), 2)),
    ("grid_sample", lambda x: F.grid_sample(x, torch.zeros(1, 3, 3, 2), align_corners=False)),
    ("im2col", lambda x: F.unfold(x, 2)),
]


def check_ops() -> None:
    for name, function in OPS:
        first_use(name, function, (4, 8))
    for name, function in IMAGES:
        first_use(name, function, (1, 2, 4, 4))


def check_rest() -> None:
    with ab.batch() as scope:
        scope.backward(
            [
                (model(torch.ones(4, 8) * k) > 0).float().sum() + model(torch.ones(4, 8)).sum()
                for k in range(3)
            ]
        )
    check("scope.backward")
    x = torch.ones(4, 8, requires_grad=True)
    with ab.batch():
        y = [(model(x) * (k + 1)).tanh().sum() for k in range(3)]
    (g,) = torch.autograd.grad(sum(y), x, create_graph=True)
    g.sum().backward()
    check("create_graph")
    with ab.batch(verify=True):
        y = [(model(torch.ones(4, 8)) > k).sum() for k in range(3)]
    check("verify")
    ab.map(lambda k: float(model(torch.ones(4, 8) * k).topk(2)[0].sum()), range(3))
    check("map")
    cell = ab.cell(lambda a: (model(a) > 0).float() * model(a))
    with ab.batch():
        y = [cell(torch.ones(1, 8) * k) for k in range(3)]
    sum(t.sum() for t in y).backward()
    check("cell")
    lstm, layer = nn.LSTM(8, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with ab.batch(), torch.autocast("cpu"):
        y = [layer(lstm(model(torch.ones(1, 4 + k, 8)))[0]).sum() for k in range(3)]
    sum(y).backward()
    check("layers")


if __name__ == "__main__":
    {"ops": check_ops, "rest": check_rest}[sys.argv[1]]()
