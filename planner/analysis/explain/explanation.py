"""An explanation of a timeline: everything that may bind it, each with its figures."""

from __future__ import annotations

from dataclasses import dataclass

from planner.analysis.explain.bubble import Bubble, bubble_by_cause
from planner.analysis.explain.memory import MemoryLimit, memory_limit
from planner.analysis.explain.parts import IterationPart, iteration_parts
from planner.analysis.explain.path_shares import PathShare, path_shares
from planner.analysis.explain.resources import Resource, resource_bounds
from planner.analysis.explain.stage_limits import StageLimit, stage_limits
from planner.costs.placed_pipeline import PlacedPipeline
from planner.simulation.critical_path import PathStep, critical_path
from planner.simulation.timeline import Timeline


@dataclass(frozen=True)
class Explanation:
    """The use of one iteration's time, and the limits that keep it from being shorter.

    Attributes:
        pipeline: the stages on their devices.
        iteration_time_s: from the first forward to the last optimizer step.
        critical_path: events from time 0 to the end, each starting when the one before it ends.
        shares: the critical path's time by cause, the largest first; they sum to its whole.
        parts: the same time by what is done in it, the largest first; they too sum to its whole.
        resources: devices and links with their lower bounds, the highest first.
        memory: room on each device, and what the iteration would take without limits.
        bubble: the devices' idle time by cause.
        stages: what each stage is limited by, and the effect of its speed.
    """

    pipeline: PlacedPipeline
    iteration_time_s: float
    critical_path: tuple[PathStep, ...]
    shares: tuple[PathShare, ...]
    parts: tuple[IterationPart, ...]
    resources: tuple[Resource, ...]
    memory: MemoryLimit
    bubble: Bubble
    stages: tuple[StageLimit, ...]

    @property
    def binding_resource(self) -> Resource:
        """The device or link with the highest lower bound."""
        return self.resources[0]


def explain(timeline: Timeline) -> Explanation:
    """Explain a replay.

    Where memory may bind, quick schedules are made with and without limits; all else is read off
    the timeline.

    Args:
        timeline: of orders, by :func:`planner.simulation.simulator.simulate`. It need not fit
        memory.
    """
    path, memory = critical_path(timeline), memory_limit(timeline)
    return Explanation(
        pipeline=timeline.pipeline,
        iteration_time_s=timeline.iteration_time_s,
        critical_path=path,
        shares=path_shares(timeline.pipeline, path),
        parts=iteration_parts(timeline, path),
        resources=resource_bounds(timeline),
        memory=memory,
        bubble=bubble_by_cause(timeline),
        stages=stage_limits(timeline, memory),
    )
