"""How long ranks wait for each other."""

from planner.errors import PipeplanError

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_GROUP_TIMEOUT_S = 30.0
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 1.0, 1e6


def require_timeout(timeout_s: float) -> float:
    """The same number of seconds, if it is one that ranks can wait for.

    Raises:
        PipeplanError: if not.
    """
    if not LEAST_TIMEOUT_S <= timeout_s <= MOST_TIMEOUT_S:
        raise PipeplanError(
            f"timeout_s: {timeout_s}; expected from {LEAST_TIMEOUT_S:g} to {MOST_TIMEOUT_S:g} "
            "seconds"
        )
    return timeout_s
