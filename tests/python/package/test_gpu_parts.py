"""`make gpu` resumes after a stop, ends parts that take too long, and keeps their results."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import devices
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.parts import JSON, Part, all_parts, python


def part(name: str, code: str) -> Part:
    return Part(name, python("-c", code, JSON), 100)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *parts: Part, device: str = "cpu") -> Any:
    monkeypatch.setattr(gpu, "all_parts", lambda *_: list(parts))
    status = gpu.main(["--device", device, "--out", str(out)])
    return status, json.loads((out / "results.json").read_text())["parts"]


def test_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('x')"
    good, bad = part("good", count), part("bad", "raise SystemExit('no such thing')")
    status, found = run(monkeypatch, tmp_path / "out", bad, good)
    assert (status, found["good"]["status"], found["bad"]["status"]) == (1, "done", "failed")
    report = (tmp_path / "out" / "report.md").read_text()
    assert "### bad: failed" in report
    assert "no such thing" in report

    mended = part("bad", "print('it is there')")
    status, found = run(monkeypatch, tmp_path / "out", mended, good)
    assert (status, found["bad"]["status"]) == (0, "done")
    assert (tmp_path / "runs").read_text() == "x"  # not run again
    assert "What failed" not in (tmp_path / "out" / "report.md").read_text()


def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The part ends with the processes that it started. Results that it wrote are kept."""
    code = (
        "import os, pathlib, subprocess, sys\n"
        "sleeper = subprocess.Popen(['sleep', '1000'])\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(sleeper.pid))\n"
        "pathlib.Path(sys.argv[1] + '.new').write_text('[{\"experts\": 1}]')\n"
        "os.replace(sys.argv[1] + '.new', sys.argv[1])\n"
        "sleeper.wait()"
    )
    communicate = subprocess.Popen.communicate

    def too_long(process: Any, timeout: float | None = None) -> Any:
        if timeout is None:
            return communicate(process)
        while not (tmp_path / "part.json").exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", too_long)
    status, found = run(monkeypatch, tmp_path, part("slow", code))
    assert (status, found["slow"]["status"]) == (1, "took too long")
    assert found["slow"]["figures"] == [{"experts": 1}]
    assert "ended after 100 seconds" in found["slow"]["output"]
    sleeper = int((tmp_path / "pid").read_text())
    for _ in range(6000):  # wait for the signal to arrive
        if not runs(sleeper):
            break
        time.sleep(0.01)
    assert not runs(sleeper)


def runs(process: int) -> bool:
    """Returns whether the process runs. An ended process may be a zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_results_of_another_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, tmp_path, part("one", ""))
    with pytest.raises(SystemExit, match="has results of the device cpu, and this is cuda"):
        run(monkeypatch, tmp_path, device="cuda")


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needy = Part("needy", python("-c", "1"), 100, needs=(lambda: "", lambda: "no such tool"))
    status, found = run(monkeypatch, tmp_path, needy)
    assert (status, found["needy"]["status"]) == (0, "skipped")
    assert found["needy"]["output"] == "no such tool"


def test_names_of_parts_differ() -> None:
    for small in (True, False):
        names = [p.name for p in all_parts("cuda", "90", small)]
        assert len(set(names)) == len(names)
        assert names[0] == "build"


@dataclass(frozen=True)
class Example:
    words: list[Tensor]
    count: int
    score: Tensor


def test_examples_and_plans_move() -> None:
    device = torch.device("meta")
    word = torch.tensor([3])
    examples = [Example([word, word], 2, torch.rand(2, 3)), Example([word], 1, torch.rand(()))]
    first, second = devices.moved(examples, device)
    assert first.words[0] is first.words[1] is second.words[0]
    assert first.score.device == device
    assert (first.score.shape, first.count) == ((2, 3), 2)

    plan = devices.sent(examples[0], device)
    assert plan.words[0].device == plan.score.device == device
    assert (plan.words[0].shape, plan.words[0].dtype) == ((1,), torch.long)
    assert (plan.score.shape, plan.score.dtype) == ((2, 3), torch.float)
    assert devices.sent(examples[0], devices.CPU) is examples[0]
