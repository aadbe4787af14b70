"""An explanation of a timeline: everything that may bind it, each with its figures."""

from __future__ import annotations

from dataclasses import dataclass

from planner.costs.placement import PlacedPipeline
from planner.critical_path import PathStep, critical_path
from planner.explain.bubble import Bubble, bubble_by_cause
from planner.explain.device_use import DeviceUse, device_uses
from planner.explain.memory import MemoryLimit, memory_limit
from planner.explain.resources import Resource, resource_bounds
from planner.explain.shares import Share, path_shares
from planner.explain.stage_limits import StageLimit, stage_limits
from planner.simulator import Timeline


@dataclass(frozen=True)
class Explanation:
    """What one iteration spends its time on, and what keeps it from being shorter.

    Attributes:
        pipeline: the stages on their devices.
        iteration_time_s: from the first forward to the last optimizer step.
        critical_path: events from time 0 to the end, each starting when the one before it ends.
        shares: the critical path's time by cause, the largest first; they sum to its whole.
        devices: how each device spends the iteration, in stage order.
        resources: devices and links with their lower bounds, the highest first.
        memory: room on each device, and what the iteration would take without limits.
        bubble: the devices' idle time by cause.
        stages: what each stage is limited by, and its slack.
    """

    pipeline: PlacedPipeline
    iteration_time_s: float
    critical_path: tuple[PathStep, ...]
    shares: tuple[Share, ...]
    devices: tuple[DeviceUse, ...]
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
        timeline: of orders, by :func:`planner.simulator.simulate`. It need not fit memory.
    """
    path, memory = critical_path(timeline), memory_limit(timeline)
    return Explanation(
        pipeline=timeline.pipeline,
        iteration_time_s=timeline.iteration_time_s,
        critical_path=path,
        shares=path_shares(timeline.pipeline, path),
        devices=device_uses(timeline),
        resources=resource_bounds(timeline),
        memory=memory,
        bubble=bubble_by_cause(timeline, memory),
        stages=stage_limits(timeline, memory),
    )
