"""Writes a ZIP archive of traces of one step per variant (except eager), for Perfetto.

python -m benchmarks.gpu.trace binary-tree-lstm 128 64 --device cuda --archive traces.zip
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import devices, measure
from benchmarks.gpu import row
from benchmarks.measure import EAGER


def activities(device: torch.device) -> list[ProfilerActivity]:
    """Returns the activities that the profiler records for this device."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def main(arguments: Sequence[str] | None = None) -> None:
    options = row.parse(__doc__ or "", arguments, archive={"type": Path, "required": True})
    workload = row.make(options)
    variants = {**measure.variants_of(workload), **row.variants_of(workload, {})}
    for name, run in variants.items():
        if name == EAGER:
            continue  # eager has tens of thousands of launches
        for turn in range(3):
            measure.run_step(run, workload, workload.minibatch(options.minibatch, turn), True)
        with profile(activities=activities(workload.device)) as profiler:
            measure.run_step(run, workload, workload.minibatch(options.minibatch, 0), True)
            devices.synchronize(workload.device)
        with (
            tempfile.TemporaryDirectory() as folder,
            zipfile.ZipFile(options.archive, "a", zipfile.ZIP_DEFLATED) as archive,
        ):
            made = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(made))
            what = f"{options.workload}-{options.hidden}-{options.minibatch}-{name}.json"
            if what not in archive.namelist():
                archive.write(made, what)
                print(f"{what}: {made.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
