"""Plans for microbatches of several lengths: of those with the least mean iteration, the best.

The search before has looked for the plan whose iteration is shortest if every microbatch takes the
mean time. Iterations that are run take longer, and how much longer depends on the schedule and on
the order in which long and short microbatches come: the plans near the best one are compared by
replays of the job's first iterations, in every order that the job allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.lengths import ORDERS, Lengths
from planner.search.budget import SearchWork
from planner.search.near import ChosenSchedule
from planner.search.result import LengthChoice
from planner.search.robust import schedules_near
from planner.search.schedule.heuristic import Schedule
from planner.search.state import Search
from planner.simulation.lengths import EstimatedTimes, estimated_times, placed_by_length

SLOWER = 0.05
"""The mean iteration of the plan takes at most this share longer than the least one."""


def choose_for_lengths(search: Search, lengths: Lengths) -> ChosenSchedule | None:
    """Return the schedule and the order of microbatches with the least expected and 95th times.

    The mean of both counts. Deterministic in deterministic mode. The fastest plan is tried in every
    order whatever time is left.

    Returns:
        None if the search was interrupted or found nothing.
    """
    if search.best is None or search.clock.is_stopped:
        return None
    rows = [
        row
        for schedule in schedules_near(search, SLOWER)
        for row in _in_orders(search, schedule, lengths)
    ]
    schedule, order, times = min(rows, key=lambda row: row[2].rank_s)
    _, _, first = rows[0]
    reason = LengthChoice(order.order, times.rank_s, first.rank_s, len(rows))
    return ChosenSchedule(_with_order(schedule, order), reason)


def _in_orders(
    search: Search, schedule: Schedule, lengths: Lengths
) -> Iterator[tuple[Schedule, Lengths, EstimatedTimes]]:
    timeline = schedule.timeline
    placed = placed_by_length(timeline.pipeline)
    events = len(timeline.operations) + len(timeline.transfers)
    for order in ORDERS if lengths.order == "any" else (lengths.order,):
        search.clock.charge(SearchWork.NOISY_EVENT, lengths.iterations * events)
        ordered = lengths.model_copy(update={"order": order})
        yield schedule, ordered, estimated_times(timeline, placed, ordered)


def _with_order(schedule: Schedule, order: Lengths) -> Schedule:
    """Return a schedule whose job says the order of its microbatches."""
    pipeline = schedule.timeline.pipeline
    job = pipeline.problem.job.model_copy(update={"lengths": order})
    pipeline = replace(pipeline, problem=replace(pipeline.problem, job=job))
    return replace(schedule, timeline=replace(schedule.timeline, pipeline=pipeline))
