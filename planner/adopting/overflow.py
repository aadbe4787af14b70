"""Adopted plans that do not fit into memory: where, by how much, and what is known to help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.adopting.adopt import Adopted, placed
from planner.adopting.orders import orders_that_apply
from planner.artifacts.names import stages_label
from planner.costs.placement import PlacedPipeline
from planner.errors import DeadlockError
from planner.schedule.heuristic import fits_memory
from planner.simulator import Orders, Timeline, simulate
from planner.units import format_bytes
from planner.verifier import replay


def overflow_problems(adopted: Adopted) -> list[str]:
    """One line for each device that holds too much, and one of what helps; empty if all fits."""
    timeline = replay(adopted.plan)
    problems = list(_overflows(timeline))
    return [*problems, _advice(adopted, timeline.pipeline)] if problems else []


def _overflows(timeline: Timeline) -> Iterator[str]:
    pipeline = timeline.pipeline
    for device, peak in timeline.peak_memory_bytes.items():
        capacity = pipeline.capacity_bytes(device)
        if peak > capacity:
            static = sum(pipeline.stages[s].static_bytes for s in pipeline.stages_on[device])
            yield (
                f"{stages_label(pipeline.stages_on[device])} on {device!r} needs "
                f"{format_bytes(peak)} at its peak, {format_bytes(static)} of it weights, "
                f"gradients and optimizer state; it has {format_bytes(capacity)}, "
                f"{format_bytes(peak - capacity)} too little"
            )


def _advice(adopted: Adopted, pipeline: PlacedPipeline) -> str:
    """What was tried out and fits."""
    problem = adopted.plan.problem
    division = [stage.layers for stage in adopted.plan.stages]
    recomputes = any(stage.recompute for stage in adopted.plan.stages)
    helps = _schedules_that_fit(pipeline, adopted.lanes)
    if problem.job.recompute and not recomputes:
        again = placed(problem, tuple(division), adopted.lanes, recompute=True)
        if _fits(again, adopted.plan.parsed_orders()):
            helps = ["--recompute", *helps]
        elif not helps:
            helps = [f"--recompute with {x}" for x in _schedules_that_fit(again, adopted.lanes)]
    if helps:
        return f"it would fit with {' or '.join(helps)}"
    return (
        "neither --recompute nor another schedule of these stages fits: use more stages, smaller "
        "microbatches (samples_per_microbatch), a lighter optimizer or larger devices; "
        "--allow-overflow writes the plan all the same, for `pipeplan explain`"
    )


def _schedules_that_fit(pipeline: PlacedPipeline, lanes: Sequence[Sequence[str]]) -> list[str]:
    """Published schedules of the same stages that keep within memory."""
    return [
        f"--schedule {name}"
        for name, orders in orders_that_apply(pipeline, tuple(map(tuple, lanes)))
        if _fits(pipeline, orders)
    ]


def _fits(pipeline: PlacedPipeline, orders: Orders) -> bool:
    """Rules for other stages may deadlock with these."""
    try:
        return fits_memory(simulate(pipeline, orders))
    except DeadlockError:
        return False
