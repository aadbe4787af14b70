"""What can be seen of a plan without a simulation; the verifier's first half."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

from planner.errors import PipeplanError, near
from planner.model.graph_record import Layer, graph_digest
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
    """Every problem that shows without a simulation; groups are devices of the plan."""
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
    field = plan.job.sharing_field
    if plan.job.shards_state and plan.sync.strategy != "all_reduce":
        yield (
            f"sync.strategy: {plan.sync.strategy!r} keeps the optimizer's state whole on every "
            f'replica, but job.{field} is true; use "all_reduce" or set it to false'
        )
    try:
        require_fit(plan.sync, pipeline_count(plan))
    except PipeplanError as error:
        yield from error.problems


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
    members = {kind: row.members for kind, row in plan.cluster.device_types.items()}
    sizes: dict[int, set[int]] = {}
    for position, stage in enumerate(plan.stages):
        held = known.intersection(stage.devices)
        sizes[position] = {members[plan.cluster.type_of(device)] for device in held}
        if len(sizes[position]) > 1:
            yield (
                f"stages[{position}].devices: groups of {listed(sorted(sizes[position]))} devices, "
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
    """The stages whose layers use each parameter or buffer."""
    layers = {layer.name: layer for layer in plan.model.graph.layers}
    users: dict[str, list[int]] = {}
    for position, stage in enumerate(plan.stages):
        used = (layers[name].parameters for name in stage.layers if name in layers)
        for name in dict.fromkeys(name for names in used for name in names):
            users.setdefault(name, []).append(position)
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


def order_problems(plan: Plan, orders: Orders) -> Iterator[str]:
    """Operations of stages and microbatches there are, once each, on one device of the stage."""
    known = set(plan.cluster.device_names)
    holders = [set(stage.devices) for stage in plan.stages]
    seen: Counter[Operation] = Counter()
    ran_on: dict[tuple[int, int], set[str]] = {}
    for device, order in orders.items():
        field = f"orders[{device!r}]"
        if device not in known:
            yield f"{field}: unknown device; the cluster has no such device"
        wrong: dict[str, list[Operation]] = {}
        for operation in order:
            seen[operation] += 1
            ran_on.setdefault((operation.stage, operation.microbatch), set()).add(device)
            for reason in _out_of_place(plan, holders, device, operation):
                wrong.setdefault(reason, []).append(operation)
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
    plan: Plan, holders: list[set[str]], device: str, operation: Operation
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
