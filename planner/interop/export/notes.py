"""Notes on what an export changes: recomputation, buffers, reductions, the microbatch order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from planner.costs.placement import place_plan
from planner.model.blocks import LOSS
from planner.plan.operations import Operation
from planner.plan.plan import Plan, Stage, Sync
from planner.prediction import replay
from planner.simulation.timeline import Timeline
from planner.units import format_bytes, format_seconds


def recompute_notes(plan: Plan, remedy: str) -> list[str]:
    """Return a line on the plan's recomputation, and the cost of none and of full recomputation.

    Args:
        plan: whose orders stay as they are.
        remedy: how the tool recomputes.
    """
    recomputed = sum(len(stage.recompute) for stage in plan.stages)
    if not recomputed:
        return []
    return [
        f"recompute: {recomputed} of {len(plan.model.graph.layers)} layers are recomputed in the "
        f"plan; the export does not include that, so enable it yourself ({remedy}).  "
        f"{_without(plan)}; with every layer recomputed {_everywhere(plan)}"
    ]


def overfull(timeline: Timeline) -> list[str]:
    """Return a phrase for each device that needs more memory than it has."""
    return [
        f"{device} needs {format_bytes(timeline.peak_memory_bytes[device])} of "
        f"{format_bytes(timeline.pipeline.capacity_bytes(device))}"
        for device in timeline.overflow_bytes
    ]


def _without(plan: Plan) -> str:
    kept = replay(_with_recompute(plan, lambda stage: ()))
    full = overfull(kept)
    if not full:
        return f"Without recomputation everything fits and takes {_times(plan, kept)}"
    return f"Without recomputation {full[0]}" + (
        f", and {len(full) - 1} more overflow" if full[1:] else ""
    )


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
    """Compare a predicted time with the plan's, such as ``231 ms predicted instead of …``."""
    change = f" ({seconds / planned_s - 1:+.1%})" if planned_s > 0 else ""
    return f"{format_seconds(seconds)} predicted instead of {format_seconds(planned_s)}{change}"


def receive_buffer_notes(plan: Plan, microbatches: int) -> list[str]:
    """Return a line on torch's receive buffers for activations and gradients.

    It makes one for every microbatch before the first step and keeps them
    (``PipelineStage._setup_forward_recv_info``, torch 2.13).

    Args:
        plan: any.
        microbatches: of each pipeline.
    """
    placed = place_plan(plan)
    extra_bytes = {
        device: microbatches
        * sum(placed.stages[s].input_bytes + placed.stages[s].output_gradient_bytes for s in stages)
        for device, stages in placed.stages_on.items()
    }
    device = max(extra_bytes, key=lambda name: extra_bytes[name])
    if not extra_bytes[device]:
        return []
    full = [
        name
        for name, extra in extra_bytes.items()
        if plan.predicted.devices[name].peak_memory_bytes + extra > placed.capacity_bytes(name)
    ]
    effect = f"{', '.join(full)} may run out of memory" if full else "all still fits"
    return [
        "torch allocates receive buffers for the activations and gradients of every microbatch: up "
        "to "
        f"{format_bytes(extra_bytes[device])} more than planned, on {device}; {effect}"
    ]


def reduction_notes(plan: Plan, how: str) -> Iterator[str]:
    """Yield a line on a tool that reduces gradients later than the plan, if that takes longer.

    Args:
        plan: verified.
        how: what the tool does.
    """
    if not plan.overlaps:
        return
    options = {**plan.sync.options, "overlap": False}
    later = replay(plan.model_copy(update={"sync": Sync(options=options)}))
    if later.iteration_time_s > plan.predicted.iteration_time_s * (1 + 1e-9):
        yield (
            f"gradients: {how}, where the plan reduces buckets while they run: "
            f"{against(later.iteration_time_s, plan.predicted.iteration_time_s)}"
        )


def order_notes(tool: str, name: str, plan: Plan, theirs: Timeline) -> Iterator[str]:
    """Yield a line on how a tool's order compares, unless the time is the same.

    Args:
        tool: that has one order only.
        name: of that order.
        plan: verified.
        theirs: its stages simulated in that order.
    """
    ours = replay(plan)
    before_s, after_s = ours.iteration_time_s, theirs.iteration_time_s
    if _orders_of(ours) == _orders_of(theirs) and abs(after_s - before_s) <= 1e-9 * before_s:
        yield f"{tool} runs the plan's own order, {name}"
    elif format_seconds(after_s) != format_seconds(before_s):
        yield f"{tool} runs {name} instead of the planned order: {against(after_s, before_s)}"


def _orders_of(timeline: Timeline) -> dict[str, list[Operation]]:
    """Return the operations that ran on each device, in order."""
    orders: dict[str, list[Operation]] = {}
    for event in timeline.operations:
        orders.setdefault(event.device, []).append(event.operation)
    return orders
