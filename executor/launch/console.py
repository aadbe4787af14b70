"""Console output of the executor's commands: lines on stdout, warnings on stderr.

The library itself prints nothing: whoever calls :func:`executor.train` decides what is shown.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from executor.distributed.errors import FollowedError
from planner.errors import PipeplanError, print_in_any_encoding, printable


class _Console(logging.Handler):
    """Writes each line in one piece, where several ranks write."""

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        is_warning = record.levelno >= logging.WARNING
        say(f"{'warning: ' if is_warning else ''}{record.getMessage()}", err=is_warning)


def show_log(rank: int = 0) -> None:
    """Show what the executor logs, and on the first rank the planner's warnings.

    Args:
        rank: of this process; what is wrong with a file all ranks find, and the first says it.
    """
    print_in_any_encoding()
    for name, level in (("executor", logging.INFO), ("planner", logging.WARNING)):
        logger = logging.getLogger(name)
        if not any(isinstance(handler, _Console) for handler in logger.handlers):
            logger.addHandler(_Console())
        logger.setLevel(level if name == "executor" or rank == 0 else logging.ERROR)


def say(text: str, *, err: bool = False) -> None:
    """Print a line in one write, to stderr if ``err``; commands in names are shown, never obeyed.

    Torchrun's Python has no buffer: of a line and its end, which are two writes of ``print``, the
    second may come after another rank's.
    """
    stream = sys.stderr if err else sys.stdout
    print(f"{printable(text)}\n", end="", file=stream, flush=True)


def print_error(problem: str) -> None:
    """Print ``error:`` and the problem to stderr."""
    say(f"error: {problem}", err=True)


FIRST_COME_S = 3.0
"""A rank lets the first one print what both found; torchrun ends it while it waits."""


def print_error_once(error: PipeplanError, rank: int) -> None:
    """Print an error that every rank may find by itself, and record it for torchrun."""
    # Before torch is loaded no ranks have met; wrong usage is told without.
    met = "torch.distributed" in sys.modules and _have_met()
    if rank > 0 and not met:
        time.sleep(FIRST_COME_S)
    who = f"rank {rank}: " if rank > 0 or met else ""
    for problem in error.problems:
        print_error(f"{who}{problem}")
    record_for_torchrun(error)


def print_failure(error: Exception, rank: int) -> None:
    """Print an error that nobody expected, with its traceback, and record it for torchrun."""
    found = "".join(traceback.format_exception(error))
    print(f"rank {rank} failed:\n{found}", end="", file=sys.stderr, flush=True)
    record_for_torchrun(error)


def _have_met() -> bool:
    import torch.distributed as dist

    return dist.is_initialized()


_PATH = "TORCHELASTIC_ERROR_FILE"


def record_for_torchrun(error: Exception) -> None:
    """Write it to the file torchrun asks for; its last lines are of the rank that failed first.

    An error that names what the user can mend is told without its traceback. The form is that of
    ``torch.distributed.elastic.multiprocessing.errors``.
    """
    path = os.environ.get(_PATH)
    # An error that follows from another rank's could be taken for the first.
    if path is None or isinstance(error, FollowedError):
        return
    told = (
        "\n".join(f"error: {problem}" for problem in error.problems)
        if isinstance(error, PipeplanError)
        else "".join(traceback.format_exception(error))
    )
    extra = {"py_callstack": told, "timestamp": str(int(time.time()))}
    # It has been told on stderr already.
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": told, "extraInfo": extra}}))
