"""What the command lines of programs under torchrun, and of the profile, have in common."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NoReturn

from executor.limits import DEFAULT_TIMEOUT_S, require_timeout
from planner.errors import PipeplanError

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
    add("--backend", choices=["gloo", "nccl"], help="of torch.distributed; default by device")
    add(
        "--timeout",
        dest="timeout_s",
        type=timeout_seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="a rank that lets others wait for so long counts as lost (default 600)",
    )


def add_device_option(add: Add) -> None:
    """The kind of device, see :func:`executor.process_group.device_of_this_process`."""
    add("--device", choices=["cpu", "cuda"], help="default a GPU if there is one")


def timeout_seconds(text: str) -> float:
    """Seconds of a timeout, as argparse reads them."""
    try:
        return require_timeout(float(text))
    except (ValueError, PipeplanError):
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to 1e6 seconds") from None
