"""From a layout that a walk has found to stages with a simulation of their orders."""

from __future__ import annotations

from planner.costs.placement import place
from planner.costs.stage_table import StageTable
from planner.program.layout import Layout
from planner.simulation.simulator import simulate
from planner.simulation.timeline import Timeline


def timeline_of(layout: Layout, table: StageTable) -> Timeline:
    """Return the simulation of a layout; :func:`planner.assembly.assemble_plan` makes a plan of it.

    Args:
        layout: stages, devices and orders.
        table: of the problem.

    Raises:
        PipeplanError: if devices that exchange messages have no path.
        DeadlockError: if the orders wait for each other.
    """
    placed = place(table.problem, list(layout.specs(table)))
    return simulate(placed, layout.operations(table))
