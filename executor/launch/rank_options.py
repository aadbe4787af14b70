"""Options shared by the command lines of programs under torchrun, and of the profile."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NoReturn

from planner.errors import PipeplanError

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_GROUP_TIMEOUT_S = 30.0
DEFAULT_SILENT_S = 3.0
"""Longer than a rank stands still where all processors are busy, as others' Pythons start."""
LEAST_SILENT_S = 0.5
"""A few of the signs of life that a rank gives."""


def require_seconds(
    seconds: float, field: str = "timeout_s", least_s: float = 1.0, default_s: float | None = None
) -> float:
    """Return a number of seconds, if it is one that ranks can wait for.

    Args:
        seconds: to be waited.
        field: that it is the value of.
        least_s: what may be waited at least; a million seconds at most.
        default_s: what is waited where it is left out, for the message; None: it says nothing.

    Raises:
        PipeplanError: if not.
    """
    if not least_s <= seconds <= 1e6:
        remedy = "" if default_s is None else f", or leave it out for {default_s:g}"
        raise PipeplanError(f"{field}: {seconds:g}; give from {least_s:g} to 1e+06 seconds{remedy}")
    return seconds


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
        return require_seconds(float(text))
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
