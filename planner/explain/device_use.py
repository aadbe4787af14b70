"""How each device spends an iteration."""

from __future__ import annotations

from dataclasses import dataclass

from planner.simulator import Timeline


@dataclass(frozen=True)
class DeviceUse:
    """One device's iteration in parts that sum to the whole; seconds.

    Attributes:
        device: its name.
        stages: it holds.
        busy_s: operations and the optimizer step.
        warm_up_s: idle before its first operation.
        waiting_s: idle between operations.
        reduction_s: from its last operation to its optimizer step, while gradients are reduced.
        drain_s: idle after its optimizer step.
    """

    device: str
    stages: tuple[int, ...]
    busy_s: float
    warm_up_s: float
    waiting_s: float
    reduction_s: float
    drain_s: float


def device_uses(timeline: Timeline) -> tuple[DeviceUse, ...]:
    """Every device of a timeline, in stage order.

    A device that runs nothing is reducing gradients, or waiting to, until its optimizer step.
    """
    first_s, last_s = _spans(timeline)
    return tuple(
        _device_use(timeline, device, first_s.get(device, 0.0), last_s.get(device, 0.0))
        for device in timeline.pipeline.devices
    )


def _spans(timeline: Timeline) -> tuple[dict[str, float], dict[str, float]]:
    """The start of the first and the end of the last operation, by device."""
    first_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    for event in timeline.operations:
        first_s.setdefault(event.device, event.start_s)
        last_s[event.device] = event.end_s
    return first_s, last_s


def _device_use(timeline: Timeline, device: str, first_s: float, last_s: float) -> DeviceUse:
    step_s, end_s = timeline.pipeline.optimizer_s[device], timeline.end_s[device]
    computed_s = timeline.busy_s[device] - step_s
    return DeviceUse(
        device=device,
        stages=timeline.pipeline.stages_on[device],
        busy_s=timeline.busy_s[device],
        warm_up_s=first_s,
        waiting_s=max(0.0, last_s - first_s - computed_s),
        reduction_s=max(0.0, end_s - step_s - last_s),
        drain_s=timeline.iteration_time_s - end_s,
    )
