"""The choice between a faster plan and one that leaves more in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.portfolio.search import Candidate, Search
from planner.replanning.keeping import Kept, renamed, ways_to_keep
from planner.replanning.state import State
from planner.schedule.heuristic import Schedule

Role = Literal["chosen", "fastest found", "fewest bytes"]


@dataclass(frozen=True)
class Alternative:
    """A plan that was found.

    Attributes:
        role: why it is named.
        schedule: of it.
        moved_bytes: that its devices do not hold yet.
    """

    role: Role
    schedule: Schedule
    moved_bytes: int

    @property
    def iteration_time_s(self) -> float:
        """Predicted time of one iteration."""
        return self.schedule.iteration_time_s


def choose(search: Search, state: State, slack: float) -> tuple[Alternative, ...]:
    """Of the plans at most ``slack`` slower than the fastest found, the one that moves least.

    Args:
        search: that found a plan.
        state: what devices hold.
        slack: a share of the fastest plan's iteration time.

    Returns:
        The choice, the fastest plan found, and the one of all that moves the fewest bytes.
    """
    ranked = search.ranked()
    longest_s = (1 + slack) * search.best_s
    near = [c for c in ranked if c.schedule.iteration_time_s <= longest_s]
    return (
        _least_moving(search, state, near, "chosen"),
        _least_moving(search, state, ranked[:1], "fastest found"),
        _least_moving(search, state, ranked, "fewest bytes"),
    )


def _least_moving(
    search: Search, state: State, candidates: list[Candidate], role: Role
) -> Alternative:
    """The fewest bytes; of equally many the fastest."""
    rows: list[tuple[int, int, Candidate, Kept]] = [
        (kept.moved_bytes, place, candidate, kept)
        for place, candidate in enumerate(candidates)
        for kept in ways_to_keep(search.chain, state, candidate.partition)
    ]
    for moved_bytes, _, candidate, kept in sorted(rows, key=lambda row: row[:2]):
        schedule = renamed(search.chain, candidate.schedule, kept.images)
        if schedule is not None:
            return Alternative(role, schedule, moved_bytes)
    raise AssertionError("a candidate on its own devices is as fast as it is")
