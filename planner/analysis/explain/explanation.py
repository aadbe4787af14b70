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
class DeviceUse:
    """One device's iteration in parts that sum to the whole; seconds.

    Attributes:
        device: its name.
        stages: it holds.
        busy_s: operations and the optimizer step.
        warm_up_s: idle before its first operation.
        waiting_s: idle between operations.
        reduction_s: from its last operation to its optimizer step, while gradients are reduced,
            and behind that until parameters are gathered.
        drain_s: idle after that.
    """

    device: str
    stages: tuple[int, ...]
    busy_s: float
    warm_up_s: float
    waiting_s: float
    reduction_s: float
    drain_s: float


def device_uses(timeline: Timeline) -> tuple[DeviceUse, ...]:
    """Return every device of a timeline, in stage order.

    A device that runs nothing is reducing gradients, or waiting to, until its optimizer step.
    """
    first_s, last_s = _spans(timeline)
    return tuple(
        _device_use(timeline, device, first_s.get(device, 0.0), last_s.get(device, 0.0))
        for device in timeline.pipeline.devices
    )


def _spans(timeline: Timeline) -> tuple[dict[str, float], dict[str, float]]:
    """Return the start of the first and the end of the last operation, by device."""
    first_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    for event in timeline.operations:
        first_s.setdefault(event.device, event.start_s)
        last_s[event.device] = event.end_s
    return first_s, last_s


def _device_use(timeline: Timeline, device: str, first_s: float, last_s: float) -> DeviceUse:
    step_s, end_s = timeline.optimizer_s[device], timeline.end_s[device]
    done_s = timeline.done_s[device]
    computed_s = timeline.busy_s[device] - step_s
    return DeviceUse(
        device=device,
        stages=timeline.pipeline.stages_on[device],
        busy_s=timeline.busy_s[device],
        warm_up_s=first_s,
        waiting_s=max(0.0, last_s - first_s - computed_s),
        reduction_s=max(0.0, end_s - step_s - last_s) + done_s - end_s,
        drain_s=timeline.iteration_time_s - done_s,
    )


@dataclass(frozen=True)
class Explanation:
    """The use of one iteration's time, and the limits that keep it from being shorter.

    Attributes:
        pipeline: the stages on their devices.
        iteration_time_s: from the first forward to the last optimizer step.
        critical_path: events from time 0 to the end, each starting when the one before it ends.
        shares: the critical path's time by cause, the largest first; they sum to its whole.
        parts: the same time by what is done in it, the largest first; they too sum to its whole.
        devices: how each device spends the iteration, in stage order.
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
        devices=device_uses(timeline),
        resources=resource_bounds(timeline),
        memory=memory,
        bubble=bubble_by_cause(timeline, memory),
        stages=stage_limits(timeline, memory),
    )
