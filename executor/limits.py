"""How long ranks wait for each other."""

from planner.errors import PipeplanError

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_GROUP_TIMEOUT_S = 30.0
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 1.0, 1e6
DEFAULT_SILENT_S = 3.0
"""Longer than a rank stands still where all processors are busy, as others' Pythons start."""
LEAST_SILENT_S, MOST_SILENT_S = 0.5, 1e6
"""A few of the signs of life that a rank gives."""


def require_timeout(timeout_s: float, field: str = "timeout_s") -> float:
    """The same number of seconds, if it is one that ranks can wait for.

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
    """The same number of seconds, if a pipeline may be silent for so long.

    Raises:
        PipeplanError: if not.
    """
    if not LEAST_SILENT_S <= silent_s <= MOST_SILENT_S:
        raise PipeplanError(
            f"--silent: {silent_s:g}; give from {LEAST_SILENT_S:g} to {MOST_SILENT_S:g} seconds, "
            f"or leave it out for {DEFAULT_SILENT_S:g}"
        )
    return silent_s
