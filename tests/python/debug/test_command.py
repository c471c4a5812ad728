"""``python -m torch_autobatch``: run and doctor."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch_autobatch import __main__ as command

PROGRAM = """\
import sys
import torch
import torch_autobatch as ab

linear, x = torch.nn.Linear(4, 4), torch.ones(4)


def train(steps):
    for step in range(steps):
        with ab.batch(adaptive=False):
            total = 0.0
            for _ in range(8):
                loss = linear(x).sum()
                total += loss.item()


def evaluate():
    ab.map(lambda i: linear(x), range(8))


print(__name__, sys.argv)
train(int(sys.argv[1]))
evaluate()
if "--fail" in sys.argv:
    raise ValueError("mine")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_run_advises_when_the_program_has_ended(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list(sys.argv), list(sys.path)
    command.main(["run", str(program), "3", "--verbose"])
    assert (sys.argv, sys.path) == before
    out, err = capsys.readouterr()
    assert out == f"__main__ ['{program}', '3', '--verbose']\n"
    blocks = [line for line in err.splitlines() if line.startswith("---")]
    assert [line.split(" at ")[0] for line in blocks] == ["--- 3 blocks", "--- 1 block"]
    assert blocks[0].endswith("train.py:10")
    assert blocks[1].endswith("train.py:18")
    assert ".item(): 24 early flushes" in err.splitlines()[3]
    assert "total += " not in out


def test_run_of_a_program_that_fails(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="mine"):
        command.main(["run", str(program), "1", "--fail"])
    assert "1 block at" in capsys.readouterr().err


def test_run_shows_the_programs_traceback(program: Path) -> None:
    command = [sys.executable, "-m", "torch_autobatch", "run", str(program), "1", "--fail"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith("ValueError: mine\n")
    assert f'"{program}", line 25, in <module>' in done.stderr
    assert ".item(): 8 early flushes" in done.stderr


DIFFERING_BLOCKS = """\
import torch
import torch_autobatch as ab

layers = [torch.nn.Linear(4, 4) for _ in range(3)]
for step in range(6):
    with ab.batch(adaptive=False) as scope:
        x = torch.ones(2 + step, 4)
        losses = [layers[step % 3](x).cumprod(0).sum() for _ in range(8)]
        if step % 2:
            scope.flush()
            losses[0].item()
            more = [layers[step % 3](x).sum() for _ in range(8)]
            float(more[0])
"""


def test_what_differs_from_block_to_block_keeps_nothing_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "steps.py"
    program.write_text(DIFFERING_BLOCKS)
    command.main(["run", str(program)])
    text = capsys.readouterr().err
    assert "--- 6 blocks at " in text
    assert "weights of" not in text
    assert "sizes of" not in text
    [finding] = [line for line in text.splitlines() if line.startswith(" 1. ")]
    # An estimate: the last two batches of each of the three blocks could have joined the others.
    assert finding.endswith("steps.py:13  float(): 3 early flushes, about 6 launches more")


def test_run_of_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("from . import steps\nimport sys\nprint(sys.argv[1:])\n")
    (package / "steps.py").write_text(DIFFERING_BLOCKS)
    with contextlib.chdir(tmp_path):
        command.main(["run", "-m", "trainer", "--epochs", "1"])
    out, err = capsys.readouterr()
    assert out == "['--epochs', '1']\n"
    assert "--- 6 blocks at trainer/steps.py:6" in err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--save", "picture.pdf", "train.py"], "expected a name that ends in .html, .json"),
        (["--save", "nowhere/picture.html", "train.py"], "directory nowhere does not exist"),
        (["nothing.py"], "script 'nothing.py' does not exist"),
    ],
)
def test_run_says_first_what_can_not_be_done(
    program: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.chdir(program.parent), pytest.raises(SystemExit) as end:
        command.main(["run", *arguments])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""  # the program did not start
    assert why in err


def test_run_of_a_program_without_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nothing.py").write_text("")
    command.main(["run", str(tmp_path / "nothing.py")])
    assert capsys.readouterr().err == "torch_autobatch: the program opened no block.\n"


def test_run_saves_the_picture_of_the_largest_block(program: Path, tmp_path: Path) -> None:
    command.main(["run", "--save", str(tmp_path / "batches.html"), str(program), "2"])
    page = (tmp_path / "batches.html").read_text()
    assert '"what": ".item()"' in page
    assert '"timeline": null' not in page


def test_run_saves_the_backward_as_well(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(DIFFERING_BLOCKS + "    torch.stack(losses).sum().backward()\n")
    command.main(["run", "--save", str(tmp_path / "batches.html"), str(program)])
    times = re.findall(r'"backward": ([\d.]+)', (tmp_path / "batches.html").read_text())
    assert max(map(float, times)) > 0


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        command.main(["doctor"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "built with torch" in text
    assert "fast paths" in text
    assert text.count("ok     ") == 3
    assert "FAILED" not in text


def test_doctor_finds_a_wrong_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_autobatch import _doctor

    monkeypatch.setattr(
        _doctor, "_in_block", lambda model, instances: [2 * model(x) for x in instances]
    )
    assert _doctor.main("") == 1
    assert capsys.readouterr().out.count("FAILED") == 2


def test_nothing_to_do_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([])
    assert "expected one of run, doctor" in capsys.readouterr().err


# --- the log ---


def run_with_log(program: Path, level: str) -> subprocess.CompletedProcess[str]:
    import os

    environment = {**os.environ, "TORCH_AUTOBATCH_LOG": level}
    return subprocess.run(
        [sys.executable, str(program), "1"], env=environment, capture_output=True, text=True
    )


def test_the_log_at_each_level(program: Path) -> None:
    lines = run_with_log(program, "warning").stderr.splitlines()
    warnings = [line for line in lines if line.startswith("torch_autobatch WARNING: ")]
    assert len(warnings) == 8
    assert "early flush of 2 ops in 2 batches: .item() at" in warnings[0]
    assert "train.py:14: " in warnings[0]
    info = run_with_log(program, "INFO").stderr
    assert "torch_autobatch INFO: block at " in info
    debug = run_with_log(program, "DEBUG").stderr
    assert "the end of ab.map at" in debug
    assert run_with_log(program, "").stderr == ""


def test_records_go_to_the_programs_own_handlers_alone(program: Path) -> None:
    program.write_text("import logging\n" + PROGRAM + "\nlogging.basicConfig()\ntrain(1)\n")
    lines = run_with_log(program, "WARNING").stderr.splitlines()
    ours = [line for line in lines if line.startswith("torch_autobatch WARNING: ")]
    theirs = [line for line in lines if line.startswith("WARNING:torch_autobatch:")]
    assert (len(ours), len(theirs), len(lines)) == (8, 8, 16)


def test_a_level_that_is_none(program: Path) -> None:
    done = run_with_log(program, "loud")
    assert done.returncode != 0
    assert "TORCH_AUTOBATCH_LOG='LOUD': expected one of DEBUG, INFO" in done.stderr
