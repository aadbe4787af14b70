"""What torch's pipeline runtime holds beyond what a plan counts."""

from __future__ import annotations

from planner.artifacts.plan import Plan
from planner.costs.placement import place_plan
from planner.units import format_bytes


def receive_buffer_notes(plan: Plan, microbatches: int) -> list[str]:
    """A line on the buffers in which torch receives activations and gradients.

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
        "torch keeps buffers to receive every microbatch's activations and gradients: up to "
        f"{format_bytes(extra_bytes[device])} more than planned, on {device}; {effect}"
    ]
