"""``python -m torch_autobatch doctor``: shows the build and its fast paths, and checks results."""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import torch_autobatch as ab
from torch_autobatch import _C


def fast_paths() -> list[str]:
    """Returns a line for each fast path that depends on the machine or on Python's version."""
    capability = torch.backends.cpu.get_cpu_capability()
    has_kernels = capability.startswith(("AVX2", "AVX512"))
    is_311 = sys.version_info[:2] == (3, 11)
    off = [name for name, (_, is_on, _) in _C.switches().items() if not is_on]
    return [
        *(f"{_mark(False)} {name} (AUTOBATCH_DISABLE)" for name in off),
        f"{_mark(has_kernels)} torch_autobatch's kernels for CPUs with AVX2 or AVX-512 (this is "
        f"{capability})",
        f"{_mark('without CUDA' not in _C.build_info())} CUDA kernels",
        f"{_mark(is_311)} quick check whether a module has changed (needs Python 3.11; this is "
        f"{sys.version_info.major}.{sys.version_info.minor})",
        f"{_mark(is_311)} reuse of tensor objects (needs Python 3.11)",
    ]


def _mark(is_on: bool) -> str:
    return "on  " if is_on else "off "


# --- the self-check ---


class _Recurrent(nn.Module):
    """A recurrent network for instances of different lengths, with a cell among its ops."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.out = nn.LSTMCell(8, 16), nn.Linear(16, 4)

    @ab.cell
    def score(self, h: Tensor) -> Tensor:
        return torch.tanh(self.out(h)).logsumexp(-1)

    def forward(self, words: Tensor) -> Tensor:
        h, c = words.new_zeros(1, 16), words.new_zeros(1, 16)
        for word in words:
            h, c = self.step(word[None], (h, c))
        return self.score(h).sum()


class _Reader(_Recurrent):
    """A recurrent network whose control flow depends on values that it reads."""

    def forward(self, words: Tensor) -> Tensor:
        h = words.new_zeros(1, 16)
        for word in words:
            h, _ = self.step(word[None], (h, h))
            if h.sum() > 0:
                h = h * 0.5
        return self.score(h).sum()


def _in_block(model: nn.Module, instances: Sequence[Tensor]) -> list[Tensor]:
    with ab.batch(adaptive=False):
        return [model(x) for x in instances]


def _in_map(model: nn.Module, instances: Sequence[Tensor]) -> list[Tensor]:
    return ab.map(model, instances)


def check() -> list[tuple[str, float, Exception | None]]:
    """Runs small models batched and eagerly.

    Returns, for each model: its name, the largest relative difference, and the error if one was
    raised.
    """
    torch.manual_seed(0)
    lengths = [1 + i % 7 for i in range(32)]
    instances = [torch.randn(n, 8, dtype=torch.float64) for n in lengths]
    outcomes: list[tuple[str, float, Exception | None]] = []
    for name, model, way in (
        ("batch(), a recurrent network", _Recurrent(), _in_block),
        ("batch(), a loop that reads values", _Reader(), _in_block),
        ("map(), the same loop", _Reader(), _in_map),
    ):
        model.double()
        try:
            expected = _gradients(model, [model(x) for x in instances])
            found = _gradients(model, way(model, instances))
            pairs = zip(expected, found, strict=True)
            worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
            outcomes.append((name, worst, None))
        except Exception as error:
            outcomes.append((name, float("inf"), error))
    return outcomes


def _gradients(model: nn.Module, losses: list[Tensor]) -> list[Tensor]:
    """Returns the losses, and the gradients of their sum."""
    total = torch.stack(losses)
    return [total.detach(), *torch.autograd.grad(total.sum(), list(model.parameters()))]


def main(info: str) -> int:
    """Prints all results. Returns the exit status: 1 if something differs from eager."""
    print(info)
    print("\nfast paths")
    for line in fast_paths():
        print(f"  {line}")
    print("\nresults and gradients compared with eager mode")
    is_right = True
    for name, worst, error in check():
        ok = error is None and worst < 1e-9
        is_right &= ok
        what = (
            f"{type(error).__name__}: {error}"
            if error
            else f"largest relative difference {worst:.1e}"
        )
        print(f"  {'ok    ' if ok else 'FAILED'} {name}: {what}")
    return 0 if is_right else 1
