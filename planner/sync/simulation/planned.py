"""The simulated world of a plan: its pipelines' times from a replay, and its cluster's links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from planner.cluster.cluster import node_of
from planner.cluster.link_table import FloatArray
from planner.costs.layer_moments import LayerMoments
from planner.costs.placement import place_plan
from planner.errors import PipeplanError
from planner.plan.plan import Plan
from planner.plan.unsupported import require_without
from planner.simulation.simulator import simulate
from planner.simulation.timeline import OperationEvent, Timeline
from planner.sync.pipeline_replicas import (
    PipelineReplica,
    pipeline_replicas_of,
    pipelines_per_node,
)
from planner.sync.simulation.links import WorkerLinks
from planner.sync.simulation.run import Scenario
from planner.sync.simulation.world import LayerParameters, LinkCost, PipelineRank, World


def scenario_of(what: Plan | World | Scenario) -> Scenario:
    """Return the scenario of a plan's pipelines, or of a world; a scenario is its own.

    Raises:
        PipeplanError: if the plan's replicas form no pipelines.
    """
    if isinstance(what, Scenario):
        return what
    return Scenario(what if isinstance(what, World) else from_plan(what))


def require_several(world: World) -> None:
    """Refuse a single pipeline.

    Raises:
        PipeplanError: naming what to do.
    """
    if world.workers < 2:
        raise PipeplanError(
            "workers: one pipeline has nobody to synchronise with; give --pipelines 2 or more to "
            "simulate copies of it, or plan several: pipeplan plan ... --sync semi_decentralized"
        )


def from_plan(plan: Plan, workers: int | None = None) -> World:
    """Return the world of a plan.

    The times are those of the first pipeline in the simulator's replay; the links join devices of
    the same pipeline rank, or any two of the cluster if the plan has one pipeline. Tensor-parallel
    groups are devices here: what two of them exchange goes in parts over the links of all members.

    Args:
        plan: the plan, whose replicas form pipelines
            (:func:`planner.sync.pipeline_replicas.pipeline_replicas_of`).
        workers: number of copies of its first pipeline, on nodes with a card each; None: the
            pipelines of the plan, each with its own speed, on the links of its cluster.

    Raises:
        PipeplanError: if the replicas form no pipelines, or no link joins devices.
    """
    require_without(plan.job, "simulate --sync", ("shard_optimizer", "shard_parameters", "lengths"))
    plan = plan.on_groups
    # Whatever strategy is simulated, it is pipelines that it is simulated of.
    replicas = pipeline_replicas_of(plan, otherwise="")
    # The strategy's own traffic is simulated apart, so none of the plan's slows its messages here.
    pipeline = replace(place_plan(plan), synchronisations=())
    timeline = simulate(pipeline, plan.parsed_orders())
    ranks = _ranks(plan, replicas[0], timeline)
    within, between = _links(plan, replicas)
    first = World(
        workers=1,
        ranks=ranks,
        within=within,
        between=between,
        pipelines_per_node=pipelines_per_node(replicas),
        slots=2 * (len(replicas[0].microbatches) + len(ranks) - 1),
    )
    if workers is not None:
        return replace(first, workers=workers)
    columns = tuple(zip(*(replica.devices for replica in replicas), strict=True))
    return replace(
        first,
        workers=len(replicas),
        slowdown=_slowdown(replicas, timeline),
        links=WorkerLinks(plan.cluster, columns),
    )


def _ranks(plan: Plan, replica: PipelineReplica, timeline: Timeline) -> tuple[PipelineRank, ...]:
    rows = {device: [] for device in replica.devices}  # type: dict[str, list[OperationEvent]]
    for event in timeline.operations:
        if event.device in rows:
            rows[event.device].append(event)
    start_s = min(event.start_s for events in rows.values() for event in events)
    parameters = _parameters(plan, replica)
    nodes = list(dict.fromkeys(map(node_of, replica.devices)))
    return tuple(
        _rank(
            events,
            start_s,
            timeline.optimizer_s[device],
            nodes.index(node_of(device)),
            tuple(_layers(timeline, device, events, start_s, parameters[device])),
        )
        for device, events in rows.items()
    )


def _layers(
    timeline: Timeline,
    device: str,
    events: Sequence[OperationEvent],
    start_s: float,
    bytes_: Mapping[str, int],
) -> list[LayerParameters]:
    """Return a device's parameters in the order in which their gradients are completed."""
    found, pipeline = [], timeline.pipeline
    for stage in pipeline.stages_on[device]:
        mine = [event for event in events if event.operation.stage == stage]
        first = min(mine, key=lambda event: event.start_s)
        last = max(mine, key=lambda event: event.end_s)
        moments = LayerMoments.of(pipeline, stage, device, bytes_)
        kind = "B" if last.operation.kind == "B" else "W"
        last_s = pipeline.seconds(stage, kind, device)
        # On a shared host an operation takes longer; its moments are taken in proportion.
        late, early = timeline.stretch(last), timeline.stretch(first)
        for name, complete_s in moments.complete[kind].items():
            end_s = last.end_s - (last_s - complete_s) * late
            needed_s = first.start_s + moments.needed[name] * early
            found.append(LayerParameters(bytes_[name], end_s - start_s, needed_s - start_s))
    # Of those that are complete together, a backward reaches the last first.
    found.reverse()
    return sorted(found, key=lambda row: row.complete_s)


