"""Placements of stages on devices that published schedules ask for."""

from __future__ import annotations

from planner.costs.placed_pipeline import PlacedPipeline


class DoesNotApplyError(ValueError):
    """The schedule is not defined for such a placement of stages, or for so few microbatches."""


def require_one_stage_a_device(pipeline: PlacedPipeline) -> None:
    """Raise DoesNotApplyError where a device holds several stages."""
    if pipeline.shares_devices:
        raise DoesNotApplyError("a device holds several stages")


def require_no_replicas(pipeline: PlacedPipeline) -> None:
    """Raise DoesNotApplyError where a stage has several devices."""
    if pipeline.has_replicas:
        raise DoesNotApplyError("a stage has replicas")


def loop_of(pipeline: PlacedPipeline) -> tuple[str, ...]:
    """Return the D devices around which the stages loop: stage s is on device s mod D.

    Raises:
        DoesNotApplyError: if they do not, or go around once only.
    """
    devices = _devices(pipeline)
    loop = tuple(dict.fromkeys(devices))
    if len(devices) == len(loop) or devices != loop * (len(devices) // len(loop)):
        raise DoesNotApplyError("the stages do not go round the devices several times")
    return loop


def v_of(pipeline: PlacedPipeline) -> tuple[str, ...]:
    """Return the D devices of a V: stages s and 2D-1-s are on device s.

    Raises:
        DoesNotApplyError: if the stages are not placed so.
    """
    devices = _devices(pipeline)
    half = devices[: len(devices) // 2]
    if devices != half + half[::-1] or len(set(half)) < len(half):
        raise DoesNotApplyError("the stages do not go down the devices and up again")
    return half


def _devices(pipeline: PlacedPipeline) -> tuple[str, ...]:
    require_no_replicas(pipeline)
    return tuple(stage.spec.devices[0] for stage in pipeline.stages)
