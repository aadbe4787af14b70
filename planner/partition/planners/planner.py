"""What a classic planner is."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from planner.errors import InfeasibleError
from planner.partition.chain import Chain, Partition

Plan = Callable[[Chain], Partition]


class Planner(NamedTuple):
    """A published way to cut a chain of layers into stages and put them on devices.

    Attributes:
        name: as ``pipeplan compare --planners`` takes it.
        source: where it was published.
        plan: the method; one stage a device, within the job's ``max_stages`` and ``replication``.
            Raises InfeasibleError, with the reason, where the method finds nothing that fits.
    """

    name: str
    source: str
    plan: Plan


def nothing_fits(name: str, space: str) -> InfeasibleError:
    """The error of a planner that knows no stage boundaries that fit.

    Args:
        name: of the planner.
        space: what it searched.
    """
    return InfeasibleError(
        f"{name}: none of {space} fits the devices' memory and is joined by links; use smaller "
        "microbatches, a lighter optimizer, more stages or larger devices"
    )
