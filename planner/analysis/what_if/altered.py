"""A plan under a change: the problem it would answer then, its stages and its orders."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from itertools import product

from planner.costs.placed_pipeline import PlacedPipeline, StageSpec
from planner.costs.placement import has_equal_groups, place, specs_of
from planner.errors import PipeplanError, near
from planner.plan.operations import Operation, Orders, owners
from planner.plan.plan import Plan, Sync
from planner.plan.problem import Problem
from planner.plan.runtimes import is_expressible
from planner.search.schedule.assignment import balanced_assignment
from planner.simulation.simulator import simulate
from planner.variants.changes import (
    AnotherDevice,
    Change,
    DeviceChange,
    LinkChange,
    MicrobatchChange,
    SpaceChange,
    StashChange,
)
from planner.variants.microbatches import IN_PROPORTION, with_microbatches
from planner.variants.plan_changes import BoundaryChange, DeviceExchange, ReplicaChange
from planner.variants.problems import with_device_added, with_device_figures, with_job, with_link


@dataclass(frozen=True)
class Altered:
    """A plan under a change.

    Attributes:
        problem: as it would be.
        stages: the plan's, with what they recompute.
        orders: the plan's, the same work in the same order.
        sync: the plan's strategy of synchronisation.
        is_of_plan: whether the plan was changed and the problem was not, so that there is nothing
            to solve again.
        assumes: what the figures rest on besides the cost model.
    """

    problem: Problem
    stages: tuple[StageSpec, ...]
    orders: Orders
    sync: Sync = field(default_factory=Sync)
    is_of_plan: bool = False
    assumes: str | None = None

    @cached_property
    def pipeline(self) -> PlacedPipeline:
        """The stages on their devices."""
        return place(self.problem, self.stages, self.sync)

    @cached_property
    def starts_s(self) -> dict[Operation, float]:
        """When each operation starts in a replay.

        Raises:
            DeadlockError: if devices wait for each other in a circle.
        """
        timeline = simulate(self.pipeline, self.orders)
        return {event.operation: event.start_s for event in timeline.operations}

    def sequence(self, operation: Operation) -> tuple[float, bool, int, bool, int]:
        """Return a key that sorts operations by their start.

        Of those without duration that start at once, what others need comes first.
        """
        stage, kind, microbatch = operation
        is_forward = kind == "F"
        way = stage if is_forward else -stage
        return self.starts_s[operation], not is_forward, way, kind == "W", microbatch


def unaltered(plan: Plan) -> Altered:
    """Return a plan as it is."""
    return Altered(plan.problem, tuple(specs_of(plan.stages)), plan.parsed_orders(), plan.sync)


def alter(start: Altered, change: Change) -> Altered:
    """Return a plan under a change.

    Raises:
        PipeplanError: naming the change, and what it names that there is not or cannot be.
    """
    try:
        match change:
            case DeviceChange():
                return replace(start, problem=with_device_figures(start.problem, change))
            case LinkChange():
                return replace(start, problem=with_link(start.problem, change))
            case AnotherDevice():
                return replace(start, problem=with_device_added(start.problem, change.device))
            case StashChange():
                return _with_fate(start, change)
            case MicrobatchChange():
                return _with_microbatches(start, change.factor)
            case SpaceChange():
                return _with_space(start, change)
            case BoundaryChange():
                return _with_boundary(start, change)
            case DeviceExchange():
                return _with_exchange(start, change)
            case ReplicaChange():
                return _with_replica(start, change)
    except PipeplanError as error:
        raise PipeplanError(f"change '{change}': {problem}" for problem in error.problems) from None


def alter_each(start: Altered, changes: Iterable[Change]) -> dict[Change, Altered]:
    """Return a plan under each of some changes.

    Raises:
        PipeplanError: naming every change that cannot be made.
    """
    found: dict[Change, Altered] = {}
    problems: list[str] = []
    for change in dict.fromkeys(changes):
        try:
            found[change] = alter(start, change)
        except PipeplanError as error:
            problems += error.problems
    if problems:
        raise PipeplanError(problems)
    return found


def _with_fate(start: Altered, change: StashChange) -> Altered:
    layer, job = change.layer, start.problem.job
    if layer not in start.problem.graph.layers:
        raise PipeplanError(
            f"the model has no such layer; {near(layer, start.problem.graph.layers)}"
        )
    if change.fate == "recompute" and not job.recompute:
        raise PipeplanError("the job forbids recomputation; set recompute = true in it")
    if change.fate == "offload" and not job.offload:
        raise PipeplanError("the job forbids offloading stashes; set offload = true in it")
    stages = tuple(
        _with_layer(stage, change) if layer in stage.layers else stage for stage in start.stages
    )
    if stages == start.stages:
        raise PipeplanError(_NOTHING_NEW[change.fate])
    return replace(start, stages=stages, is_of_plan=True)


_NOTHING_NEW = {
    "recompute": "the plan recomputes it already",
    "offload": "the plan offloads it already",
    "keep": "the plan neither recomputes nor offloads it",
}


def _with_layer(stage: StageSpec, change: StashChange) -> StageSpec:
    again, away = {*stage.recompute} - {change.layer}, {*stage.offload} - {change.layer}
    if change.fate == "recompute":
        again.add(change.layer)
    elif change.fate == "offload":
        away.add(change.layer)
    return _with_layers(stage, stage.layers, again, away)


def _with_microbatches(start: Altered, factor: Fraction) -> Altered:
    problem = with_microbatches(start.problem, factor)
    count = problem.job.microbatches
    orders = {
        device: _divided(order, int(factor)) if factor > 1 else _first(order, count)
        for device, order in start.orders.items()
    }
    return replace(start, problem=problem, orders=orders, assumes=IN_PROPORTION)


def _with_space(start: Altered, change: SpaceChange) -> Altered:
    job = start.problem.job
    if job.model_copy(update=change.job_fields) == job:
        ((field, value),) = change.job_fields.items()
        raise PipeplanError(f"job.{field} is {json.dumps(value)} already")
    if not change.is_possible(job):
        raise PipeplanError(
            f"job.shard_parameters is true, so plans {change} are not possible; plan with "
            "shard_parameters = false"
        )
    problem = with_job(start.problem, **change.job_fields)
    if not is_expressible(problem):
        raise PipeplanError(f"{job.runtime}, for which it was planned, cannot run such plans")
    return replace(start, problem=problem)


def _divided(order: Sequence[Operation], number: int) -> tuple[Operation, ...]:
    """Replace each operation by ``number`` operations that follow each other."""
    return tuple(
        operation._replace(microbatch=number * operation.microbatch + part)
        for operation in order
        for part in range(number)
    )


def _first(order: Sequence[Operation], count: int) -> tuple[Operation, ...]:
    """Return the operations of the first microbatches, so that the warm-up stays as deep."""
    return tuple(operation for operation in order if operation.microbatch < count)


# --- stages and devices ---------------------------------------------------------------------------


def _with_boundary(start: Altered, change: BoundaryChange) -> Altered:
    """Move layers across a boundary; each stays recomputed or offloaded, or not."""
    source, target = (_stage(start, number) for number in (change.source, change.target))
    if abs(change.source - change.target) != 1:
        raise PipeplanError("its stages are not next to each other; move layers over one boundary")
    held = start.problem.graph.in_order(source.layers)
    for name in (change.first, change.last):
        if name not in held:
            raise PipeplanError(f"stage {change.source} has no layer {name!r}; {near(name, held)}")
    first, last = held.index(change.first), held.index(change.last) + 1
    begin, end = (0, last) if change.target < change.source else (first, len(held))
    if (first, last) != (begin, end) or first >= last:
        nearest = replace(change, first=held[begin], last=held[end - 1])
        raise PipeplanError(f"layers between them and the boundary go with them: '{nearest}'")
    if last - first == len(held):
        raise PipeplanError(f"stage {change.source} would have no layer left; leave it one")
    moved = held[first:last]
    rest = tuple(name for name in held if name not in moved)
    joined = tuple(start.problem.graph.in_order([*target.layers, *moved]))
    again = {*source.recompute, *target.recompute}
    away = {*source.offload, *target.offload}
    changed = {
        change.source: _with_layers(source, rest, again, away),
        change.target: _with_layers(target, joined, again, away),
    }
    return _with_stages(start, changed, start.orders)


def _stage(start: Altered, number: int) -> StageSpec:
    if number >= len(start.stages):
        raise PipeplanError(f"there is no stage {number}; the last is {len(start.stages) - 1}")
    return start.stages[number]


def _with_layers(
    stage: StageSpec, layers: tuple[str, ...], again: set[str], away: set[str]
) -> StageSpec:
    recompute = tuple(name for name in layers if name in again)
    offload = tuple(name for name in layers if name in away)
    return replace(stage, layers=layers, recompute=recompute, offload=offload)


def _with_stages(start: Altered, changed: Mapping[int, StageSpec], orders: Orders) -> Altered:
    """Change some stages.

    Raises:
        PipeplanError: naming a layer and a device that cannot run it, or because tensor-parallel
            groups of several sizes would hold the same parameters.
    """
    stages = tuple(changed.get(number, stage) for number, stage in enumerate(start.stages))
    layers, type_of = start.problem.graph.layers, start.problem.cluster.type_of
    for stage in stages:
        for layer, device in product(map(layers.__getitem__, stage.layers), stage.devices):
            if not layer.may_run_on(type_of(device)):
                raise PipeplanError(
                    f"layer {layer.name!r} would be on {device!r}, but runs on device types "
                    f"{', '.join(layer.device_types)} only"
                )
    if not has_equal_groups(start.problem, stages):
        raise PipeplanError(
            "tensor-parallel groups of several sizes would hold one stage, or stages that share a "
            "parameter"
        )
    return replace(start, stages=stages, orders=orders, is_of_plan=True)


def _with_exchange(start: Altered, change: DeviceExchange) -> Altered:
    """Let two devices change places, with their orders."""
    image = {change.one: change.other, change.other: change.one}
    for device in image:
        _require_device(start, device)
    if len(image) == 1:
        raise PipeplanError("it is one device; name two")
    used = {device for stage in start.stages for device in stage.devices}
    if not used & set(image):
        raise PipeplanError("neither holds a stage; name one that does")
    changed = {
        number: replace(stage, devices=tuple(image.get(d, d) for d in stage.devices))
        for number, stage in enumerate(start.stages)
    }
    orders = {image.get(device, device): order for device, order in start.orders.items()}
    return _with_stages(start, changed, orders)


def _require_device(start: Altered, device: str) -> None:
    names = start.problem.cluster.device_names
    if device not in start.problem.cluster.numbers:
        raise PipeplanError(f"the cluster has no device {device!r}; {near(device, names)}")


def _with_replica(start: Altered, change: ReplicaChange) -> Altered:
    """Let a device join or leave stages, whose replicas share the microbatches again."""
    device, number = change.device, start.problem.cluster.numbers
    _require_device(start, device)
    if change.source == change.target:
        raise PipeplanError(f"it stays in stage {change.source}; name another stage")
    changed: dict[int, StageSpec] = {}
    if change.source is not None:
        stage = _stage(start, change.source)
        if device not in stage.devices:
            raise PipeplanError(f"it does not hold stage {change.source}")
        if len(stage.devices) == 1:
            raise PipeplanError(f"stage {change.source} has no other device; exchange it instead")
        rest = tuple(name for name in stage.devices if name != device)
        changed[change.source] = replace(stage, devices=rest)
    if change.target is not None:
        stage = _stage(start, change.target)
        if device in stage.devices:
            raise PipeplanError(f"it holds stage {change.target} already")
        devices = tuple(sorted((*stage.devices, device), key=number.__getitem__))
        changed[change.target] = replace(stage, devices=devices)
    altered = _with_stages(start, changed, start.orders)
    return replace(altered, orders=_shared_again(start, altered, changed))


def _shared_again(start: Altered, altered: Altered, changed: Collection[int]) -> Orders:
    """Share the microbatches of some stages among their devices, each then in the old sequence.

    Operations start in the old replay after all that they need, so that none waits in a circle.
    """
    owner = owners(start.orders)
    fresh = balanced_assignment(altered.pipeline)
    owner |= {row: fresh[row] for row in owner if row[0] in changed}
    touched = {
        device
        for number in changed
        for stages in (start.stages, altered.stages)
        for device in stages[number].devices
    }
    rows: dict[str, list[Operation]] = {device: [] for device in touched}
    for operation in sorted(start.starts_s, key=start.sequence):
        device = owner[operation.stage, operation.microbatch]
        if device in touched:
            rows[device].append(operation)
    orders = {**start.orders, **rows}
    return {device: tuple(orders[device]) for device in altered.pipeline.devices}
