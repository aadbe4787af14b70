"""Seconds of collectives inside tensor-parallel groups, which are part of other times."""

from __future__ import annotations

from planner.cluster.cluster import Cluster
from planner.costs.optimizer import summing_s
from planner.costs.placed_pipeline import PlacedPipeline
from planner.costs.roofline import OperationTimes, collective_times


def inside_times(pipeline: PlacedPipeline, stage: int, device: str) -> OperationTimes:
    """Return the seconds of a stage's collectives inside a group, by operation.

    Args:
        pipeline: on a cluster of groups, or of single devices, which have none.
        stage: its number.
        device: the group.
    """
    problem, spec = pipeline.problem, pipeline.stages[stage].spec
    kind = problem.cluster.type_of(device)
    layers, figures = problem.graph.on(kind).layers, problem.cluster.device_types[kind]
    total, rerun = OperationTimes(0.0, 0.0, 0.0, 0.0), set(spec.recompute)
    for name in spec.layers:
        times = collective_times(layers[name], figures)
        again_s = times.forward_s if name in rerun else 0.0
        total += times + OperationTimes(0.0, again_s, 0.0, again_s)
    return total


def summed_s(pipeline: PlacedPipeline, device: str, cluster: Cluster | None = None) -> float:
    """Return the seconds of an optimizer step in which a group sums gradients.

    Args:
        pipeline: on a cluster of groups, or of single devices, which sum none.
        device: the group.
        cluster: with other figures of the groups; the pipeline's unless told.
    """
    rows = {
        parameter.name: parameter
        for stage in pipeline.stages_on[device]
        for parameter in pipeline.problem.graph_on([device]).parameters_of(
            pipeline.stages[stage].spec.layers
        )
        if parameter.trainable
    }
    cluster = pipeline.problem.cluster if cluster is None else cluster
    return summing_s(pipeline.problem.job, cluster.device_type(device), rows.values())
