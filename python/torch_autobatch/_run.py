"""``python -m torch_autobatch run``: runs a program, then prints advice on its blocks."""

import dataclasses
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_autobatch import _C, _blocks
from torch_autobatch._merge import merged
from torch_autobatch._report import Report
from torch_autobatch._report_advice import findings_of
from torch_autobatch._report_files import check_name
from torch_autobatch._report_find_obstacles import obstacles
from torch_autobatch._report_groups import plural, short
from torch_autobatch._report_obstacle import Obstacle, added
from torch_autobatch._report_text import text


@dataclasses.dataclass
class Place:
    """The blocks that one line opened."""

    count: int = 0
    report: Report = dataclasses.field(default_factory=Report)
    obstacles: list[Obstacle] = dataclasses.field(default_factory=list)

    def add(self, report: Report) -> None:
        self.count += 1
        self.report = merged([self.report, report])
        self.obstacles = added([*self.obstacles, *obstacles(report)])


class Collector:
    """Collects the reports of all blocks, by the line that opens them."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        # Facts of the largest block. The report is made later, because backward may run after the
        # block.
        self.largest: _C.ReportFacts | None = None
        self._most = -1

    def add(self, facts: "_C.ReportFacts") -> None:
        report = _blocks.report_of(facts)
        self.places.setdefault(_blocks.line_of_user(), Place()).add(report)
        if report.ops > self._most:
            self.largest, self._most = facts, report.ops

    def text(self) -> str:
        """Returns a report for each line, in descending order of launches."""
        if not self.places:
            return "torch_autobatch: the program opened no block.\n"
        places = sorted(self.places.items(), key=lambda item: -item[1].report.launches)
        return "".join(
            f"--- {plural(place.count, 'block')} at {short(line)}\n"
            f"{text(place.report, findings_of(place.obstacles))}\n"
            for line, place in places
        )

    def save(self, path: Path) -> None:
        """Writes the report of the largest block."""
        report = Report() if self.largest is None else _blocks.report_of(self.largest)
        report.save(path)


def run(
    program: str, arguments: list[str], save: str | None = None, *, module: bool = False
) -> None:
    """Runs a program as ``python program arguments`` does. Then prints advice to stderr.

    Args:
        program: the path of a script, or the name of a module if ``module`` is true, as in
            ``python -m``.
        arguments: the arguments of the program.
        save: a file for the report of the largest block, as for ``Report.save``.
        module: whether ``program`` is a module.

    Raises:
        ValueError: if the suffix of ``save`` is not supported.
        OSError: if ``save`` can't be written, or the script does not exist.
    """
    check(program, save, module=module)
    collector = Collector()
    _blocks.observers.append(collector.add)
    _blocks.profile_all = save is not None
    try:
        with _as_main(program, arguments, module):
            if module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program, run_name="__main__")
    finally:
        _blocks.observers.remove(collector.add)
        _blocks.profile_all = False
        print(collector.text(), file=sys.stderr, end="")
        if save is not None:
            collector.save(Path(save))


def check(program: str, save: str | None, *, module: bool) -> None:
    """Checks the arguments of ``run``, so that errors are not raised after hours of running.

    Raises:
        ValueError, OSError: as for ``run``.
    """
    if not module and not Path(program).exists():
        raise FileNotFoundError(f"script {program!r} does not exist")
    if save is None:
        return
    path = Path(save)
    check_name(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--save {path}: directory {path.parent} does not exist")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"--save {path}: this file cannot be written")


@contextmanager
def _as_main(program: str, arguments: list[str], module: bool) -> Iterator[None]:
    """Sets ``sys.argv`` and ``sys.path`` for the program, and restores them."""
    before = sys.argv, sys.path[0]
    directory = os.getcwd() if module else str(Path(program).resolve().parent)
    sys.argv, sys.path[0] = [program, *arguments], directory
    try:
        yield
    finally:
        sys.argv, sys.path[0] = before
