"""What crosses the cuts between stages, and how stages are placed on devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from planner.errors import PipeplanError
from planner.model.blocks import LOSS
from planner.model.graph_record import Boundary
from planner.plan.plan import Plan
from planner.sync.pipeline_replicas import PipelineReplica, pipeline_replicas_of
from planner.units import and_more

Span = tuple[Boundary, int, int]
"""A tensor, the stage that makes it, and the last stage that uses it."""


def stage_of_layer(plan: Plan) -> dict[str, int]:
    """Return the stage of every layer."""
    return {layer: stage.index for stage in plan.stages for layer in stage.layers}


def crossing(plan: Plan) -> tuple[tuple[Boundary, ...], ...]:
    """Return for each cut the tensors that are made before it and used after it."""
    spans = _spans(plan)
    return tuple(
        tuple(tensor for tensor, first, last in spans if first <= cut < last)
        for cut in range(len(plan.stages) - 1)
    )


def skipping(plan: Plan) -> tuple[Span, ...]:
    """Return tensors that go past the next stage."""
    return tuple(span for span in _spans(plan) if span[2] - span[1] > 1)


def _spans(plan: Plan) -> list[Span]:
    stage_of = stage_of_layer(plan)
    return [
        (tensor, stage_of[tensor.producer], max(stage_of[user] for user in tensor.users))
        for tensor in plan.model.graph.boundaries
    ]


def tied_across_stages(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return parameters that layers of several stages use, by FQN, with these stages."""
    stages: dict[str, set[int]] = {}
    stage_of = stage_of_layer(plan)
    trainable = {row.name for row in plan.model.graph.parameters if row.trainable}
    for layer in plan.model.graph.layers:
        for name in trainable.intersection(layer.parameters):
            stages.setdefault(name, set()).add(stage_of[layer.name])
    return {name: tuple(sorted(found)) for name, found in stages.items() if len(found) > 1}


def loss_problems(plan: Plan, tool: str) -> list[str]:
    """Return a line if the loss layer is not in the last stage together with another layer."""
    stage = stage_of_layer(plan).get(LOSS)
    last = len(plan.stages) - 1
    if stage is None:
        return []
    if stage != last:
        return [
            f"stages[{stage}].layers: the layer {LOSS!r} is in stage {stage}, but {tool} computes "
            f"the loss in the last stage, {last}; move it there"
        ]
    if plan.stages[last].layers == (LOSS,):
        return [
            f"stages[{last}].layers: the last stage holds only the layer {LOSS!r}, which is no "
            f"module: {tool} computes it after the last one; move a layer to it, or merge it with "
            "the stage before"
        ]
    return []


Style = Literal["loop", "v"]
StageDevices = tuple[str, ...]
"""The device of every stage, of one pipeline."""


def stage_devices_of(plan: Plan, replicas: Sequence[PipelineReplica]) -> tuple[StageDevices, ...]:
    """Return the device of every stage, for each pipeline."""
    return tuple(
        tuple(next(d for d in stage.devices if d in replica.devices) for stage in plan.stages)
        for replica in replicas
    )


def stage_devices_by_replica(plan: Plan) -> tuple[StageDevices, ...]:
    """Return the device of every stage, for the i-th replicas of all stages.

    The plan's own pipelines where it has some.

    Raises:
        PipeplanError: if stages have different numbers of replicas.
    """
    counts = {len(stage.devices) for stage in plan.stages}
    if len(counts) > 1:
        rows = ", ".join(f"{stage.index}: {len(stage.devices)}" for stage in plan.stages)
        raise PipeplanError(
            f"stages: they have different numbers of replicas ({rows}), but data parallelism has "
            "as many of each; plan again with `--sync semi_decentralized`, which makes whole "
            "pipelines, or with replication = false in the job"
        )
    try:
        return stage_devices_of(plan, pipeline_replicas_of(plan))
    except PipeplanError:  # Microbatches change from one pipeline to another.
        return tuple(zip(*(stage.devices for stage in plan.stages), strict=True))


def style_of(by_stage: StageDevices) -> Style | None:
    """Return whether stages form a loop (stage s on device s mod D) or a V (down and up again).

    One stage per device is a loop of one round. None if the stages are placed otherwise.
    """
    loop = tuple(dict.fromkeys(by_stage))
    rounds, rest = divmod(len(by_stage), len(loop))
    if not rest and by_stage == loop * rounds:
        return "loop"
    half = by_stage[: len(by_stage) // 2]
    return "v" if by_stage == half + half[::-1] and len(set(half)) == len(half) else None


def replicated_problems(plan: Plan, tool: str) -> list[str]:
    """Return a line if stages have replicas, for a tool without data parallelism.

    Args:
        plan: any.
        tool: as the line names it.
    """
    found = [stage for stage in plan.stages if len(stage.devices) > 1]
    if not found:
        return []
    first = found[0]
    more = and_more(len(found) - 1, "stage")
    return [
        f"stages[{first.index}].devices: {len(first.devices)} replicas "
        f"({', '.join(first.devices[:4])}{', …' if len(first.devices) > 4 else ''}){more}, but "
        f"{tool} has one rank per stage; plan again with replication = false in the job"
    ]
