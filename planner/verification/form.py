"""What can be seen of a plan without its times: stages, devices, groups, orders, buffers."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from planner.errors import PipeplanError, near
from planner.model.graph_record import Layer, graph_digest
from planner.model.split_record import SplitRecord
from planner.plan.membership import outside
from planner.plan.operations import Operation, Orders
from planner.plan.plan import Plan
from planner.sync.pipeline_replicas import pipeline_count
from planner.sync.strategies import require_fit
from planner.units import listed, plural

_OPEN = {
    "shard_optimizer": "replicas share the optimizer's state",
    "shard_parameters": "replicas divide weights and gradients",
    "offload": "stashes go to the host",
}
"""Freedoms that a plan has taken or not."""


def form_problems(plan: Plan, orders: Orders) -> Iterator[str]:
    """Yield every problem that shows without times.

    Args:
        plan: with its tensor-parallel groups as devices.
        orders: its orders, parsed.
    """
    foremost = list(stage_problems(plan))
    yield from foremost
    beyond = outside(plan.job.space, plan.stages, orders, plan.layers, overlaps=plan.overlaps)
    yield from (found.in_job() for found in beyond)
    yield from _ranks(plan)
    yield from _written_buffers(plan, orders)
    yield from order_problems(plan, orders)
    if not foremost:  # Only then is it known how many operations there must be.
        yield from _missing(plan, orders)


def model_problems(plan: Plan) -> Iterator[str]:
    """Yield why a plan's graph, microbatches or strategy are not those that it was planned with."""
    found = graph_digest(plan.model.graph)
    if found != plan.model.graph_digest:
        yield (
            f"model.graph_digest: the plan says {plan.model.graph_digest[:19]}…, its layer graph "
            f"has {found[:19]}…; the graph was changed after planning: plan again"
        )
    if plan.microbatches != plan.job.microbatches:
        yield (
            f"microbatches: {plan.microbatches}, but job.microbatches is {plan.job.microbatches}; "
            "make them equal"
        )
    for field, what in _OPEN.items():
        if getattr(plan.job, field) == "if_needed":
            yield f'job.{field}: "if_needed", but in a plan {what} or not; set it to true or false'
    if plan.job.shards_state and plan.sync.strategy != "all_reduce":
        yield (
            f"sync.strategy: {plan.sync.strategy!r} keeps the optimizer's state whole on every "
            f'replica, but job.{plan.job.sharing_field} is true; use "all_reduce" or set it to '
            "false"
        )
    try:
        require_fit(plan.sync, pipeline_count(plan))
    except PipeplanError as error:
        yield from error.problems


# --- tensor-parallel groups -----------------------------------------------------------------------


def group_problems(plan: Plan) -> Iterator[str]:
    """Yield why a plan's groups are none that its job, its runtime and its splits allow."""
    parallel, allowed, degrees = plan.tensor_parallel, plan.job.tensor_parallel, plan.degrees
    sizes, name_them = listed(degrees), "name the groups in tensor_parallel"
    for name, kind in plan.cluster.device_types.items():
        if kind.group is not None:
            yield (
                f"cluster.device_types.{name}.group: a plan has the cluster's single devices; "
                f"{name_them}"
            )
    if plan.model.graph.on_types:
        yield f"model.graph.on_types: a plan has the figures of single devices; {name_them}"
    if allowed != "any" and degrees != (allowed,):
        remedy = sizes if len(degrees) == 1 else '"any"'
        yield (
            f"tensor_parallel: a replica of a stage is {sizes} devices, but job.tensor_parallel is "
            f"{allowed}; plan again, or set the job's to {remedy}"
        )
    if parallel is None:
        return
    if degrees == (1,):
        yield "tensor_parallel.groups: each has one device; remove tensor_parallel"
    if parallel.degree is not None and degrees != (parallel.degree,):
        yield f"tensor_parallel.degree: {parallel.degree}, but groups have {sizes} devices"
    if len({group.name for group in parallel.groups}) < len(parallel.groups):
        yield "tensor_parallel.groups: several have the same name; give each its own"
    if parallel.sequence != plan.job.sequence_parallel:
        yield (
            f"tensor_parallel.sequence: {str(parallel.sequence).lower()}, but "
            f"job.sequence_parallel is {str(plan.job.sequence_parallel).lower()}; make them equal"
        )
    if plan.job.runtime not in (None, "pipeplan") and len(degrees) > 1:
        yield (
            f"tensor_parallel.groups: they have {sizes} devices, "
            f"but {plan.job.runtime} has groups of one size; set job.runtime to null"
        )
    for split in _splits(plan):
        yield from _experts(split)
    try:
        _ = plan.problem
    except PipeplanError as error:
        yield from error.problems


