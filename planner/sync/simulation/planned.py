"""The world of a plan: its pipelines, replayed, and the links of its cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from planner.artifacts.link_table import FloatArray
from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.simulator import OperationEvent, Timeline, simulate_plan
from planner.sync.lanes import Lane, lanes_of, node_of, pipelines_per_node
from planner.sync.simulation.world import LinkCost, Place, World


def from_plan(plan: Plan, workers: int | None = None) -> World:
    """What synchronisation sees of a plan.

    The times are those of the first pipeline in the simulator's replay; the links join devices at
    the same place of different pipelines, or any two of the cluster where a plan has one pipeline.

    Args:
        plan: whose replicas form pipelines (:func:`planner.sync.lanes.lanes_of`).
        workers: copies of its first pipeline; None: the pipelines that it has, each as fast as it
            is in the plan.

    Raises:
        PipeplanError: if the replicas form no pipelines, or no link joins devices.
    """
    # Whatever strategy is simulated, it is pipelines that it is simulated of.
    lanes, timeline = lanes_of(plan, otherwise=""), simulate_plan(plan)
    places = _places(plan, lanes[0], timeline)
    within, between = _links(plan, lanes)
    first = World(
        workers=1,
        places=places,
        within=within,
        between=between,
        pipelines_per_node=pipelines_per_node(lanes),
        slots=2 * (len(lanes[0].microbatches) + len(places) - 1),
    )
    if workers is not None:
        return replace(first, workers=workers)
    return replace(first, workers=len(lanes), slowdown=_slowdown(plan, lanes, timeline, first))


def _places(plan: Plan, lane: Lane, timeline: Timeline) -> tuple[Place, ...]:
    rows = {device: [] for device in lane.devices}  # type: dict[str, list[OperationEvent]]
    for event in timeline.operations:
        if event.device in rows:
            rows[event.device].append(event)
    start_s = min(event.start_s for events in rows.values() for event in events)
    bytes_ = _parameter_bytes(plan, lane)
    nodes = list(dict.fromkeys(map(node_of, lane.devices)))
    return tuple(
        _place(
            events,
            start_s,
            timeline.pipeline.optimizer_s[device],
            bytes_[device],
            nodes.index(node_of(device)),
        )
        for device, events in rows.items()
    )


def _place(
    events: Sequence[OperationEvent], start_s: float, optimizer_s: float, bytes_: int, card: int
) -> Place:
    first = min(events, key=lambda event: event.start_s)
    last = max(events, key=lambda event: event.end_s)
    return Place(
        first_forward_s=first.start_s - start_s,
        last_backward_s=last.end_s - start_s,
        forward_s=first.end_s - first.start_s,
        backward_s=last.end_s - last.start_s,
        optimizer_s=optimizer_s,
        parameter_bytes=bytes_,
        network_card=card,
    )


def _parameter_bytes(plan: Plan, lane: Lane) -> dict[str, int]:
    """Trainable bytes by device; what several places share counts at the first of them."""
    graph, seen = plan.problem.graph, set[str]()
    found = dict.fromkeys(lane.devices, 0)
    for stage in plan.stages:
        device = next(d for d in lane.devices if d in stage.devices)
        for parameter in graph.parameters_of(stage.layers):
            if parameter.trainable and parameter.name not in seen:
                seen.add(parameter.name)
                found[device] += parameter.bytes
    return found


def _slowdown(
    plan: Plan, lanes: Sequence[Lane], timeline: Timeline, first: World
) -> tuple[float, ...]:
    """How much longer each pipeline's iterations take than the first one's."""
    lengths_s = []
    for lane in lanes:
        places = _places(plan, lane, timeline)
        lengths_s.append(max(place.occupied_s for place in places))
    return tuple(length_s / first.iteration_s for length_s in lengths_s)


def _links(plan: Plan, lanes: Sequence[Lane]) -> tuple[LinkCost, LinkCost]:
    """Medians of the pairs within nodes and between nodes; where one has none, the other's."""
    names = plan.cluster.device_names
    columns = list(zip(*(lane.devices for lane in lanes), strict=True))
    rows = columns if len(lanes) > 1 else [names]
    pairs = [(a, b) for row in rows for a in row for b in row if a != b]
    inside = [pair for pair in pairs if node_of(pair[0]) == node_of(pair[1])]
    outside = [pair for pair in pairs if node_of(pair[0]) != node_of(pair[1])]
    within, between = _cost(plan, inside), _cost(plan, outside)
    if within is None and between is None:
        raise PipeplanError(
            "cluster: no link joins devices of different pipelines; add links, or plan for more "
            "than one device"
        )
    return within or between or LinkCost(0, 1), between or within or LinkCost(0, 1)


def _cost(plan: Plan, pairs: Sequence[tuple[str, str]]) -> LinkCost | None:
    """Medians over pairs that have a path."""
    table, numbers = plan.cluster.link_table, plan.cluster.numbers
    sides = [np.array([numbers[pair[side]] for pair in pairs], dtype=int) for side in (0, 1)]
    latency_s: FloatArray = np.asarray(table.latency_s)[sides[0], sides[1]]
    s_per_byte: FloatArray = np.asarray(table.s_per_byte)[sides[0], sides[1]]
    joined = np.isfinite(latency_s) & (s_per_byte > 0) & (s_per_byte < 1)
    if not joined.any():
        return None
    return LinkCost(
        float(np.median(latency_s[joined])), float(1e-9 / np.median(s_per_byte[joined]))
    )
