"""The result of a placement solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True)
class Progress:
    """The best results at one moment.

    Attributes:
        seconds: since the start.
        objective: the best largest load so far; None before the first placement.
        lower_bound: no placement is better.
    """

    seconds: float
    objective: float | None
    lower_bound: float


@dataclass(frozen=True)
class LoadResult:
    """A placement and what is proved of it, in the instance's unit of time.

    Attributes:
        objective: the largest load, from the instance's own figures; None if none was found.
        lower_bound: no placement is better. It is computed on times rounded down to whole steps
            (of a total of 2**46); where that proves the placement optimal, it is the objective,
            and stands for a difference below 1e-9 of it.
        status: ``optimal``: both are equal; ``feasible``: a gap is left; ``infeasible``: proved
            that no placement exists; ``unknown``: none was found in the time.
        assignment: the device of every node, by the node's position; devices are numbered class by
            class. None if none was found.
        history: what was known when, oldest first.
    """

    objective: float | None
    lower_bound: float
    status: Status
    assignment: tuple[int, ...] | None
    history: tuple[Progress, ...]