def _rank(
    events: Sequence[OperationEvent],
    start_s: float,
    optimizer_s: float,
    card: int,
    layers: tuple[LayerParameters, ...],
) -> PipelineRank:
    first = min(events, key=lambda event: event.start_s)
    last = max(events, key=lambda event: event.end_s)
    return PipelineRank(
        first_forward_s=first.start_s - start_s,
        last_backward_s=last.end_s - start_s,
        forward_s=first.end_s - first.start_s,
        backward_s=last.end_s - last.start_s,
        optimizer_s=optimizer_s,
        parameter_bytes=sum(row.bytes for row in layers),
        network_card=card,
        layers=layers,
    )


def _parameters(plan: Plan, replica: PipelineReplica) -> dict[str, dict[str, int]]:
    """Return trainable bytes by device and name; those of several ranks count at the first one."""
    problem, seen = plan.problem, set[str]()
    found: dict[str, dict[str, int]] = {device: {} for device in replica.devices}
    for stage in plan.stages:
        device = next(d for d in replica.devices if d in stage.devices)
        for parameter in problem.graph_on([device]).parameters_of(stage.layers):
            if parameter.trainable and parameter.name not in seen:
                seen.add(parameter.name)
                found[device][parameter.name] = parameter.bytes
    return found


def _slowdown(replicas: Sequence[PipelineReplica], timeline: Timeline) -> tuple[float, ...]:
    """Return the ratios of the pipelines' iteration times to the first one's."""
    starts_s: dict[str, float] = {}
    ends_s: dict[str, float] = {}
    for event in timeline.operations:
        device = event.device
        starts_s[device] = min(event.start_s, starts_s.get(device, event.start_s))
        ends_s[device] = max(event.end_s, ends_s.get(device, event.end_s))
    lengths_s = [
        max(ends_s[name] - starts_s[name] + timeline.optimizer_s[name] for name in replica.devices)
        for replica in replicas
    ]
    return tuple(length_s / lengths_s[0] for length_s in lengths_s)


def _links(plan: Plan, replicas: Sequence[PipelineReplica]) -> tuple[LinkCost, LinkCost]:
    """Return medians of pairs within and between nodes; if one has none, both are equal."""
    names = plan.cluster.device_names
    columns = list(zip(*(replica.devices for replica in replicas), strict=True))
    rows = columns if len(replicas) > 1 else [names]
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
    """Return medians over pairs that have a path."""
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
