"""What crosses the cuts between the stages of a plan."""

from __future__ import annotations

from planner.artifacts.graph_record import Boundary
from planner.artifacts.plan import Plan

Span = tuple[Boundary, int, int]
"""A tensor, the stage that makes it, and the last stage that uses it."""
LOSS = "loss"
"""The name that the tracer gives the layer of the loss; other tools add the loss themselves."""


def stage_of_layer(plan: Plan) -> dict[str, int]:
    """The stage of every layer."""
    return {layer: stage.index for stage in plan.stages for layer in stage.layers}


def layers_in_order(plan: Plan) -> list[list[str]]:
    """The layers of each stage in executable order; a plan may list them in any."""
    place = {layer.name: index for index, layer in enumerate(plan.model.graph.layers)}
    return [sorted(stage.layers, key=place.__getitem__) for stage in plan.stages]


def crossing(plan: Plan) -> tuple[tuple[Boundary, ...], ...]:
    """For each cut, between a stage and the next, the tensors made before and used after it."""
    spans = _spans(plan)
    return tuple(
        tuple(tensor for tensor, first, last in spans if first <= cut < last)
        for cut in range(len(plan.stages) - 1)
    )


def skipping(plan: Plan) -> tuple[Span, ...]:
    """Tensors that go past the next stage."""
    return tuple(span for span in _spans(plan) if span[2] - span[1] > 1)


def _spans(plan: Plan) -> list[Span]:
    stage_of = stage_of_layer(plan)
    return [
        (tensor, stage_of[tensor.producer], max(stage_of[user] for user in tensor.users))
        for tensor in plan.model.graph.boundaries
    ]


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
