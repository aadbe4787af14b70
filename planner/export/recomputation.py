"""What it costs that a tool does not recompute the layers that a plan does."""

from __future__ import annotations

from collections.abc import Callable

from planner.artifacts.plan import Plan, Stage
from planner.export.cuts import LOSS
from planner.simulator import Timeline
from planner.units import format_bytes, format_seconds
from planner.verifier import replay


def recompute_notes(plan: Plan, remedy: str) -> list[str]:
    """A line on the plan's recomputation, with what it takes without it and with all of it.

    Args:
        plan: whose orders stay as they are.
        remedy: how the tool recomputes.
    """
    recomputed = sum(len(stage.recompute) for stage in plan.stages)
    if not recomputed:
        return []
    return [
        f"recompute: {recomputed} of {len(plan.model.graph.layers)} layers run again in the "
        f"backward; that is not carried, so recompute them yourself ({remedy}). "
        f"{_without(plan)}; with every layer recomputed {_everywhere(plan)}"
    ]


def overfull(timeline: Timeline) -> list[str]:
    """Devices that need more memory than they have, a phrase each."""
    return [
        f"{device} needs {format_bytes(timeline.peak_memory_bytes[device])} of "
        f"{format_bytes(timeline.pipeline.capacity_bytes(device))}"
        for device in timeline.overflow_bytes
    ]


def _without(plan: Plan) -> str:
    kept = replay(_with_recompute(plan, lambda stage: ()))
    full = overfull(kept)
    if not full:
        return f"Without it all fits, in {_times(plan, kept)}"
    return f"Without it {full[0]}" + (f", and {len(full) - 1} more overflow" if full[1:] else "")


def _everywhere(plan: Plan) -> str:
    return _times(plan, replay(_with_recompute(plan, _all_but_loss)))


def _all_but_loss(stage: Stage) -> tuple[str, ...]:
    return tuple(name for name in stage.layers if name != LOSS)


def _with_recompute(plan: Plan, choose: Callable[[Stage], tuple[str, ...]]) -> Plan:
    stages = tuple(stage.model_copy(update={"recompute": choose(stage)}) for stage in plan.stages)
    return plan.model_copy(update={"stages": stages})


def _times(plan: Plan, timeline: Timeline) -> str:
    return against(timeline.iteration_time_s, plan.predicted.iteration_time_s)


def against(seconds: float, planned_s: float) -> str:
    """A predicted iteration time in place of the plan's, such as ``231 ms predicted in …``."""
    change = f" ({seconds / planned_s - 1:+.1%})" if planned_s > 0 else ""
    return f"{format_seconds(seconds)} predicted in place of {format_seconds(planned_s)}{change}"