def _experts(split: SplitRecord) -> Iterator[str]:
    """Yield how a split's regions are not those that it says of experts."""
    regions = [region for region in split.regions if region.kind == "experts"]
    field, loads = f"model.graph.splits: of degree {split.degree},", split.expert_load
    if split.experts != bool(regions):
        said = str(split.experts).lower()
        yield f"{field} experts is {said}, but {len(regions)} regions are experts; plan again"
    if len(loads) not in (0, 1, len(regions)):
        yield (
            f"{field} {len(loads)} lists of expert_load for {len(regions)} layers with experts; "
            "plan again"
        )
        return
    for number, region in enumerate(regions):
        count = region.sizes[0] if len(region.sizes) == 1 else 0
        known = len(loads[number % len(loads)]) if loads else count
        if count < 1 or count % (split.degree or 1) or known != count:
            yield (
                f"{field} {list(region.sizes)} experts of {', '.join(region.layers)} do not fit "
                f"{split.degree} devices and {known} loads; plan again"
            )


def _splits(plan: Plan) -> list[SplitRecord]:
    """Return how the model splits over the plan's groups."""
    parallel = plan.tensor_parallel
    return [
        row
        for row in (plan.model.graph.splits if parallel else ())
        if row.degree in plan.degrees and parallel and row.sequence == parallel.sequence
    ]


def divided_regions(plan: Plan) -> Iterator[str]:
    """Yield cuts at tensors of which every device of a group has a share inside a split part."""
    stage_of = {name: stage.index for stage in plan.stages for name in stage.layers}
    rows = (row for split in _splits(plan) for row in split.boundaries)
    inside = {row.name for row in rows if row.placement == "region"}
    for tensor in plan.model.graph.boundaries:
        stages = {stage_of.get(name) for name in (tensor.producer, *tensor.users)}
        if tensor.name in inside and len(stages) > 1:
            yield (
                f"stages: {tensor.name!r} is inside a part of the model that is split over a "
                f"group, and goes from {tensor.producer!r} to another stage; keep its layers in "
                "one stage"
            )


# --- stages ---------------------------------------------------------------------------------------


def stage_problems(plan: Plan) -> Iterator[str]:
    """Every layer in exactly one stage, no edge backwards, devices as the job allows."""
    stage_of: dict[str, int] = {}
    layers = {layer.name: layer for layer in plan.model.graph.layers}
    for position, stage in enumerate(plan.stages):
        field = f"stages[{position}]"
        if stage.index != position:
            yield f"{field}.index: {stage.index}, expected {position}; stages are listed in order"
        for name in stage.layers:
            if name not in layers:
                yield f"{field}.layers: unknown layer {name!r}; the model has no such layer"
            elif name in stage_of:
                yield f"{field}.layers: layer {name!r} is already in stage {stage_of[name]}"
            stage_of.setdefault(name, position)
        for what, again in (("recompute", stage.recompute), ("offload", stage.offload)):
            for name in sorted(set(again) - set(stage.layers)):
                yield f"{field}.{what}: layer {name!r} is not in this stage"
        for name in sorted(set(stage.offload) & set(stage.recompute)):
            yield (
                f"{field}.offload: layer {name!r} is recomputed too; do one of them, what runs "
                "again has no stash"
            )
        bound = [layers[name] for name in stage.layers if name in layers]
        yield from _devices(plan, position, [layer for layer in bound if layer.device_types])
    for name in (name for name in layers if name not in stage_of):
        yield f"stages: layer {name!r} is in no stage; every layer must be in exactly one"
    yield from _group_sizes(plan)
    for tensor in plan.model.graph.boundaries:
        first = stage_of.get(tensor.producer, -1)
        for user in tensor.users:
            if stage_of.get(user, first) < first:
                yield (
                    f"stages: {tensor.producer!r} (stage {first}) feeds {user!r} (stage "
                    f"{stage_of[user]}), an edge backwards; move one of them"
                )


def _devices(plan: Plan, position: int, bound: Sequence[Layer]) -> Iterator[str]:
    """A stage's devices exist, are listed once and may run its layers and take its stashes."""
    stage, field = plan.stages[position], f"stages[{position}]"
    known = set(plan.cluster.device_names)
    for device, count in Counter(stage.devices).items():
        if device not in known:
            yield (
                f"{field}.devices: unknown device {device!r}; the cluster has no such device, "
                f"{near(device, sorted(known))}"
            )
            continue
        if count > 1:
            yield f"{field}.devices: device {device!r} is listed {count} times; list it once"
        kind = plan.cluster.type_of(device)
        if stage.offload and plan.cluster.device_type(device).host_link_gb_per_s is None:
            yield (
                f"{field}.offload: device {device!r} is of type {kind!r}, which has "
                "no host_link_gb_per_s; set it, or keep the stashes"
            )
        for layer in bound:
            if not layer.may_run_on(kind):
                yield (
                    f"{field}.devices: device {device!r} is of type {kind!r}, but layer "
                    f"{layer.name!r} runs on {', '.join(layer.device_types)} only; move the layer "
                    "or the stage"
                )


def _group_sizes(plan: Plan) -> Iterator[str]:
    """Groups that have the same parameters have them in equally many shares."""
    known = set(plan.cluster.device_names)
    sizes: list[set[int]] = []
    for position, stage in enumerate(plan.stages):
        held = known.intersection(stage.devices)
        sizes.append({plan.cluster.device_type(device).members for device in held})
        if len(sizes[-1]) > 1:
            yield (
                f"stages[{position}].devices: groups of {listed(sorted(sizes[-1]))} devices, "
                "which have different shares of parameters; give a stage groups of one size"
            )
    for name, holders in _users(plan).items():
        different = set().union(*(sizes[position] for position in holders))
        if len(holders) > 1 and len(different) > 1:
            yield (
                f"stages: {listed(holders)} share parameter {name!r} on groups of "
                f"{listed(sorted(different))} devices; give these stages groups of one size"
            )


