"""What crosses the cuts between the stages of a plan."""

from __future__ import annotations

from planner.artifacts.graph_record import Boundary
from planner.artifacts.plan import Plan

LOSS = "loss"
"""The name that the tracer gives the layer of the loss; other tools add the loss themselves."""


def stage_of_layer(plan: Plan) -> dict[str, int]:
    """The stage of every layer."""
    return {layer: stage.index for stage in plan.stages for layer in stage.layers}


def crossing(plan: Plan) -> tuple[tuple[Boundary, ...], ...]:
    """For each cut, between a stage and the next, the tensors made before and used after it."""
    stage_of = stage_of_layer(plan)
    spans = [
        (tensor, stage_of[tensor.producer], max(stage_of[user] for user in tensor.users))
        for tensor in plan.model.graph.boundaries
    ]
    return tuple(
        tuple(tensor for tensor, first, last in spans if first <= cut < last)
        for cut in range(len(plan.stages) - 1)
    )


def skipping(plan: Plan) -> tuple[tuple[Boundary, int, int], ...]:
    """Tensors that go past the next stage: each with the stage that makes it and its last user."""
    stage_of = stage_of_layer(plan)
    rows = [
        (tensor, stage_of[tensor.producer], max(stage_of[user] for user in tensor.users))
        for tensor in plan.model.graph.boundaries
    ]
    return tuple((tensor, first, last) for tensor, first, last in rows if last - first > 1)


def tied_across_stages(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Parameters that layers of several stages use, by FQN, with these stages."""
    stages: dict[str, set[int]] = {}
    stage_of = stage_of_layer(plan)
    trainable = {row.name for row in plan.model.graph.parameters if row.trainable}
    for layer in plan.model.graph.layers:
        for name in trainable.intersection(layer.parameters):
            stages.setdefault(name, set()).add(stage_of[layer.name])
    return {name: tuple(sorted(found)) for name, found in stages.items() if len(found) > 1}


def loss_problems(plan: Plan, tool: str) -> list[str]:
    """The loss belongs to the last stage, and that needs a layer beside it."""
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
            f"module: {tool} computes it behind the last one; move a layer to it, or merge it with "
            "the stage before"
        ]
    return []
