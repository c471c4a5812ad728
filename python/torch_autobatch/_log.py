"""Logs flushes and blocks, through the logger ``torch_autobatch``.

The environment variable ``TORCH_AUTOBATCH_LOG`` sets the level. WARNING logs early flushes, INFO
also logs each block, and DEBUG logs every flush. If the variable is set, records go to stderr,
unless the program has its own handlers.
"""

import logging
import os
from typing import TextIO

from torch_autobatch._report import Report
from torch_autobatch._report_flushes import cause_of_row, is_planned
from torch_autobatch._report_groups import plural, short

logger = logging.getLogger("torch_autobatch")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def set_up() -> None:
    """Configures the logger from the environment.

    Raises:
        ValueError: if ``TORCH_AUTOBATCH_LOG`` is not the name of a level.
    """
    level = os.environ.get("TORCH_AUTOBATCH_LOG", "").upper()
    if not level:
        return
    if level not in _LEVELS:
        raise ValueError(f"TORCH_AUTOBATCH_LOG={level!r}: expected one of {', '.join(_LEVELS)}")
    logger.setLevel(level)
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s: %(message)s"))
    logger.addHandler(handler)


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to stderr, unless the root logger has handlers when the record is emitted."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def is_on() -> bool:
    return logger.isEnabledFor(logging.WARNING) and logger.level != logging.NOTSET


def log_block(report: Report, line: str) -> None:
    """Logs the flushes of a block that has ended. ``line``: the line that opened it."""
    for flush in report.flushes:
        if is_planned(flush.reason):
            logger.debug(
                "%s of %s in %s: %s at %s",
                plural(flush.count, "flush"),
                plural(flush.nodes, "op"),
                plural(flush.batches, "batch"),
                flush.reason,
                short(flush.site),
            )
            continue
        cause = cause_of_row(report, flush)
        logger.warning(
            "%s of %s in %s: %s at %s: %s",
            plural(flush.count, "early flush"),
            plural(flush.nodes, "op"),
            plural(flush.batches, "batch"),
            cause.what,
            short(flush.caller or flush.site),
            cause.remedy,
        )
    logger.info(
        "block at %s: %s in %s",
        short(line),
        plural(report.nodes, "op"),
        plural(report.launches, "launch"),
    )
