"""How long ranks wait for each other."""

from planner.errors import PipeplanError

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_GROUP_TIMEOUT_S = 30.0
LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 1.0, 1e6


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
