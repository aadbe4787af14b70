"""Simulated and measured timelines as the page's scripts read them: columns of whole ticks.

A tick is a power of ten seconds that divides the iteration into 10**8 to 10**9 parts, so that
lengths of every order of magnitude keep eight digits. Starts are given as the gap to the previous
end, which is 0 most of the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from planner.measured.timeline import MeasuredTimeline
from planner.measured.trace_events import lanes
from planner.plan.operations import Operation
from planner.report.replicas import charted_together, row_name
from planner.simulation.copies import CopyEvent
from planner.simulation.critical_path import Event, OptimizerEvent, PathStep
from planner.simulation.timeline import (
    OperationEvent,
    SynchronisationEvent,
    Timeline,
    TransferEvent,
)

_DIGITS = 8
# A smaller tick would be no normal float.
_LEAST_EXPONENT = -300
Spans = dict[str, Any]
_Held = tuple[tuple[int, int] | None, int]
"""A link in one direction, None for shared ones, and the index of a transfer on it."""


@dataclass(frozen=True)
class Ticks:
    """Seconds as whole numbers of a tick."""

    tick_s: float

    @classmethod
    def for_span(cls, span_s: float) -> Ticks:
        """A tick that suits times up to ``span_s``."""
        if span_s <= 0:
            return cls(1.0)
        return cls(float(f"1e{max(math.floor(math.log10(span_s)) - _DIGITS, _LEAST_EXPONENT)}"))

    def of(self, seconds: float) -> int:
        """The nearest tick."""
        return round(seconds / self.tick_s)

    def span(self, start_s: float, end_s: float) -> tuple[int, int]:
        """Start and length, so that what ends where another starts still does."""
        start = self.of(start_s)
        return start, self.of(end_s) - start


class LinkRow(NamedTuple):
    """A row of the chart: a link in one direction, with its transfers.

    ``gb_per_s`` is its bandwidth, None where no link alone has it; ``transfers`` are indices of
    those that take time.
    """

    name: str
    gb_per_s: float | None
    transfers: list[int]


def timeline_data(timeline: Timeline, path: Sequence[PathStep]) -> dict[str, Any]:
    """Everything the charts show of a simulation.

    Args:
        timeline: of a plan.
        path: its critical path.
    """
    ticks = Ticks.for_span(timeline.iteration_time_s)
    moving = [event for event in timeline.transfers if event.end_s > event.start_s]
    rows = _link_rows(timeline, moving)
    return {
        "tick_s": ticks.tick_s,
        "end": ticks.of(timeline.iteration_time_s),
        "devices": _devices(timeline, ticks),
        "operations": _operations(timeline, ticks),
        "links": [{"name": row.name, "gb_per_s": row.gb_per_s} for row in rows],
        "transfers": _transfers(timeline, moving, rows, ticks),
        "reductions": _reductions(timeline, ticks),
        "memory": _memory(timeline, ticks),
        "path": _path(timeline, moving, path),
    }


def spans(events: Iterable[tuple[Operation, int, int]]) -> Spans:
    """Operations in order of start as columns.

    Args:
        events: operation, start and length in ticks.
    """
    columns: Spans = {"stage": [], "kind": "", "microbatch": [], "gap": [], "length": []}
    kinds: list[str] = []
    end = 0
    for operation, start, length in events:
        kinds.append(operation.kind)
        columns["stage"].append(operation.stage)
        columns["microbatch"].append(operation.microbatch)
        columns["gap"].append(start - end)
        columns["length"].append(length)
        end = start + length
    columns["kind"] = "".join(kinds)
    return columns


def _places(timeline: Timeline) -> dict[str, int]:
    return {device: place for place, device in enumerate(timeline.pipeline.devices)}


def _devices(timeline: Timeline, ticks: Ticks) -> list[dict[str, Any]]:
    pipeline = timeline.pipeline
    places, together = _places(timeline), charted_together(timeline)
    row_of = {device: first for first, row in together.items() for device in row}
    return [
        {
            "name": device,
            "row": places[row_of[device]],
            "row_name": row_name(together.get(device, (device,))),
            "stages": list(pipeline.stages_on[device]),
            "capacity_bytes": pipeline.capacity_bytes(device),
            "peak_bytes": timeline.peak_memory_bytes[device],
            "optimizer": ticks.span(
                timeline.end_s[device] - timeline.optimizer_s[device], timeline.end_s[device]
            ),
        }
        for device in pipeline.devices
    ]


def _by_device(timeline: Timeline) -> dict[str, list[OperationEvent]]:
    found: dict[str, list[OperationEvent]] = {device: [] for device in timeline.pipeline.devices}
    for event in timeline.operations:
        found[event.device].append(event)
    return found


def _operations(timeline: Timeline, ticks: Ticks) -> list[Spans]:
    return [
        spans((event.operation, *ticks.span(event.start_s, event.end_s)) for event in events)
        for events in _by_device(timeline).values()
    ]


def _link_rows(timeline: Timeline, moving: Sequence[TransferEvent]) -> list[LinkRow]:
    """Rows of links; a transfer is shown on every link it holds.

    A link has as many rows as it carries messages at once. Shared links are held by nobody: their
    transfers have rows by their ends.
    """
    cluster = timeline.pipeline.problem.cluster
    held = sorted((link, index) for index, event in enumerate(moving) for link in event.links)
    shared = [(None, index) for index, event in enumerate(moving) if not event.links]
    names = Counter(cluster.link_name(link) for link in {link for link, _ in held})

    def span_of(row: _Held) -> tuple[float, float]:
        event = moving[row[1]]
        return event.start_s, event.end_s

    def name_of(row: _Held, lane: int) -> str:
        link, index = row
        if link is None:
            return f"{moving[index].source}>{moving[index].target} (shared, {lane})"
        name = cluster.link_name(link)
        # Parallel links between the same ends differ by their index alone.
        told = f"{name} (link {link[0]})" if names[name] > 1 else name
        return told if lane == 1 else f"{told} ({lane})"

    rows: list[LinkRow] = []
    for name, found in lanes([*held, *shared], span_of, name_of).items():
        link = found[0][0]
        width = None if link is None else cluster.links[link[0]].bandwidth_gb_per_s
        rows.append(LinkRow(name, width, [index for _, index in found]))
    return rows


def _transfers(
    timeline: Timeline,
    moving: Sequence[TransferEvent],
    rows: Sequence[LinkRow],
    ticks: Ticks,
) -> dict[str, Any]:
    """Columns as of operations, with the ends, and the rows of links by number of the route."""
    places = _places(timeline)
    on: list[list[int]] = [[] for _ in moving]
    for number, row in enumerate(rows):
        for index in row.transfers:
            on[index].append(number)
    routes = {route: number for number, route in enumerate(dict.fromkeys(map(tuple, on)))}
    return {
        **spans((event.operation, *ticks.span(event.start_s, event.end_s)) for event in moving),
        "source": [places[event.source] for event in moving],
        "target": [places[event.target] for event in moving],
        "route": [routes[tuple(route)] for route in on],
        "routes": [list(route) for route in routes],
    }


def _reductions(timeline: Timeline, ticks: Ticks) -> list[dict[str, Any]]:
    places = _places(timeline)
    return [
        {
            "stages": list(event.synchronisation.stages),
            "devices": [places[device] for device in event.synchronisation.devices],
            "bytes": event.synchronisation.bytes,
            "kind": event.kind,
            "span": ticks.span(event.start_s, event.end_s),
        }
        for event in timeline.collectives
    ]


def _memory(timeline: Timeline, ticks: Ticks) -> list[dict[str, Any]]:
    """Steps as gaps of time and changes; of changes there are few, so they go by number."""
    return [_changes(steps, ticks) for steps in timeline.memory.values()]


def _changes(steps: Sequence[tuple[float, int]], ticks: Ticks) -> dict[str, Any]:
    gaps, changes = [], []
    time, held = 0, 0
    for at_s, bytes_ in steps:
        gaps.append(ticks.of(at_s) - time)
        changes.append(bytes_ - held)
        time, held = ticks.of(at_s), bytes_
    numbers = {change: number for number, change in enumerate(dict.fromkeys(changes))}
    return {"gap": gaps, "change": [numbers[c] for c in changes], "changes": list(numbers)}


def _path(
    timeline: Timeline, moving: Sequence[TransferEvent], path: Sequence[PathStep]
) -> list[list[Any]]:
    """Each step as its kind of event, where that stands, and what it waited for.

    Operations stand under their device and place in its order, the others under their place.
    """
    find = _finder(timeline, moving)
    return [[*place, step.waited_for] for step in path if (place := find(step.event)) is not None]


def _finder(
    timeline: Timeline, moving: Sequence[TransferEvent]
) -> Callable[[Event], tuple[str, int, int] | None]:
    """Places of events; None for transfers that take no time and copies of stashes."""
    devices = _places(timeline)
    operations = {
        event.operation: (devices[device], index)
        for device, events in _by_device(timeline).items()
        for index, event in enumerate(events)
    }
    transfers = {(event.operation, event.target): index for index, event in enumerate(moving)}
    reductions = {event: index for index, event in enumerate(timeline.collectives)}

    def find(event: Event) -> tuple[str, int, int] | None:
        match event:
            case OperationEvent(_, operation):
                return "operation", *operations[operation]
            case SynchronisationEvent():
                return "reduction", 0, reductions[event]
            case OptimizerEvent(device):
                return "optimizer", devices[device], 0
            case CopyEvent():
                return None
        index = transfers.get((event.operation, event.target))
        return None if index is None else ("transfer", 0, index)

    return find


def typical_step(measured: MeasuredTimeline) -> int:
    """The step that is shown: of those that count the one of median length, the earlier of two."""
    lengths = {row.step: row.iteration_time_s for row in measured.steps}
    ranked = sorted(measured.counted_steps, key=lambda step: (lengths[step], step))
    return ranked[(len(ranked) - 1) // 2]


def measured_data(
    measured: MeasuredTimeline, devices: Sequence[str], tick_s: float
) -> dict[str, Any]:
    """One step of a measurement.

    Args:
        measured: of the plan shown.
        devices: of the plan in the order of the chart's rows.
        tick_s: of the simulation's data.
    """
    step, ticks = typical_step(measured), Ticks(tick_s)

    def rows(events: Iterable[Any], end: str = "device") -> list[list[Any]]:
        """Events of the step by the device at one end."""
        found: dict[str, list[Any]] = {device: [] for device in devices}
        for event in events:
            if event.step == step:
                found[getattr(event, end)].append(event)
        return list(found.values())

    def columns(events: Iterable[Any]) -> Spans:
        return spans((event.what, *ticks.span(event.start_s, event.end_s)) for event in events)

    return {
        "step": step,
        "end": ticks.of(measured.lengths_s[step]),
        "operations": [columns(row) for row in rows(measured.operations)],
        "sends": [columns(row) for row in rows(measured.transfers, "source")],
        "reductions": [
            [
                {"stages": list(event.stages), "span": ticks.span(event.start_s, event.end_s)}
                for event in row
            ]
            for row in rows(measured.reductions)
        ],
        "optimizer": [
            [ticks.span(event.start_s, event.end_s) for event in row]
            for row in rows(measured.optimizer_steps)
        ],
    }
