"""What a simulation claims of a plan; the only place that asks one.

No time is trusted: :mod:`planner.verification.times` checks each. Another simulation takes the
place of this one by returning the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planner.plan.plan import Plan, TimeProvenance
from planner.simulation.lengths import simulated_by_length
from planner.simulation.simulator import simulate_plan
from planner.simulation.time_provenance import time_provenance
from planner.simulation.timeline import Timeline
from planner.verification.speeds import Span, Times
from planner.verification.tasks import Key


class Claims:
    """What a simulation says of an iteration.

    Args:
        plan: with its tensor-parallel groups, if it has any.

    Attributes:
        times: when each task starts and ends.

    Raises:
        PipeplanError: if the plan cannot be simulated.
    """

    def __init__(self, plan: Plan) -> None:
        self._timeline = simulate_plan(plan)
        self.times = _times(self._timeline)

    @property
    def time_provenance(self) -> TimeProvenance | None:
        """The shares of the critical path by the source of their figures; None if it is empty."""
        return time_provenance(self._timeline)

    def by_length(self, iterations: Iterable[Sequence[int]]) -> Iterator[Times]:
        """Yield the times of iterations whose microbatches have several lengths.

        Args:
            iterations: of each the number of each microbatch's length among them.
        """
        return map(_times, simulated_by_length(self._timeline, iterations))


def _times(timeline: Timeline) -> Times:
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
    for step in timeline.steps:
        found[Key("step", step.device)] = Span(step.start_s, step.end_s)
    return found
