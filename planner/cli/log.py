"""What the command line shows of the log: warnings as notes, more with ``--verbose``."""

from __future__ import annotations

import logging

import typer


class _Notes(logging.Handler):
    """On stderr, whatever that is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        is_note = record.levelno >= logging.WARNING
        head = "note" if is_note else record.name
        typer.echo(f"{head}: {record.getMessage()}", err=True)


def show_log(*, verbose: bool) -> None:
    """Show what the planner logs.

    Args:
        verbose: every line with the name of its logger, not only warnings.
    """
    logger = logging.getLogger("planner")
    for handler in list(logger.handlers):
        if isinstance(handler, _Notes):
            logger.removeHandler(handler)
    logger.addHandler(_Notes())
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
