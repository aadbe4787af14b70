"""What choices among plans near the fastest share: robust, simple, and for unequal microbatches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from planner.search.result import LengthChoice, Robustness, Simplicity
from planner.search.schedule.heuristic import Schedule
from planner.search.state import Candidate, Search

SHARE = 0.1
"""Share of the whole time, kept back from the search."""


@dataclass(frozen=True)
class ChosenSchedule:
    """The schedule that was chosen, and what it was compared with."""

    schedule: Schedule
    reason: Robustness | Simplicity | LengthChoice


def end_of_choice_s(search: Search) -> float:
    """Return the end of the whole time: the clock's limit leaves out :data:`SHARE`."""
    return search.clock.limit_s / (1 - SHARE)


def candidates_near(search: Search, best: Candidate, longest_s: float) -> list[Candidate]:
    """Return the candidates that take no longer than ``longest_s``, ``best`` first."""
    others = (candidate for candidate in search.ranked() if candidate is not best)
    return [best, *(c for c in others if c.schedule.iteration_time_s <= longest_s)]


def key_of(schedule: Schedule) -> Hashable:
    """Return the same for the same orders of the same stages."""
    stages = tuple(stage.spec for stage in schedule.timeline.pipeline.stages)
    return stages, tuple((device, tuple(order)) for device, order in schedule.orders.items())
