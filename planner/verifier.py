"""Independent checker of plans; it shares no code with the solvers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from planner.artifacts.document import digest
from planner.artifacts.hardware import GIB
from planner.artifacts.operations import Operation
from planner.artifacts.plan import Plan, Predicted
from planner.costs.placement import is_connected, place_plan
from planner.errors import PipeplanError
from planner.simulator import Timeline, simulate

RELATIVE_TOLERANCE = 1e-6
SYNC_STRATEGIES = ("all_reduce",)


def verify(plan: Plan) -> list[str]:
    """Check a plan.

    Returns:
        One line a problem, each naming the field; empty if the plan holds: every layer in exactly
        one stage, no edge backwards, each operation once and on a device of its stage, no
        deadlock, memory within capacity at every moment, predictions equal to a fresh simulation.
    """
    try:
        orders = plan.parsed_orders()
        problems = [*_model(plan), *_stages(plan), *_ranks(plan), *_orders(plan, orders)]
        if problems:
            return problems
        pipeline = place_plan(plan)
        if not is_connected(pipeline):
            return ["stages: two devices that must exchange data have no path of links"]
        timeline = simulate(pipeline, orders)
    except PipeplanError as error:
        return list(error.problems)
    return [*_memory(timeline), *_predicted(plan, timeline)]


def require_valid(plan: Plan, source: str = "plan") -> None:
    """Raise unless the plan holds.

    Raises:
        PipeplanError: with every problem :func:`verify` finds.
    """
    problems = verify(plan)
    if problems:
        raise PipeplanError(f"{source}: {problem}" for problem in problems)


def predict(timeline: Timeline, lower_bound_s: float) -> Predicted:
    """What a plan says of itself, from a simulation and a proven bound."""
    bound = min(lower_bound_s, timeline.iteration_time_s)
    return Predicted.model_validate(
        {
            "iteration_time_s": timeline.iteration_time_s,
            "lower_bound_s": bound,
            "gap": gap(timeline.iteration_time_s, bound),
            "bubble": timeline.bubble,
            "devices": {
                device: {
                    "busy_s": timeline.busy_s[device],
                    "peak_memory_bytes": timeline.peak_memory_bytes[device],
                }
                for device in timeline.pipeline.devices
            },
        }
    )


def gap(iteration_time_s: float, lower_bound_s: float) -> float | None:
    """How far above the bound a plan may be from the best: time / bound - 1; None if no bound."""
    if lower_bound_s <= 0:
        return None
    return max(0.0, iteration_time_s / lower_bound_s - 1)


def _model(plan: Plan) -> Iterator[str]:
    found = digest(plan.model.graph)
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
    if plan.sync.strategy not in SYNC_STRATEGIES:
        yield (
            f"sync.strategy: {plan.sync.strategy!r} is not available; "
            f"use one of {', '.join(SYNC_STRATEGIES)}"
        )
    for option in plan.sync.options:
        yield f"sync.options.{option}: {plan.sync.strategy} has no such option; remove it"


def _stages(plan: Plan) -> Iterator[str]:
    stage_of: dict[str, int] = {}
    known = {layer.name for layer in plan.model.graph.layers}
    for position, stage in enumerate(plan.stages):
        field = f"stages[{position}]"
        if stage.index != position:
            yield f"{field}.index: {stage.index}, expected {position}; stages are listed in order"
        yield from _stage_devices(plan, position)
        for layer in stage.layers:
            if layer not in known:
                yield f"{field}.layers: unknown layer {layer!r}; the model has no such layer"
            elif layer in stage_of:
                yield f"{field}.layers: layer {layer!r} is already in stage {stage_of[layer]}"
            stage_of.setdefault(layer, position)
        for layer in stage.recompute:
            if layer not in stage.layers:
                yield f"{field}.recompute: layer {layer!r} is not in this stage"
    for name in (layer.name for layer in plan.model.graph.layers):
        if name not in stage_of:
            yield f"stages: layer {name!r} is in no stage; every layer must be in exactly one"
    yield from _edges_backwards(plan, stage_of)


def _stage_devices(plan: Plan, position: int) -> Iterator[str]:
    field = f"stages[{position}].devices"
    devices = plan.stages[position].devices
    for device, count in Counter(devices).items():
        if device not in plan.cluster.device_names:
            yield f"{field}: unknown device {device!r}; the cluster has no such device"
        if count > 1:
            yield f"{field}: device {device!r} is listed {count} times; list it once"
        held = sum(device in stage.devices for stage in plan.stages)
        first = next(i for i, stage in enumerate(plan.stages) if device in stage.devices)
        if held > plan.job.max_stages_per_device and first == position:
            yield (
                f"{field}: device {device!r} holds {held} stages, "
                f"job.max_stages_per_device is {plan.job.max_stages_per_device}"
            )


def _edges_backwards(plan: Plan, stage_of: dict[str, int]) -> Iterator[str]:
    for tensor in plan.model.graph.boundaries:
        for user in tensor.users:
            if stage_of.get(user, len(plan.stages)) < stage_of.get(tensor.producer, -1):
                yield (
                    f"stages: {tensor.producer!r} (stage {stage_of[tensor.producer]}) feeds "
                    f"{user!r} (stage {stage_of[user]}), an edge backwards; move one of them"
                )


def _ranks(plan: Plan) -> Iterator[str]:
    used = {device for stage in plan.stages for device in stage.devices}
    for device, count in Counter(plan.ranks).items():
        if count > 1:
            yield f"ranks: device {device!r} is listed {count} times"
        if device not in used:
            yield f"ranks: device {device!r} holds no stage; remove it"
    for device in sorted(used - set(plan.ranks)):
        yield f"ranks: device {device!r} holds a stage and has no rank; add it"


def _orders(plan: Plan, orders: dict[str, tuple[Operation, ...]]) -> Iterator[str]:
    seen: Counter[Operation] = Counter()
    ran_on: dict[tuple[int, int], set[str]] = {}
    for device, order in orders.items():
        field = f"orders[{device!r}]"
        if device not in plan.cluster.device_names:
            yield f"{field}: unknown device; the cluster has no such device"
        for operation in order:
            seen[operation] += 1
            ran_on.setdefault((operation.stage, operation.microbatch), set()).add(device)
            yield from _misplaced(plan, device, operation, field)
    for operation, count in seen.items():
        if count > 1:
            yield f"orders: operation {operation} stands {count} times; each runs once"
    for (stage, microbatch), devices in ran_on.items():
        if len(devices) > 1:
            yield (
                f"orders: microbatch {microbatch} of stage {stage} runs on "
                f"{' and '.join(sorted(devices))}; all its operations belong to one replica"
            )
    yield from _missing(plan, seen)


def _misplaced(plan: Plan, device: str, operation: Operation, field: str) -> Iterator[str]:
    if operation.stage >= len(plan.stages):
        yield f"{field}: {operation}: there is no stage {operation.stage}"
    elif device not in plan.stages[operation.stage].devices:
        yield f"{field}: {operation}: device {device!r} does not hold stage {operation.stage}"
    if operation.microbatch >= plan.microbatches:
        yield (
            f"{field}: {operation}: there is no microbatch {operation.microbatch}, "
            f"microbatches is {plan.microbatches}"
        )


def _missing(plan: Plan, seen: Counter[Operation]) -> Iterator[str]:
    for stage in range(len(plan.stages)):
        for microbatch in range(plan.microbatches):
            kinds = "".join(k for k in "FBIW" if seen[Operation(stage, k, microbatch)])  # type: ignore[arg-type]
            if kinds not in ("FB", "FIW"):
                yield (
                    f"orders: microbatch {microbatch} of stage {stage} has "
                    f"{', '.join(kinds) or 'no operation'}; it needs F and then B, or F, I and W"
                )


def _memory(timeline: Timeline) -> Iterator[str]:
    for device, steps in timeline.memory.items():
        capacity = timeline.pipeline.capacity_bytes(device)
        over = next(((time, held) for time, held in steps if held > capacity), None)
        if over:
            kind = timeline.pipeline.problem.cluster.device_type(device)
            peak = max(held for _, held in steps)
            yield (
                f"memory of {device!r}: {over[1] / GIB:.3f} GiB at {over[0]:.6f} s (peak "
                f"{peak / GIB:.3f} GiB), but it has {capacity / GIB:.3f} GiB "
                f"(memory_gib {kind.memory_gib:g} less reserved_gib {kind.reserved_gib:g}); "
                "give it fewer layers or fewer microbatches in flight"
            )


def _predicted(plan: Plan, timeline: Timeline) -> Iterator[str]:
    fresh = predict(timeline, plan.predicted.lower_bound_s)
    remedy = "run `pipeplan simulate PLAN -o PLAN` to write fresh figures"
    for name in ("iteration_time_s", "lower_bound_s", "gap", "bubble"):
        said, found = getattr(plan.predicted, name), getattr(fresh, name)
        if not _close(said, found):
            yield f"predicted.{name}: the plan says {said}, a simulation gives {found}; {remedy}"
    if set(plan.predicted.devices) != set(fresh.devices):
        yield f"predicted.devices: they are not the devices that hold a stage; {remedy}"
        return
    for device, found_row in fresh.devices.items():
        said_row = plan.predicted.devices[device]
        for name in ("busy_s", "peak_memory_bytes"):
            said, found = getattr(said_row, name), getattr(found_row, name)
            if not _close(said, found):
                yield (
                    f"predicted.devices[{device!r}].{name}: the plan says {said:.9g}, "
                    f"a simulation gives {found:.9g}; {remedy}"
                )


def _close(said: float | None, found: float | None) -> bool:
    if said is None or found is None:
        return said is found
    return abs(said - found) <= RELATIVE_TOLERANCE * max(abs(said), abs(found)) + 1e-12
