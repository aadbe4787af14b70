"""Rows of large charts: devices whose rows would look alike share one."""

from __future__ import annotations

from planner.simulation.timeline import OperationEvent, Timeline

MOST_ROWS = 24
"""Up to so many devices have a row each."""
ALIKE = 2e-3
"""Times that differ by no larger share of the iteration look alike: a few pixels of a chart."""


def charted_together(timeline: Timeline) -> dict[str, tuple[str, ...]]:
    """Return the devices of each row of a chart by the first of them, which is the one drawn.

    They hold the same stages and run the same operations at about the same times, each for
    microbatches of its own. Of few devices each has its own row.
    """
    devices = timeline.pipeline.devices
    if len(devices) <= MOST_ROWS:
        return {device: (device,) for device in devices}
    events: dict[str, list[OperationEvent]] = {device: [] for device in devices}
    for event in timeline.operations:
        events[event.device].append(event)
    rows: dict[str, list[str]] = {}
    for device in devices:
        first = next((other for other in rows if _are_alike(timeline, events, other, device)), None)
        rows.setdefault(first or device, []).append(device)
    return {first: tuple(row) for first, row in rows.items()}


def _are_alike(
    timeline: Timeline, events: dict[str, list[OperationEvent]], first: str, second: str
) -> bool:
    pipeline, slack_s = timeline.pipeline, ALIKE * timeline.iteration_time_s
    if (
        pipeline.stages_on[first] != pipeline.stages_on[second]
        or pipeline.capacity_bytes(first) != pipeline.capacity_bytes(second)
        or len(events[first]) != len(events[second])
        or abs(timeline.done_s[first] - timeline.done_s[second]) > slack_s
    ):
        return False
    return all(
        a.operation[:2] == b.operation[:2]
        and abs(a.start_s - b.start_s) <= slack_s
        and abs(a.end_s - b.end_s) <= slack_s
        for a, b in zip(events[first], events[second], strict=True)
    )


def row_name(devices: tuple[str, ...]) -> str:
    """Return the name of a row: its device's, or the first one's and how many are alike."""
    first, *others = devices
    return f"{first} and {len(others):,} alike" if others else first
