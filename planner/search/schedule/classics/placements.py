"""Placements of stages on devices that published schedules ask for."""

from __future__ import annotations

from planner.costs.placed_pipeline import PlacedPipeline


class DoesNotApplyError(ValueError):
    """The schedule is not defined for such a placement of stages, or for so few microbatches."""


def require_one_stage_a_device(pipeline: PlacedPipeline) -> None:
    """Raise DoesNotApplyError where a device holds several stages."""
    if any(len(stages) > 1 for stages in pipeline.stages_on.values()):
        raise DoesNotApplyError("a device holds several stages")


def require_no_replicas(pipeline: PlacedPipeline) -> None:
    """Raise DoesNotApplyError where a stage has several devices."""
    if any(len(stage.spec.devices) > 1 for stage in pipeline.stages):
        raise DoesNotApplyError("a stage has replicas")


def loop_of(pipeline: PlacedPipeline) -> tuple[str, ...]:
    """Return the D devices around which the stages loop: stage s on device s mod D."""
    devices = _holders(pipeline)
    loop = tuple(dict.fromkeys(devices))
    rounds, rest = divmod(len(devices), len(loop))
    if rest or rounds < 2 or devices != loop * rounds:
        raise DoesNotApplyError("the stages do not go round the devices several times")
    return loop


def v_of(pipeline: PlacedPipeline) -> tuple[str, ...]:
    """Return the D devices of a V: stages s and 2D-1-s on device s."""
    devices = _holders(pipeline)
    half = devices[: len(devices) // 2]
    if devices != half + half[::-1] or len(set(half)) < len(half):
        raise DoesNotApplyError("the stages do not go down the devices and up again")
    return half


def _holders(pipeline: PlacedPipeline) -> tuple[str, ...]:
    require_no_replicas(pipeline)
    return tuple(stage.spec.devices[0] for stage in pipeline.stages)
