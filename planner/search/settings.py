"""Settings of every search: threads, limits, and the gap that counts as none."""

from __future__ import annotations

import os

from planner.errors import PipeplanError, require_kind

DEFAULT_WORKERS = max(2, min(8, os.cpu_count() or 2))
"""A thread for each core, up to eight."""
OPTIMALITY_TOLERANCE = 1e-4
"""Rounding to ticks alone costs up to this much; a smaller gap counts as proved optimal."""


def check_settings(time_limit_s: float, gap_limit: float, seed: int, workers: int) -> None:
    """Check the settings of a search.

    Raises:
        PipeplanError: naming every setting that is out of range.
    """
    for name, value in (("time_limit_s", time_limit_s), ("gap_limit", gap_limit)):
        require_kind(value, (int, float), name, "give a number")
    problems = []
    if not time_limit_s > 0:
        problems.append(f"time_limit_s: {time_limit_s} is not a positive number of seconds")
    if not gap_limit >= 0:
        problems.append(f"gap_limit: {gap_limit} is not a number of at least 0, such as 0.01")
    if not 0 <= seed < 2**31:
        problems.append(f"seed: {seed} is not a whole number from 0 to {2**31 - 1}")
    if not 1 <= workers <= 1024:
        problems.append(f"workers: {workers} is not a whole number from 1 to 1024")
    if problems:
        raise PipeplanError(problems)
