"""Tensor-parallel groups of a plan, and the problem in which they are the devices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Self

from pydantic import Field, model_validator

from planner.cluster.tensor_groups import TensorGroup, grouped
from planner.errors import PipeplanError, shorten
from planner.job import Job
from planner.model.graph_record import GraphRecord
from planner.model.group_graph import group_graph, region_cuts, split_of
from planner.model.layer_graph import LayerGraph
from planner.model.split_record import SplitRecord
from planner.plan.problem import Problem
from planner.records.document import MOST_ENTRIES, Record, digest_of_data


class TensorParallel(Record):
    """Groups of devices that run every layer of their stages together, each a part of it.

    Stages, orders and predictions of the plan name groups instead of devices.

    Attributes:
        degree: Devices of each group; null if groups have several numbers of devices.
        sequence: Whether values between the parts of layers that are split are shared by positions
            (sequence parallelism) instead of whole on every device.
        groups: The groups; a device is in one of them at most.
    """

    degree: Annotated[int, Field(ge=2, le=MOST_ENTRIES)] | None = None
    sequence: bool = False
    groups: Annotated[tuple[TensorGroup, ...], Field(min_length=1, max_length=MOST_ENTRIES)]

    @model_validator(mode="after")
    def _has_its_degree(self) -> Self:
        """Note the degree of groups of one size, whether a file says it or not."""
        if self.degree is None and len(self.degrees) == 1 and self.degrees != (1,):
            self.__dict__["degree"] = self.degrees[0]  # The record is frozen.
        return self

    @property
    def degrees(self) -> tuple[int, ...]:
        """The numbers of devices that groups have, ascending."""
        return tuple(sorted({len(group.devices) for group in self.groups}))

    @property
    def digest(self) -> str:
        """SHA-256 of the groups and of what their devices share."""
        return digest_of_data(self.model_dump(mode="json", exclude={"degree"}))


def grouped_problem(problem: Problem, parallel: TensorParallel) -> Problem:
    """Return the problem whose devices are groups of another's.

    Its layers have the figures of all devices of a group together, by device type where groups have
    several sizes, and no stage begins inside a part of the model that is split.

    Args:
        problem: of single devices, whose graph has such a split.
        parallel: the groups.

    Raises:
        PipeplanError: if the cluster cannot be grouped so, or the graph has no such split, or one
            that gives out experts otherwise than the job says.
    """
    record = problem.graph.record
    splits = splits_of(record, parallel)
    _require_experts(record, parallel, problem.job)
    cluster = grouped(problem.cluster, parallel.groups)
    types: dict[str, dict[str, None]] = {}
    sizes: dict[str, int] = {}
    for group in parallel.groups:
        kind = cluster.type_of(group.name)
        types.setdefault(problem.cluster.type_of(group.devices[0]), {})[kind] = None
        sizes[kind] = len(group.devices)
    kinds = {name: tuple(found) for name, found in types.items()}
    in_parts = problem.runtime.group_messages == "parts"
    if in_parts and len(parallel.degrees) > 1:
        raise PipeplanError(
            "tensor_parallel.groups: they have several numbers of devices, but groups of the "
            "runtime send each other parts of tensors, which is there for one size only; plan for "
            "another runtime, or with tensor_parallel = N"
        )
    graph = group_graph(record, splits, sizes, kinds, in_parts=in_parts)
    inside = {name for split in splits.values() for name in region_cuts(record, split)}
    cuts = problem.job.cuts
    if inside:
        names = [layer.name for layer in record.layers[1:]] if cuts is None else cuts
        cuts = tuple(name for name in names if name not in inside)
    degrees = parallel.degrees
    job = problem.job.model_copy(
        update={
            "cuts": cuts,
            "tensor_parallel": degrees[0] if len(degrees) == 1 else "any",
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


def splits_of(graph: GraphRecord, parallel: TensorParallel) -> dict[int, SplitRecord]:
    """Return how a graph splits over groups, by their numbers of devices.

    Raises:
        PipeplanError: if it was not traced with such a split.
    """
    return {
        degree: split_of(graph, degree, sequence=parallel.sequence)
        for degree in parallel.degrees
        if degree > 1
    }
