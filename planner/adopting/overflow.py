"""Adopted plans that do not fit into memory: where, by how much, and what is known to help."""

from __future__ import annotations

from collections.abc import Iterator

from planner.adopting.adopt import Adopted, placed
from planner.adopting.orders import orders_that_apply
from planner.artifacts.names import compress_devices, stages_label
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
    """Replicas that lack the same in one line."""
    pipeline = timeline.pipeline
    alike: dict[tuple[tuple[int, ...], int, int], list[str]] = {}
    for device, over in timeline.overflow_bytes.items():
        row = (pipeline.stages_on[device], timeline.peak_memory_bytes[device], over)
        alike.setdefault(row, []).append(device)
    for (stages, peak, over), devices in alike.items():
        static = sum(pipeline.stages[stage].static_bytes for stage in stages)
        yield (
            f"{stages_label(stages)} on {compress_devices(devices)}: {format_bytes(peak)} at the "
            f"peak, {format_bytes(static)} of it weights, gradients and optimizer state; there is "
            f"{format_bytes(peak - over)}, {format_bytes(over)} too little"
        )


def _advice(adopted: Adopted, pipeline: PlacedPipeline) -> str:
    """What was tried out and fits."""
    return (
        f"{_what_fits(adopted, pipeline)}; --allow-overflow writes the plan as it is, for "
        "`pipeplan explain`"
    )


def _what_fits(adopted: Adopted, pipeline: PlacedPipeline) -> str:
    division = tuple(stage.layers for stage in adopted.plan.stages)
    problem, helps = adopted.plan.problem, _schedules_that_fit(pipeline, adopted)
    recomputes = any(stage.spec.recompute for stage in pipeline.stages)
    if problem.job.recompute and not recomputes:
        again = placed(problem, division, adopted.lanes, recompute=True)
        if _fits(again, adopted.plan.parsed_orders()):
            helps = ["--recompute", *helps]
        elif not helps:
            helps = [f"--recompute {names}" for names in _schedules_that_fit(again, adopted)]
    if helps:
        return f"it would fit with {' or '.join(helps)}"
    return (
        "neither --recompute nor another schedule of these stages fits: use more stages, smaller "
        "microbatches (samples_per_microbatch), a lighter optimizer or larger devices"
    )


def _schedules_that_fit(pipeline: PlacedPipeline, adopted: Adopted) -> list[str]:
    """The option that names published schedules of the same stages within memory, if any is."""
    applying = orders_that_apply(pipeline, adopted.lanes)
    names = [name for name, orders in applying if _fits(pipeline, orders)]
    return [f"--schedule {', '.join(names)}"] if names else []


def _fits(pipeline: PlacedPipeline, orders: Orders) -> bool:
    """Rules for other stages may deadlock with these."""
    try:
        return fits_memory(simulate(pipeline, orders))
    except DeadlockError:
        return False
