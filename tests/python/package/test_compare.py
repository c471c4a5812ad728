"""`python -m benchmarks.compare`: ratios of two trees' measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compare


def result(least: float, hand: float, eager: float, hidden: int = 64) -> dict[str, object]:
    return {
        "workload": "tagger",
        "hidden": hidden,
        "minibatch": 8,
        "timings": {"ours": {"least": least}},
        "ours_against": {"hand": hand, "eager": eager},
    }


def write(path: Path, *results: dict[str, object]) -> str:
    path.write_text(json.dumps({"results": results}))
    return str(path)


def test_the_least_times_and_medians_of_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [write(tmp_path / f"base-{i}", result(10 + i, 0.5, 4)) for i in range(3)]
    ours = [
        write(tmp_path / f"ours-{i}", result(5 + i, 1 + i, 8), result(1, 1, 1, 9)) for i in (0, 1)
    ]
    assert compare.main(["--base", *base, "--ours", *ours]) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == 3  # without hidden 9, which the base did not measure
    row = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert row == ["tagger", "64", "8", "10.00", "5.00", "2.00", "0.50", "1.50", "4.00", "8.00"]


def test_nothing_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, ours = write(tmp_path / "a", result(1, 1, 1)), write(tmp_path / "b", result(1, 1, 1, 9))
    assert compare.main(["--base", base, "--ours", ours]) == 1
    assert "no measurement" in capsys.readouterr().err