def _users(plan: Plan) -> dict[str, list[int]]:
    """Return the stages whose layers use each parameter or buffer."""
    layers = {layer.name: layer for layer in plan.model.graph.layers}
    users: defaultdict[str, list[int]] = defaultdict(list)
    for position, stage in enumerate(plan.stages):
        used = (layers[name].parameters for name in stage.layers if name in layers)
        for name in dict.fromkeys(name for names in used for name in names):
            users[name].append(position)
    return users


def _written_buffers(plan: Plan, orders: Orders) -> Iterator[str]:
    """A buffer that forwards write is on one device, which runs them once each and in order."""
    layers, users = plan.model.graph.layers, _users(plan)
    for name in dict.fromkeys(name for layer in layers for name in layer.writes):
        holders = users.get(name, [])
        if len(holders) > 1:
            yield f"stages: {listed(holders)} use {name!r}, which forwards write; join them"
        for position in holders:
            stage, what = plan.stages[position], f"stages[{position}]: its forwards write {name!r}"
            if len(stage.devices) > 1:
                yield f"{what}, replicas each for themselves; give it a single device"
            if any(name in row.parameters for row in layers if row.name in stage.recompute):
                yield f"{what}, which recomputed layers would read changed; do not recompute them"
            for device, order in orders.items():
                forwards = [op.microbatch for op in order if op[:2] == (position, "F")]
                if forwards != sorted(forwards):
                    yield f"{what}: orders[{device!r}] must have its microbatches in order"


def _ranks(plan: Plan) -> Iterator[str]:
    used = {device for stage in plan.stages for device in stage.devices}
    for device, count in Counter(plan.ranks).items():
        if count > 1:
            yield f"ranks: device {device!r} is listed {count} times"
        if device not in used:
            yield f"ranks: device {device!r} holds no stage; remove it"
    for device in sorted(used - set(plan.ranks)):
        yield f"ranks: device {device!r} holds a stage and has no rank; add it"


# --- orders ---------------------------------------------------------------------------------------


def order_problems(plan: Plan, orders: Orders) -> Iterator[str]:
    """Operations of stages and microbatches there are, once each, on one device of the stage."""
    known = set(plan.cluster.device_names)
    holders = [set(stage.devices) for stage in plan.stages]
    seen: Counter[Operation] = Counter()
    ran_on: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for device, order in orders.items():
        field = f"orders[{device!r}]"
        if device not in known:
            yield f"{field}: unknown device; the cluster has no such device"
        wrong: defaultdict[str, list[Operation]] = defaultdict(list)
        seen.update(order)
        for operation in order:
            ran_on[operation.stage, operation.microbatch].add(device)
            for reason in _out_of_place(plan, holders, device, operation):
                wrong[reason].append(operation)
        for reason, found in wrong.items():
            more = f" and {plural(len(found) - 1, 'operation')} more" if len(found) > 1 else ""
            yield f"{field}: {found[0]}{more}: {reason}"
    for operation, count in seen.items():
        if count > 1:
            yield f"orders: operation {operation} stands {count} times; each runs once"
    for (stage, microbatch), devices in ran_on.items():
        if len(devices) > 1:
            yield (
                f"orders: microbatch {microbatch} of stage {stage} runs on "
                f"{' and '.join(sorted(devices))}; all its operations belong to one replica"
            )


def _out_of_place(
    plan: Plan, holders: Sequence[Iterable[str]], device: str, operation: Operation
) -> Iterator[str]:
    if operation.stage >= len(holders):
        yield f"there is no stage {operation.stage}"
    elif device not in holders[operation.stage]:
        yield f"device {device!r} does not hold stage {operation.stage}"
    if operation.microbatch >= plan.microbatches:
        yield f"there is no microbatch {operation.microbatch}, microbatches is {plan.microbatches}"


def _missing(plan: Plan, orders: Orders) -> Iterator[str]:
    """Microbatches without the right operations; neighbours that lack the same in one line."""
    kinds: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for order in orders.values():
        for stage, kind, microbatch in order:
            kinds[stage, microbatch].add(kind)
    for stage in range(len(plan.stages)):
        rows = [(sorted(kinds[stage, m], key="FBIW".index), m) for m in range(plan.microbatches)]
        for has, run in groupby(rows, key=itemgetter(0)):
            if has not in (["F", "B"], ["F", "I", "W"]):
                found = [microbatch for _, microbatch in run]
                several = f"each of microbatches {found[0]} to {found[-1]}"
                which = several if len(found) > 1 else f"microbatch {found[0]}"
                yield (
                    f"orders: {which} of stage {stage} has {', '.join(has) or 'no operation'}; "
                    "it needs F and then B, or F, I and W"
                )
