"""Runs the parts and writes their results into one folder. A stopped run can be resumed.

python -m benchmarks.gpu --device cuda --out build/gpu [--minutes 9]

The folder contains report.md, results.json (all figures), traces.zip, log.txt (the parts' output)
and, if matplotlib is installed, speed.png and experts.png. All files are written after each part.
Finished parts do not run again. Parts that failed or took too long run again, after the parts that
have not run yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.parts import JSON, ROOT, TRACES, Part, all_parts

DONE, FAILED, LATE, SKIPPED = "done", "failed", "took too long", "skipped"
LAST_LINES = 15
SHORTEST = 15  # if fewer seconds are left, no part is started


class Folder:
    """The folder of the results, and its current results."""

    def __init__(self, path: Path, device: str) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.results = path / "results.json"
        self.data: dict[str, Any] = {"device": device, "parts": {}}
        if self.results.exists():
            self.data = json.loads(self.results.read_text(encoding="utf-8"))
            if self.data["device"] != device:
                sys.exit(
                    f"error: {path} has results of the device {self.data['device']}, and this is "
                    f"{device}; remove it or give another with OUT="
                )

    def status(self, part: Part) -> str | None:
        """Returns the status of a part that has already run, else None."""
        found = self.data["parts"].get(part.name)
        return found["status"] if found else None

    def record(self, part: Part, result: dict[str, Any]) -> None:
        """Adds the result of a part, and writes all files again."""
        self.data["parts"].pop(part.name, None)
        self.data["parts"][part.name] = result
        written = self.path / "results.json.new"
        written.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")
        written.replace(self.results)  # an interrupted run never leaves a half-written file
        report.write(self.data, self.path)


def run(part: Part, folder: Folder, most: float) -> dict[str, Any]:
    """Runs a part with a time limit. Returns its status, seconds, last lines and results."""
    if missing := part.missing():
        return {"status": SKIPPED, "seconds": 0.0, "output": missing}
    figures = folder.path / "part.json"
    figures.unlink(missing_ok=True)
    places = {JSON: str(figures), TRACES: str(folder.path / "traces.zip")}
    command = [places.get(word, word) for word in part.command]
    limit = min(part.limit, most)
    start = time.monotonic()
    status, output = _run(command, os.environ | part.environment, limit)
    result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    with (folder.path / "log.txt").open("a", encoding="utf-8") as log:
        log.write(f"== {part.name}: {status}, {result['seconds']} s\n{output}\n")
    if status == LATE:
        output += f"\nended after {limit:.0f} seconds"
    result["output"] = "\n".join(output.strip().splitlines()[-LAST_LINES:])
    if figures.exists():  # a part that took too long may have written some figures
        result["figures"] = json.loads(figures.read_text(encoding="utf-8"))
        figures.unlink()
    return result


def _run(command: Sequence[str], environment: dict[str, str], limit: float) -> tuple[str, str]:
    packages = [str(ROOT / "python"), *filter(None, [environment.get("PYTHONPATH")])]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | {"PYTHONPATH": os.pathsep.join(packages)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # its child processes can be ended together
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return (DONE if process.returncode == 0 else FAILED), output
    except subprocess.TimeoutExpired:
        return LATE, _end(process)
    except BaseException:
        _end(process)
        raise


def _end(process: subprocess.Popen[str]) -> str:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    return output


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if a part failed or has not run."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default="cuda", help="as PyTorch names it, or name@module; cpu rehearses it")
    add("--small", action="store_true", help="small sizes, as on any device but cuda")
    add("--out", type=Path, default=ROOT / "build" / "gpu", help="the folder (build/gpu)")
    add("--minutes", type=float, default=20, help="for all parts together (20)")
    add("--architecture", default="90", help="the one to build kernels for (90)")
    add("--only", default="", help="parts whose names begin so: row, experts, 'row: tagger'")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    small = options.small or not options.device.startswith("cuda")
    folder = Folder(options.out.resolve(), options.device)
    parts = [
        part
        for part in all_parts(options.device, options.architecture, small)
        if part.name.startswith(options.only) and folder.status(part) != DONE
    ]
    parts.sort(key=lambda part: folder.status(part) in (FAILED, LATE))  # failed parts run last
    for k, part in enumerate(parts):
        left = end - time.monotonic()
        if left < SHORTEST:
            print(f"{len(parts) - k} parts are left: the time is over; run it again to go on")
            return 1
        print(f"{part.name} ...", end=" ", flush=True)
        result = run(part, folder, left)
        print(f"{result['status']}, {result['seconds']:.0f} s", flush=True)
        folder.record(part, result)
        if part.name == "build" and result["status"] != DONE:
            print(result["output"])
            return 1
    bad = [name for name, part in folder.data["parts"].items() if part["status"] in (FAILED, LATE)]
    print(f"{folder.path / 'report.md'}" + (f"; failed: {', '.join(bad)}" if bad else ""))
    return int(bool(bad))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the running part too
    sys.exit(main())
