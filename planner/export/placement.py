"""How the stages of a plan lie on devices, as far as other tools have a word for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from planner.artifacts.plan import Plan
from planner.errors import PipeplanError
from planner.sync.lanes import Lane, lanes_of
from planner.units import and_more

Style = Literal["loop", "v"]
Way = tuple[str, ...]
"""The device of every stage, of one pipeline."""


def ways_of(plan: Plan, lanes: Sequence[Lane]) -> tuple[Way, ...]:
    """The device of every stage, for each pipeline."""
    return tuple(
        tuple(next(d for d in stage.devices if d in lane.devices) for stage in plan.stages)
        for lane in lanes
    )


def ways_by_place(plan: Plan) -> tuple[Way, ...]:
    """The device of every stage, for the i-th replicas of all stages: pipelines to be made of them.

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
        return ways_of(plan, lanes_of(plan))
    except PipeplanError:  # Microbatches change from one pipeline to another.
        return tuple(zip(*(stage.devices for stage in plan.stages), strict=True))


def style_of(way: Way) -> Style | None:
    """Whether stages go round the devices (stage s on device s mod D) or down and up again (a V).

    One stage a device is a loop of one round. None where the stages lie in another way.
    """
    loop = tuple(dict.fromkeys(way))
    rounds, rest = divmod(len(way), len(loop))
    if not rest and way == loop * rounds:
        return "loop"
    half = way[: len(way) // 2]
    return "v" if way == half + half[::-1] and len(set(half)) == len(half) else None


def replicated_problems(plan: Plan, tool: str) -> list[str]:
    """That several devices hold a stage, for a tool that knows none of that; one line or none.

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
        f"{tool} has one rank a stage; plan again with replication = false in the job"
    ]
