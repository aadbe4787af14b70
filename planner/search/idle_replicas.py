"""Schedules without replicas that run no microbatch: these would only take part in reductions."""

from __future__ import annotations

from dataclasses import replace

from planner.costs.placement import place
from planner.search.schedule.heuristic import Schedule, fits_memory
from planner.simulation.simulator import reduced_soonest, simulate

ROUNDING = 1e-12
"""Times that are longer by no larger share are longer by rounding alone."""


def without_idle_replicas(schedule: Schedule) -> Schedule:
    """Return the same orders of stages that hold only devices which run something of them.

    The schedule itself is returned where none is idle, or where the others are no quicker or have
    too little memory without: idle replicas may hold a share of the optimizer's state.
    """
    pipeline = schedule.timeline.pipeline
    runs = {(operation.stage, name) for name, row in schedule.orders.items() for operation in row}
    before = [stage.spec for stage in pipeline.stages]
    specs = [
        replace(spec, devices=tuple(name for name in spec.devices if (stage, name) in runs))
        for stage, spec in enumerate(before)
    ]
    if specs == before:
        return schedule
    orders = {name: row for name, row in schedule.orders.items() if row}
    placed = place(pipeline.problem, specs, pipeline.sync, pipeline.groups)
    found = Schedule(orders, reduced_soonest(simulate(placed, orders)), schedule.method)
    is_slower = found.iteration_time_s > schedule.iteration_time_s * (1 + ROUNDING)
    return schedule if is_slower or not fits_memory(found.timeline) else found
