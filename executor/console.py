"""What the executor's commands show of the log: lines on stdout, warnings on stderr.

The library itself prints nothing: whoever calls :func:`executor.train` decides what is shown.
"""

from __future__ import annotations

import logging
import sys


class _Console(logging.Handler):
    """Writes each line in one piece, where several ranks write."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        text = record.getMessage()
        is_warning = record.levelno >= logging.WARNING
        stream = sys.stderr if is_warning else sys.stdout
        stream.write(f"warning: {text}\n" if is_warning else f"{text}\n")
        stream.flush()


def show_log(rank: int = 0) -> None:
    """Show what the executor logs, and on the first rank the planner's warnings.

    Args:
        rank: of this process; what is wrong with a file all ranks find, and the first says it.
    """
    for name, level in (("executor", logging.INFO), ("planner", logging.WARNING)):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _Console) for handler in logger.handlers):
            logger.addHandler(_Console())
        logger.setLevel(level if name == "executor" or rank == 0 else logging.ERROR)
