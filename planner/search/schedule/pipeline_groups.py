"""Devices that are several equal pipelines: the schedule of one of them is a schedule of all.

Each group of devices has as many replicas of every stage, of the same types, and runs every g-th
microbatch of g groups. What is scheduled is the first group with its share of the microbatches,
its reductions as long as those among all groups. A pipeline is scheduled in several forms: by the
replica that runs each microbatch, and whether it is the first of such groups.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from planner.cluster.cluster import Cluster
from planner.costs.placed_pipeline import PlacedPipeline, PlacedStage, StageSpec
from planner.costs.placement import place
from planner.plan.operations import Operation, Orders
from planner.plan.problem import Problem
from planner.search.schedule.assignment import (
    Assignment,
    Islands,
    assignments,
    balanced_assignment,
    busy_s,
    islands_of,
    local_assignment,
)

MOST_WAYS = 30_000
"""Pairs of devices beyond which it is not looked up which links they use."""
MANY_OPERATIONS = 1500
"""Beyond this many (stage, microbatch) pairs fewer schedules are tried."""
MOST_FORMS = 2
"""Forms of a pipeline that are scheduled."""
BUSIER = 1.1
"""Forms whose busiest device and link take so many times longer than need be are left out."""


def renumbered(order: Sequence[Operation], number: int, count: int) -> tuple[Operation, ...]:
    """Return an order of the n-th of so many groups, which runs every count-th microbatch from n.

    Args:
        order: its microbatches numbered from 0.
        number: of the group, from 0.
        count: of the groups.
    """
    return tuple(o._replace(microbatch=o.microbatch * count + number) for o in order)


def spread_orders(
    orders: Orders, counterparts: Sequence[Mapping[str, str]]
) -> dict[str, tuple[Operation, ...]]:
    """Return the orders of all groups that do what one of them does.

    Args:
        orders: of one group, its microbatches numbered from 0.
        counterparts: of each group, its device for each of that one's.
    """
    count = len(counterparts)
    return {
        names[device]: renumbered(order, number, count)
        for device, order in orders.items()
        for number, names in enumerate(counterparts)
    }


@dataclass(frozen=True)
class PipelineGroups:
    """The equal groups of devices that stages lie on.

    Attributes:
        problem: the whole one.
        stages: of the one that is planned, mostly the first.
        counterparts: of each group, its device for each of that one's.
    """

    problem: Problem
    stages: tuple[StageSpec, ...]
    counterparts: tuple[Mapping[str, str], ...]

    @cached_property
    def islands(self) -> Islands:
        """The group of each device."""
        return {
            device: number
            for number, names in enumerate(self.counterparts)
            for device in names.values()
        }

    def first_of(self, pipeline: PlacedPipeline) -> PlacedPipeline:
        """Return the planned group of a pipeline, with its share of the microbatches."""
        held = {device for stage in self.stages for device in stage.devices}
        reductions = (
            replace(sync, devices=tuple(d for d in sync.devices if d in held))
            for sync in pipeline.synchronisations
            if held.intersection(sync.devices)
        )
        return PlacedPipeline(
            problem=pipeline.problem,
            stages=tuple(_on(stage, held) for stage in pipeline.stages),
            synchronisations=tuple(reductions),
            optimizer_s={device: pipeline.optimizer_s[device] for device in held},
            microbatches=pipeline.microbatches // len(self.counterparts),
            sync=pipeline.sync,
            groups=self._among(pipeline.groups),
        )

    def _among(self, outer: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
        """Return all groups, given those of which these groups together are one."""
        return (
            self.counterparts
            if not outer
            else [
                {device: names[peer] for device, peer in inner.items()}
                for names in outer
                for inner in self.counterparts
            ]
        )

    @cached_property
    def are_apart(self) -> bool:
        """Whether no two groups share a host or send microbatches over the same link.

        Among very many devices links are not looked up, and groups count as sharing some.
        """
        if self._share_hosts() or self._ways > MOST_WAYS:
            return False
        used: set[tuple[int, int]] = set()
        for names in self.counterparts:
            links = self._links(names)
            if used & links:
                return False
            used |= links
        return True

    def _share_hosts(self) -> bool:
        host_of = self.problem.cluster.host_of
        if not host_of:
            return False
        hosts = [
            {host_of[device] for device in names.values() if device in host_of}
            for names in self.counterparts
        ]
        return sum(map(len, hosts)) > len(set().union(*hosts))

    @property
    def _ways(self) -> int:
        """Pairs of devices that send each other something, in all groups."""
        held = [len(stage.devices) for stage in self.stages]
        return len(self.counterparts) * sum(a * b for a, b in pairwise(held))

    def _links(self, names: Mapping[str, str]) -> set[tuple[int, int]]:
        route = self.problem.cluster.route
        routes = (
            route(names[ends[0]], names[ends[1]])
            for here, there in pairwise(self.stages)
            for source in here.devices
            for target in there.devices
            for ends in ((source, target), (target, source))
        )
        return {link for found in routes if found is not None for link in found.links}

    def spread(self, orders: Orders) -> Orders:
        """Return the orders of all groups, given those of the planned one."""
        return spread_orders(orders, self.counterparts)


def _on(stage: PlacedStage, held: Collection[str]) -> PlacedStage:
    devices = tuple(device for device in stage.spec.devices if device in held)
    times = {device: stage.times[device] for device in devices}
    return replace(stage, spec=replace(stage.spec, devices=devices), times=times)


def pipeline_groups(
    problem: Problem, stages: Sequence[StageSpec], microbatches: int
) -> PipelineGroups | None:
    """Return the most equal groups that send nothing over the same link.

    The n-th group has the n-th part of each stage's devices of each type, in the cluster's order,
    so that groups lie in nodes where stages do. Each runs equally many microbatches.

    Args:
        problem: the model, cluster and job.
        stages: on the devices of all groups.
        microbatches: that these run.

    Returns:
        The most groups there can be if any number of them would share links; None if the devices
        are not equal groups at all.
    """
    held = [device for stage in stages for device in stage.devices]
    if len(set(held)) < len(held):
        return None
    rows = [row for stage in stages for row in _rows_by_type(problem.cluster, stage)]
    most = math.gcd(microbatches, *map(len, rows))
    counts = [count for count in range(most, 1, -1) if most % count == 0]
    found = [_groups(problem, stages, rows, count) for count in counts]
    return next((groups for groups in found if groups.are_apart), next(iter(found), None))


def _groups(
    problem: Problem, stages: Sequence[StageSpec], rows: Sequence[Sequence[str]], count: int
) -> PipelineGroups:
    """Return so many groups, each with its part of every row."""
    parts = [(row, len(row) // count) for row in rows]
    counterparts = tuple(
        {row[p]: row[number * size + p] for row, size in parts for p in range(size)}
        for number in range(count)
    )
    first = (
        replace(stage, devices=tuple(d for d in stage.devices if d in counterparts[0]))
        for stage in stages
    )
    return PipelineGroups(problem, tuple(first), counterparts)


def _rows_by_type(cluster: Cluster, stage: StageSpec) -> list[list[str]]:
    """Return a stage's devices of each type, in the cluster's order."""
    rows: dict[str, list[str]] = {}
    for device in sorted(stage.devices, key=cluster.numbers.__getitem__):
        rows.setdefault(cluster.type_of(device), []).append(device)
    return list(rows.values())


def groups_of(pipeline: PlacedPipeline) -> PipelineGroups | None:
    """Return the equal groups of a pipeline, see :func:`pipeline_groups`."""
    specs = [stage.spec for stage in pipeline.stages]
    return pipeline_groups(pipeline.problem, specs, pipeline.microbatches)


def place_first(problem: Problem, stages: Sequence[StageSpec]) -> PlacedPipeline:
    """Place stages for an estimate, of equal groups that share no link the first one alone.

    What is known of its schedules holds for all: they do the same at the same time.
    """
    if len(stages) * problem.job.microbatches > MANY_OPERATIONS:
        groups = pipeline_groups(problem, stages, problem.job.microbatches)
        if groups is not None and groups.are_apart:
            return place(problem, groups.stages, groups=groups.counterparts)
    return place(problem, stages)


# --- forms in which a pipeline is scheduled -------------------------------------------------------


@dataclass(frozen=True)
class ScheduledForm:
    """A pipeline whose microbatches have replicas, or the first of the equal ones it consists of.

    Attributes:
        whole: the pipeline.
        pipeline: to schedule.
        owner: the replica of each of its (stage, microbatch).
        busy_s: of the assignment of the whole pipeline; see there.
        groups: the equal pipelines, if only the first is to be scheduled.
    """

    whole: PlacedPipeline
    pipeline: PlacedPipeline
    owner: Assignment
    busy_s: float
    groups: PipelineGroups | None = None


def operation_count(pipeline: PlacedPipeline) -> int:
    """Return the number of (stage, microbatch) pairs."""
    return len(pipeline.stages) * pipeline.microbatches


def scheduled_forms(pipeline: PlacedPipeline) -> list[ScheduledForm]:
    """Return the forms in which to schedule a pipeline, the least busy first."""
    forms = _all_forms(pipeline)
    if len(forms) == 1:
        return forms
    forms.sort(key=lambda form: form.busy_s)
    most_s = BUSIER * forms[0].busy_s
    return [form for form in forms[:MOST_FORMS] if form.busy_s <= most_s]


def _all_forms(pipeline: PlacedPipeline) -> list[ScheduledForm]:
    """Return all forms, equal groups first.

    Groups that share no link are enough where there are many operations: equal devices do the same
    anyway. Elsewhere there are those forms as well that are less busy.
    """
    many = operation_count(pipeline) > MANY_OPERATIONS
    groups = groups_of(pipeline) if many or islands_of(pipeline) else None
    if groups is None:
        return [_form(pipeline, owner) for owner in assignments(pipeline)]
    if many and groups.are_apart:
        return [_first_of(pipeline, groups, 0.0)]
    owner = local_assignment(pipeline, groups.islands)
    form = _form(pipeline, owner)
    others = [_form(pipeline, other) for other in assignments(pipeline) if other != owner]
    if not groups.are_apart:
        return [form, *others]
    less_busy = (other for other in others if _is_less_busy(other, form))
    return [_first_of(pipeline, groups, form.busy_s), *less_busy]


def _first_of(pipeline: PlacedPipeline, groups: PipelineGroups, busy_s: float) -> ScheduledForm:
    first = groups.first_of(pipeline)
    return ScheduledForm(pipeline, first, balanced_assignment(first), busy_s, groups)


def _is_less_busy(form: ScheduledForm, other: ScheduledForm) -> bool:
    return form.busy_s < other.busy_s * (1 - 1e-9)


def _form(pipeline: PlacedPipeline, owner: Assignment) -> ScheduledForm:
    return ScheduledForm(pipeline, pipeline, owner, busy_s(pipeline, owner))
