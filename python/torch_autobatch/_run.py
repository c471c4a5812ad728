"""``python -m torch_autobatch run``: a program, and advice on its blocks when it has ended."""

import runpy
import sys
from pathlib import Path

from torch_autobatch import _blocks
from torch_autobatch._merge import merged
from torch_autobatch._report import Report
from torch_autobatch._report_advice import plural, short


class Collector:
    """The reports of all blocks, by the line that opens them."""

    def __init__(self) -> None:
        self.blocks: dict[str, tuple[int, Report]] = {}
        self.largest = Report()  # with its trace, if there is one

    def add(self, report: Report) -> None:
        line = _blocks.line_of_user()
        count, before = self.blocks.get(line, (0, Report()))
        self.blocks[line] = count + 1, merged([before, report])
        if report.ops >= self.largest.ops:
            self.largest = report

    def text(self) -> str:
        """A report for each line, those with the most launches first."""
        if not self.blocks:
            return "torch_autobatch: the program opened no block.\n"
        blocks = sorted(self.blocks.items(), key=lambda item: -item[1][1].launches)
        return "\n".join(
            f"--- {plural(count, 'block')} at {short(line)}\n{report}"
            for line, (count, report) in blocks
        )


def run(script: str, arguments: list[str], save: str | None = None) -> None:
    """Runs a script as ``python script arguments`` does, and prints advice to stderr at its end.

    ``save`` names a file for the picture (or trace, or graph) of its largest block.
    """
    collector = Collector()
    _blocks.observers.append(collector.add)
    _blocks.profile_all = save is not None
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[0] = before
        _blocks.observers.remove(collector.add)
        _blocks.profile_all = False
        print(collector.text(), file=sys.stderr, end="")
        if save is not None:
            collector.largest.save(save)
