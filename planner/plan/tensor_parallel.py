"""Tensor-parallel groups of a plan, and the problem in which they are the devices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from planner.cluster.tensor_groups import TensorGroup, grouped
from planner.errors import PipeplanError, shorten
from planner.job import Job
from planner.model.graph_record import GraphRecord
from planner.model.group_graph import group_graph, region_cuts, split_of
from planner.model.layer_graph import LayerGraph
from planner.plan.problem import Problem
from planner.records.document import MOST_ENTRIES, Record


class TensorParallel(Record):
    """Groups of devices that run every layer of their stages together, each a part of it.

    Stages, orders and predictions of the plan name groups instead of devices.

    Attributes:
        degree: Devices of each group.
        sequence: Whether values between the parts of layers that are split are shared by positions
            (sequence parallelism) instead of whole on every device.
        groups: The groups; a device is in one of them at most.
    """

    degree: Annotated[int, Field(ge=2, le=MOST_ENTRIES)]
    sequence: bool = False
    groups: Annotated[tuple[TensorGroup, ...], Field(min_length=1, max_length=MOST_ENTRIES)]


def grouped_problem(problem: Problem, parallel: TensorParallel) -> Problem:
    """Return the problem whose devices are groups of another's.

    Its layers have the figures of all devices of a group together, and no stage begins inside a
    part of the model that is split.

    Args:
        problem: of single devices, whose graph has such a split.
        parallel: the groups.

    Raises:
        PipeplanError: if the cluster cannot be grouped so, or the graph has no such split, or one
            that gives out experts otherwise than the job says.
    """
    record = problem.graph.record
    split = split_of(record, parallel.degree, sequence=parallel.sequence)
    _require_experts(record, parallel, problem.job)
    cluster = grouped(problem.cluster, parallel.groups)
    types: dict[str, dict[str, None]] = {}
    for group in parallel.groups:
        one = problem.cluster.type_of(group.devices[0])
        types.setdefault(one, {})[cluster.type_of(group.name)] = None
    by_type = {name: tuple(kinds) for name, kinds in types.items()}
    in_parts = problem.runtime.group_messages == "parts"
    graph = group_graph(record, split, by_type, in_parts=in_parts)
    inside, cuts = region_cuts(record, split), problem.job.cuts
    if inside:
        names = [layer.name for layer in record.layers[1:]] if cuts is None else cuts
        cuts = tuple(name for name in names if name not in inside)
    job = problem.job.model_copy(
        update={
            "cuts": cuts,
            "tensor_parallel": parallel.degree,
            "sequence_parallel": parallel.sequence,
        }
    )
    return replace(problem, graph=LayerGraph.from_record(graph), cluster=cluster, job=job)


def _require_experts(graph: GraphRecord, parallel: TensorParallel, job: Job) -> None:
    """Refuse a graph whose experts are divided otherwise than a job says."""
    sizes = {len(group.devices) for group in parallel.groups}
    for split in graph.splits:
        if split.degree not in sizes or split.sequence != parallel.sequence:
            continue
        if split.experts != job.expert_parallel:
            what = "has whole experts" if split.experts else "has shares of experts"
            raise PipeplanError(
                f"expert_parallel = {str(job.expert_parallel).lower()}: the layer graph's split "
                f"over groups of {split.degree} {what}; name the model instead of the graph, or "
                "trace it again with this job and --split"
            )
        if split.expert_load != job.expert_loads:
            found = shorten(split.expert_load) if split.expert_load else "equally many tokens"
            raise PipeplanError(
                f"expert_load = {json.dumps(job.expert_load)}: the layer graph's split over groups "
                f"of {split.degree} is for {found}; name the model instead of the graph, or trace "
                "it again with this job and --split"
            )
