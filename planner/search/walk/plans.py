"""From a layout that a walk has found to stages with a simulation of their orders."""

from __future__ import annotations

from dataclasses import replace

from planner.costs.placement import place
from planner.costs.stage_table import StageTable
from planner.program.layout import Layout
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


def timeline_of(layout: Layout, table: StageTable) -> Timeline:
    """Return the simulation of a layout; :func:`planner.assembly.assemble_plan` makes a plan of it.

    Replicas that run no microbatch are left out: others may have a use for their devices, and they
    take part in reductions. They stay where they share state that memory has no room for without.

    Args:
        layout: stages, devices and orders.
        table: of the problem.

    Raises:
        PipeplanError: if devices that exchange messages have no path.
        DeadlockError: if the orders wait for each other.
    """
    stages, orders = list(layout.specs(table)), layout.operations(table)
    runs = {(row.stage, name) for name, order in orders.items() for row in order}
    used = [
        replace(spec, devices=tuple(name for name in spec.devices if (stage, name) in runs))
        for stage, spec in enumerate(stages)
    ]
    if used != stages:
        lean = {name: order for name, order in orders.items() if order}
        found = simulate(place(table.problem, used), lean)
        if not found.overflow_bytes:
            return found
    return simulate(place(table.problem, stages), orders)
