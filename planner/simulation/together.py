"""Operations that all replicas of a stage start together, as they put layers together in them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from planner.costs.placed_pipeline import PlacedPipeline
from planner.plan.operations import Operation
from planner.simulation.timeline import OperationEvent, Timeline


class StartedTogether:
    """The operations that wait for those of other replicas.

    Where replicas divide weights, the n-th forward of a stage starts on all of them at once, and so
    does its n-th backward.

    Args:
        pipeline: whose stages count.
    """

    def __init__(self, pipeline: PlacedPipeline) -> None:
        self._devices = _devices_by_stage(pipeline)
        self._waiting: dict[tuple[int, str], dict[str, Operation]] = {}

    def ready(self, device: str, operation: Operation) -> list[tuple[str, Operation]]:
        """Return what starts now that a device is ready for an operation.

        Args:
            device: that runs nothing until the operation starts.
            operation: its next one.
        """
        devices = self._devices.get(operation.stage)
        if devices is None:
            return [(device, operation)]
        key = operation.stage, operation.kind
        here = self._waiting.setdefault(key, {})
        here[device] = operation
        if len(here) < len(devices):
            return []
        del self._waiting[key]
        return [(name, here[name]) for name in devices]

    def unfinished(self) -> str:
        """Describe what still waits; empty if nothing does."""
        rows = [row for here in self._waiting.values() for row in here.items()]
        return ", ".join(
            f"{device} waits at {operation} for replicas" for device, operation in rows
        )


def partners_of(timeline: Timeline) -> Mapping[Operation, Sequence[OperationEvent]]:
    """Return the events that start together, in the order of the stage's devices, for each of them.

    Operations that start by themselves are left out.
    """
    devices = _devices_by_stage(timeline.pipeline)
    counts: Counter[tuple[int, str, str]] = Counter()
    rows: defaultdict[tuple[int, str, int], list[OperationEvent]] = defaultdict(list)
    for event in timeline.operations if devices else ():
        stage, kind, _ = event.operation
        if stage in devices:
            key = stage, kind, event.device
            rows[stage, kind, counts[key]].append(event)
            counts[key] += 1
    for (stage, _, _), events in rows.items():
        events.sort(key=lambda event: devices[stage].index(event.device))
    return {event.operation: events for events in rows.values() for event in events}


def _devices_by_stage(pipeline: PlacedPipeline) -> dict[int, tuple[str, ...]]:
    """Return the devices of each stage whose replicas put layers together."""
    return {
        index: stage.spec.devices
        for index, stage in enumerate(pipeline.stages)
        if stage.collective_s and len(stage.spec.devices) > 1
    }
