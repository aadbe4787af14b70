"""Simulation of synchronisation strategies in virtual time, with real training of a small problem.

:func:`from_plan` makes the :class:`World` of a plan, :func:`calibrated` fits one to a measured
trace; :func:`compare_syncs` runs strategies in a :class:`Scenario`.
"""

from planner.sync.simulation.calibration import calibrated
from planner.sync.simulation.comparison import (
    ALL_STRATEGIES,
    SyncComparison,
    SyncResult,
    compare_syncs,
)
from planner.sync.simulation.planned import from_plan
from planner.sync.simulation.run import Scenario, SimulatedRun, simulate_sync, trace_sync
from planner.sync.simulation.slowness import SimulatedFault, Trace, parse_slowness
from planner.sync.simulation.world import LinkCost, PipelineRank, World, uniform_world

__all__ = [
    "ALL_STRATEGIES",
    "LinkCost",
    "PipelineRank",
    "Scenario",
    "SimulatedFault",
    "SimulatedRun",
    "SyncComparison",
    "SyncResult",
    "Trace",
    "World",
    "calibrated",
    "compare_syncs",
    "from_plan",
    "parse_slowness",
    "simulate_sync",
    "trace_sync",
    "uniform_world",
]
