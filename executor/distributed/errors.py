"""Errors of a rank that could not go on because of another one."""

from planner.errors import PipeplanError


class LostRankError(PipeplanError):
    """Another rank could not be talked to."""


class FollowedError(LostRankError):
    """This rank ends because another one failed, which says why."""
