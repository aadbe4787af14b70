"""Errors on standard error, where several ranks write."""

from __future__ import annotations

import sys


def print_error(problem: str) -> None:
    """``error:`` and the problem, in one write.

    Torchrun's Python has no buffer: of a line and its end, which are two writes of ``print``, the
    second may come after another rank's.
    """
    print(f"error: {problem}\n", end="", file=sys.stderr, flush=True)
