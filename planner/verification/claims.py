"""The times that a simulation claims for a plan; the only place that asks one.

Nothing here is trusted: :mod:`planner.verification.times` checks each time. Another simulation
takes the place of this one by returning the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planner.plan.plan import Plan
from planner.simulation.lengths import simulated_by_length
from planner.simulation.simulator import simulate_plan
from planner.simulation.timeline import Timeline
from planner.verification.speeds import Span, Times
from planner.verification.tasks import Key


def claimed_times(plan: Plan) -> Times:
    """Return when each task of an iteration starts and ends.

    Args:
        plan: with its tensor-parallel groups, if it has any.

    Raises:
        PipeplanError: if the plan cannot be simulated.
    """
    return spans_of(simulate_plan(plan))


def claimed_by_length(plan: Plan, iterations: Iterable[Sequence[int]]) -> Iterator[Times]:
    """Return the same of iterations whose microbatches have several lengths.

    Args:
        plan: whose job has lengths.
        iterations: of each the number of each microbatch's length among them.
    """
    return map(spans_of, simulated_by_length(simulate_plan(plan), iterations))


def spans_of(timeline: Timeline) -> Times:
    """Return the times of a simulation by the names of the checker's tasks."""
    found: dict[Key, Span] = {}
    for event in timeline.operations:
        found[Key("operation", event.operation)] = Span(event.start_s, event.end_s)
    for sent in timeline.transfers:
        if sent.transfer.ends:
            found[Key("message", sent.consumer)] = Span(sent.start_s, sent.end_s)
    for reduction in timeline.synchronisations:
        found[Key("reduction", reduction.number)] = Span(reduction.start_s, reduction.end_s)
    for gather in timeline.gathers:
        found[Key("gather", gather.number)] = Span(gather.start_s, gather.end_s)
    for copy in timeline.copies:
        found[Key("copy", copy.operation)] = Span(copy.start_s, copy.end_s)
    for device, end_s in timeline.end_s.items():
        start_s = max(0.0, end_s - timeline.optimizer_s[device])
        found[Key("step", device)] = Span(start_s, end_s)
    return found
