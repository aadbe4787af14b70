"""Places stages on devices: works out the figures of a pipeline from cluster, graph and job."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from planner.costs.optimizer import optimizer_s, state_holders, static_bytes
from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage, StageSpec
from planner.costs.reductions import TimesByDevice, gradient_reductions
from planner.costs.roofline import OperationTimes, layer_times
from planner.costs.sharding import (
    Collectives,
    collective_seconds,
    divided_bytes,
    with_collectives,
)
from planner.costs.stage_bytes import bytes_of_stages
from planner.errors import PipeplanError
from planner.plan.plan import Plan, Stage, Sync, overlapped_bucket_bytes
from planner.plan.problem import Problem


def place(
    problem: Problem,
    stages: Sequence[StageSpec],
    sync: Sync | None = None,
    groups: Sequence[Mapping[str, str]] = (),
) -> PlacedPipeline:
    """Compute the figures of a partition.

    Args:
        problem: the model, cluster and job.
        stages: in pipeline order; every layer in exactly one, no edge backwards.
        sync: the strategy of synchronisation; None: the default, which overlaps if the job allows
            it.
        groups: if only one of several equal groups of devices is to be placed: of each group, its
            device for each of the stages'. It has its share of the microbatches; gradients are
            reduced among all groups.
    """
    sync = sync or Sync()
    behaviour = problem.runtime.behaviour_on(stage.devices for stage in stages)
    bucket_bytes = overlapped_bucket_bytes(problem.job, sync, behaviour)
    among = [[names[d] for names in groups for d in s.devices] or s.devices for s in stages]
    copies = max(1, len(groups)) * problem.copies
    divided = [divided_bytes(problem, s.layers, len(s.devices) * copies) for s in stages]
    collectives = collective_seconds(problem, divided, among)
    times = [_layer_times(problem, *row) for row in zip(stages, collectives, strict=True)]
    host = OperationTimes(*[behaviour.computation_s] * len(OperationTimes._fields))
    graphs = [problem.graph_on(stage.devices) for stage in stages]
    parameters = [
        graph.parameters_of(stage.layers) for graph, stage in zip(graphs, stages, strict=True)
    ]
    devices = [stage.devices for stage in stages]
    holders = state_holders(problem, devices, parameters, copies)
    sums = [_sums(by_device, host) for by_device in times]
    static = [static_bytes(problem, held, holders) for held in parameters]
    whole = [{name: sum(both) for name, both in row.items()} for row in divided]
    rows = bytes_of_stages(graphs, stages, whole)
    placed = (
        PlacedStage(spec=spec, times=times, static_bytes=bytes_, collective_s=together, **vars(row))
        for spec, times, bytes_, together, row in zip(
            stages, sums, static, collectives, rows, strict=True
        )
    )
    return PlacedPipeline(
        problem=problem,
        stages=tuple(placed),
        synchronisations=gradient_reductions(
            problem, stages, parameters, times, bucket_bytes, groups
        ),
        optimizer_s=optimizer_s(problem, devices, parameters, holders),
        microbatches=problem.job.microbatches // max(1, len(groups)),
        sync=sync,
        groups=groups,
    )


def place_plan(plan: Plan) -> PlacedPipeline:
    """Compute the figures of a plan's stages from its cluster, job, graph and strategy."""
    return place(plan.problem, specs_of(plan.stages), plan.sync)


def specs_of(stages: Iterable[Stage]) -> list[StageSpec]:
    """Return the stages of a plan as a solver chooses them."""
    return [StageSpec(row.layers, row.devices, row.recompute, row.offload) for row in stages]


def has_equal_groups(problem: Problem, stages: Sequence[StageSpec]) -> bool:
    """Return whether each stage has groups of one size, and so have stages that share a parameter.

    Only tensor-parallel groups of one size have the same shares of parameters to reduce.
    """
    graph, cluster = problem.graph, problem.cluster
    if not graph.record.on_types:
        return True
    sizes: dict[str, set[int]] = {}
    for stage in stages:
        found = {cluster.device_type(device).members for device in stage.devices}
        if len(found) > 1:
            return False
        for layer in stage.layers:
            for name in graph.layers[layer].parameters:
                sizes.setdefault(name, set()).update(found)
    return all(len(found) == 1 for found in sizes.values())


def copy_s(problem: Problem, device: str, bytes_: int) -> float:
    """Return the seconds in which bytes are copied over a device's host link, either way.

    Raises:
        PipeplanError: if its type has none.
    """
    name = problem.cluster.type_of(device)
    rate = problem.cluster.device_types[name].host_link_gb_per_s
    if rate is None:
        raise PipeplanError(
            f"device_types.{name}.host_link_gb_per_s: null, but a stage on {device!r} offloads its "
            "stash; set it (`pipeplan detect` measures it) or keep the stash"
        )
    return bytes_ / (rate * 1e9)


def _sums(times: TimesByDevice, host: OperationTimes) -> dict[str, OperationTimes]:
    """Return the seconds of all layers and the host by device; devices of a type share a list."""
    by_row = {id(rows): rows for rows in times.values()}
    sums = {row: _sum(rows) + host for row, rows in by_row.items()}
    return {device: sums[id(rows)] for device, rows in times.items()}


def _layer_times(
    problem: Problem, spec: StageSpec, collectives: Mapping[str, Collectives]
) -> TimesByDevice:
    """Return the times of a stage's layers by device, with those of a layer's collectives."""
    type_of = {device: problem.cluster.type_of(device) for device in spec.devices}
    kinds = dict.fromkeys(type_of.values())
    times = {kind: _layer_times_on(problem, spec, kind, collectives) for kind in kinds}
    return {device: times[kind] for device, kind in type_of.items()}


def _layer_times_on(
    problem: Problem, spec: StageSpec, type_name: str, collectives: Mapping[str, Collectives]
) -> list[OperationTimes]:
    kind, again = problem.cluster.device_types[type_name], set(spec.recompute)
    graph, precision = problem.graph.on(type_name), problem.job.precision
    return [
        with_collectives(
            layer_times(graph.layers[name], type_name, kind, precision, name in again),
            collectives.get(name, Collectives()),
        )
        for name in graph.in_order(spec.layers)
    ]


def _sum(rows: Sequence[OperationTimes]) -> OperationTimes:
    return OperationTimes(*(sum(column) for column in zip(*rows, strict=True)))


def is_connected(placed: PlacedPipeline) -> bool:
    """Return whether every transfer and every all-reduce of the pipeline has a path."""
    seconds = [row.seconds for row in placed.synchronisations]
    seconds += [s for stage in placed.stages for row in stage.collective_s.values() for s in row]
    return _is_joined(placed) and all(map(math.isfinite, seconds))


def _is_joined(placed: PlacedPipeline) -> bool:
    """Return whether there is a path between all devices of neighbouring stages."""
    cluster = placed.problem.cluster
    for first, second in pairwise(placed.stages):
        rows, columns = (
            [cluster.numbers[device] for device in side.spec.devices] for side in (first, second)
        )
        if not np.isfinite(cluster.link_table.latency_s[np.ix_(rows, columns)]).all():
            return False
    return True
