"""Options shared by the command lines of programs under torchrun, and of the profile."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NoReturn

from planner.errors import PipeplanError

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_GROUP_TIMEOUT_S = 30.0
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 1.0, 1e6
DEFAULT_SILENT_S = 3.0
"""Longer than a rank stands still where all processors are busy, as others' Pythons start."""
LEAST_SILENT_S, MOST_SILENT_S = 0.5, 1e6
"""A few of the signs of life that a rank gives."""


def require_timeout(timeout_s: float, field: str = "timeout_s") -> float:
    """Return the number of seconds, if it is one that ranks can wait for.

    Args:
        timeout_s: to be waited.
        field: that it is the value of.

    Raises:
        PipeplanError: if not.
    """
    if not LEAST_TIMEOUT_S <= timeout_s <= MOST_TIMEOUT_S:
        raise PipeplanError(
            f"{field}: {timeout_s}; expected from {LEAST_TIMEOUT_S:g} to {MOST_TIMEOUT_S:g} seconds"
        )
    return timeout_s


def require_silent(silent_s: float) -> float:
    """Return the number of seconds, if a pipeline may be silent for so long.

    Raises:
        PipeplanError: if not.
    """
    if not LEAST_SILENT_S <= silent_s <= MOST_SILENT_S:
        raise PipeplanError(
            f"--silent: {silent_s:g}; give from {LEAST_SILENT_S:g} to {MOST_SILENT_S:g} seconds, "
            f"or leave it out for {DEFAULT_SILENT_S:g}"
        )
    return silent_s


Add = Callable[..., Any]
"""Adds an option to a parser."""


class WrongUsageError(PipeplanError):
    """The command line of a rank of several cannot be read."""


class RankParser(argparse.ArgumentParser):
    """Says what is wrong in one line where many ranks would repeat the usage.

    Args:
        module: that torchrun runs.
        description: for --help.
    """

    def __init__(self, module: str, description: str) -> None:
        super().__init__(prog=f"torchrun --nproc-per-node N -m {module}", description=description)
        self._module = module

    def error(self, message: str) -> NoReturn:
        """Wrong usage."""
        if "RANK" in os.environ:
            raise WrongUsageError(
                f"{message}; `python -m {self._module} --help` says what there is"
            )
        super().error(message)


def add_rank_options(add: Add) -> None:
    """Options of where a rank computes, and how long it waits for others."""
    add_device_option(add)
    add(
        "--backend",
        choices=["gloo", "nccl"],
        help="backend of torch.distributed (default: by device)",
    )
    add(
        "--timeout",
        dest="timeout_s",
        type=timeout_seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="a rank for which others have waited this long counts as lost (default: 600)",
    )


def add_device_option(add: Add) -> None:
    """The kind of device, see :func:`executor.distributed.process_group.device_of_this_process`."""
    add("--device", choices=["cpu", "cuda"], help="device (default: a GPU if there is one)")


def timeout_seconds(text: str) -> float:
    """Seconds of a timeout, as argparse reads them."""
    try:
        return require_timeout(float(text))
    except (ValueError, PipeplanError):
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to 1e6 seconds") from None


def whole_number(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """Return what reads a whole number from ``least`` to ``most``, for argparse."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is not at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is not at most {most}")
        return value

    return read
